"""Verify that parallel layouts compute what one process computes.

Each test case of a matrix of layouts trains a tiny model for three steps on up to eight CPU processes. Its loss,
gradient norm, parameter gradients and final parameters are compared with those of one process. With --communication,
the torch.distributed calls of all ranks are recorded and checked against NCCL's rules instead. With --emulate-cuda the
ranks run on the emulated CUDA devices of tests/emulated_cuda.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

# One thread per process: eight processes that each use all cores would slow each other down.
os.environ["OMP_NUM_THREADS"] = "1"

from megatron.cli.arguments import Parser, report_unused
from megatron.core.broken_pipe import reader_may_leave
from megatron.core.console import ProgressBar
from megatron.verification import (
    ATTENTION_SHAPES,
    EXPERT_SHAPES,
    HYBRID_SHAPES,
    LATENT_SHAPES,
    MAX_WORLD_SIZE,
    PREDICTION_SHAPES,
    SHAPES,
    SPARSE_SHAPES,
    Cell,
    attention_matrix,
    expert_matrix,
    fuzz,
    hybrid_matrix,
    latent_matrix,
    matrix,
    odd_matrix,
    prediction_matrix,
    recipe_matrix,
    sharding_matrix,
)

if TYPE_CHECKING:
    from megatron.verification import Tolerance, Verifier

    OpenVerifier = Callable[[int, str, Tolerance | None], AbstractContextManager[Verifier]]

EMULATED_PROGRAM = Path(__file__).resolve().parents[2] / "tests/emulated_cuda/verify_parallelism.py"
"""Script that runs this command on emulated devices; it exists only in a checkout."""


def build_parser() -> Parser:
    """Build the command's parser."""
    parser = Parser(
        prog="verify_parallelism.py", description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help="only test cases whose name contains every word of TEXT; with --fuzz, '#7' is random case number 7",
    )
    of_attention = (*LATENT_SHAPES, *SPARSE_SHAPES, *ATTENTION_SHAPES)
    parser.add_argument(
        "--shape",
        choices=(*SHAPES, *EXPERT_SHAPES, *PREDICTION_SHAPES, *of_attention, *HYBRID_SHAPES),
        help="only this model shape",
    )
    parser.add_argument(
        "--max-world-size", type=int, default=MAX_WORLD_SIZE, metavar="N", help="only cases of up to N ranks"
    )
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative tolerance (default: by dtype; bfloat16 compares errors with those of one process)",
    )
    parser.add_argument("--fuzz", type=int, metavar="N", help="N random configurations instead of the matrix")
    parser.add_argument("--seed", type=int, default=0, help="seed of --fuzz")
    parser.add_argument(
        "--communication", action="store_true", help="only check each case's communication against NCCL's rules"
    )
    parser.add_argument(
        "--emulate-cuda",
        nargs="?",
        const="h100",
        metavar="GPU",
        help="run the ranks on emulated CUDA devices with emulated NCCL, check their streams, and compare with one CPU "
        "process (see docs/development/emulated_cuda.md); GPU is a100, h100 (default), h200 or b200",
    )
    parser.add_argument(
        "--emulated-triton",
        choices=("interpreter", "absent"),
        help="with --emulate-cuda, run Triton kernels in Triton's interpreter, or use torch operators instead (absent "
        "for float64, which no Triton kernel supports, otherwise interpreter)",
    )
    parser.add_argument("--list", action="store_true", help="list the test cases and exit")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a wrong command line prints one line and exits with status 2."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.fuzz is None:
        report_unused(parser, arguments, "--fuzz", ("seed",))
    elif arguments.fuzz < 1:
        parser.error(f"--fuzz {arguments.fuzz} selects no configuration; use 1 or more, or omit it")
    tolerance = arguments.tolerance
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        parser.error(f"--tolerance {tolerance} is not a number of 0 or more")
    if arguments.emulate_cuda is None:
        report_unused(parser, arguments, "--emulate-cuda", ("emulated_triton",))
    elif arguments.communication:
        parser.error("--communication starts no ranks, so --emulate-cuda has no effect; omit one of them")
    elif arguments.emulated_triton is None:
        arguments.emulated_triton = "absent" if arguments.dtype == "float64" else "interpreter"
    return arguments


def choose_cells(arguments: argparse.Namespace) -> list[Cell]:
    """Return the test cases that the command line selects."""
    of_models = (*expert_matrix(), *prediction_matrix(), *latent_matrix(), *attention_matrix(), *hybrid_matrix())
    proved = [*matrix(), *of_models, *sharding_matrix(), *recipe_matrix(), *odd_matrix()]
    cells = fuzz(arguments.seed, arguments.fuzz) if arguments.fuzz else proved
    words = arguments.filter.split()
    return [
        cell
        for cell in cells
        if cell.world_size <= arguments.max_world_size
        and all(fits(cell, word) for word in words)
        and (arguments.shape is None or cell.name.split()[0 if not arguments.fuzz else 1] == arguments.shape)
    ]


def fits(cell: Cell, word: str) -> bool:
    """Return whether a case's name contains a word; the number of a random case, ``#7``, must match exactly."""
    return word == cell.name.split()[0] if word.startswith("#") else word in cell.name


def main(argv: Sequence[str] | None = None, open_verifier: OpenVerifier | None = None) -> int:
    """Verify and return the exit status: 0 if every case passed, 1 if a case failed, 2 for wrong usage.

    ``open_verifier`` makes the verifier for a number of ranks, a dtype and a tolerance; the default uses CPU processes.
    """
    arguments = parse_arguments(argv)
    cells = choose_cells(arguments)
    if not cells:
        print("error: no test case matches; --list prints all of them", file=sys.stderr)
        return 2
    if arguments.list:
        with reader_may_leave():
            print("\n".join(cell.name for cell in cells))
        return 0
    if arguments.communication:
        return replay_communication(cells, is_random=arguments.fuzz is not None)
    if open_verifier is not None:
        return verify(cells, arguments, open_verifier)
    if arguments.emulate_cuda is not None:
        return _verify_on_emulated_devices(sys.argv[1:] if argv is None else argv)
    return verify(cells, arguments, _open_cpu_verifier)


def _verify_on_emulated_devices(argv: Sequence[str]) -> int:
    """Replace this process with the command on emulated devices; return 2 if the emulator is absent."""
    if not EMULATED_PROGRAM.exists():
        print(
            f"error: --emulate-cuda needs the emulator of the repository, but {EMULATED_PROGRAM} does not exist; run "
            "tools/verify_parallelism.py of a checkout",
            file=sys.stderr,
        )
        return 2
    sys.stdout.flush()
    # torch loads the emulator only when it is imported, so the process is replaced.
    os.execv(sys.executable, [sys.executable, str(EMULATED_PROGRAM), *argv])


@contextmanager
def _open_cpu_verifier(size: int, dtype: str, tolerance: Tolerance | None) -> Iterator[Verifier]:
    from megatron.training import forward_step, provide_model
    from megatron.verification import Verifier, WorkerPool

    with WorkerPool(size) as pool:
        yield Verifier(pool, provide_model, forward_step, dtype, tolerance)


def replay_communication(cells: Sequence[Cell], is_random: bool) -> int:
    """Record and replay the cases; print one line per case and one line per violated rule."""
    from megatron.core.errors import ConfigurationError, TrainingError
    from megatron.training import forward_step, provide_model
    from megatron.verification import communication_problems, record_cell

    counts = {"passed": 0, "failed": 0, "refused": 0}
    bar = ProgressBar()
    for number, cell in enumerate(cells):
        bar.show("replaying", number, len(cells), cell.name)
        try:
            logs = record_cell(cell, provide_model, forward_step)
        except ConfigurationError as error:
            outcome, reasons = "refused", list(error.problems)
        except TrainingError as error:
            outcome, reasons = "failed", str(error).splitlines()
        else:
            reasons = communication_problems(logs)
            outcome = "failed" if reasons else "passed"
        counts[outcome] += 1
        bar.clear()
        print("\n".join((f"{outcome:8}{cell.name}", *(f"        {reason}" for reason in reasons))), flush=True)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['refused']} rejected at parse time")
    return 1 if counts["failed"] or (counts["refused"] and not is_random) else 0


def verify(cells: Sequence[Cell], arguments: argparse.Namespace, open_verifier: OpenVerifier) -> int:
    """Run the cases and print one line per case."""
    from megatron.verification import ALLOWED_MULTIPLE, NOT_HELD, Tolerance

    counts = {"passed": 0, "failed": 0, "refused": 0}
    start_time = time.perf_counter()
    tolerance = None if arguments.tolerance is None else Tolerance.of_all(arguments.tolerance)
    worst = [0.0] * 4
    with open_verifier(max(cell.world_size for cell in cells), arguments.dtype, tolerance) as verifier:
        bar = ProgressBar()
        for number, cell in enumerate(cells):
            bar.show("verifying", number, len(cells), cell.name)
            report = verifier.check(cell)
            bar.clear()
            counts[report.outcome] += 1
            worst = [max(pair) for pair in zip(worst, report.differences)]
            print(report.describe(), flush=True)
    elapsed_s = time.perf_counter() - start_time
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['refused']} rejected at parse time, "
        f"{arguments.dtype}, {elapsed_s:.0f} s"
    )
    allowed = verifier.tolerance
    if allowed is None:
        print(
            f"worst error relative to float64, as a multiple of the error of one process ({ALLOWED_MULTIPLE:g} is "
            f"allowed): loss {worst[0]:.2f}, norm {worst[1]:.2f}, gradients {worst[2]:.2f}, parameters {worst[3]:.2f}"
        )
    else:
        print(
            f"worst relative difference (allowed): loss {worst[0]:.1e} ({allowed.loss:.0e}), norm {worst[1]:.1e} "
            f"({allowed.norm:.0e}), gradients {worst[2]:.1e} ({allowed.gradient:.0e}), parameters {worst[3]:.1e} "
            f"({'any' if allowed.parameter == NOT_HELD else f'{allowed.parameter:.0e}'})"
        )
    # Every layout of the matrix must run; a random configuration may be invalid and is then rejected.
    return 1 if counts["failed"] or (counts["refused"] and not arguments.fuzz) else 0
