"""Dry runs in one more process, since the library that replaces CUDA must be loaded before torch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class DryRunCase:
    """Name a command line, and the rank of its world that is run; the last of its steps is reported.

    ``has_triton`` says that the simulated node has Triton, and ``has_package`` that this one has.
    """

    name: str
    flags: tuple[str, ...]
    world_size: int = 1
    rank: int = 0
    gpu: str = "h100-80gb"
    num_steps: int = 1
    has_triton: bool = True
    has_package: bool = True


@dataclass(frozen=True)
class DryRunResult:
    """Hold what a case recorded in its last step, or the error that ended it and the line of the project."""

    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_dry_runs(cases: Sequence[DryRunCase]) -> dict[str, DryRunResult]:
    """Return the results by name."""
    if _worker().poll() is not None:
        # It ended in an earlier test.
        _worker.cache_clear()
    worker = _worker()
    assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018 both are pipes
    print(json.dumps([asdict(case) for case in cases]), file=worker.stdin, flush=True)
    line = worker.stdout.readline()
    assert line, "the process of the dry runs has ended; its standard error has the reason"
    return {name: DryRunResult(**result) for name, result in json.loads(line).items()}


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """Return a process that runs cases until its standard input is closed, when this process ends.

    Its start takes longer than most cases.
    """
    command, pipe = [sys.executable, "-m", "tests.harness.dry_runs"], subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)


def main() -> None:
    """Run the cases of each line of standard input, and print their results in one line."""
    from megatron.planner.simulation.fake_cuda import load_fake_cuda

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Libraries may print too.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    load_fake_cuda()
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(dict(_results([DryRunCase(**case) for case in json.loads(line)]))), file=answers, flush=True)


def _results(cases: Sequence[DryRunCase]) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in cases:
        try:
            with nullcontext() if case.has_package else _without_package():
                report = _report(case)
            yield case.name, {"report": report}
        except Exception as error:  # noqa: BLE001 the test of the case fails by it
            yield case.name, {"error": f"{_last_line_of_project(error)}: {type(error).__name__}: {error}"}


@contextmanager
def _without_package() -> Iterator[None]:
    """Hide Triton, and leave what else is imported meanwhile."""
    names = ("triton", "triton.runtime.jit")
    kept = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type] None hides a module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(kept)


def _report(case: DryRunCase) -> dict[str, Any]:
    import pretrain_gpt
    from megatron.config.arguments import resolve_arguments
    from megatron.planner.explanation import with_known_vocabulary
    from megatron.planner.gpu import find_gpu
    from megatron.planner.simulation.dry_run import dry_run
    from megatron.planner.simulation.estimate import EstimatedRun, estimate_step
    from megatron.planner.simulation.report import to_json

    config = with_known_vocabulary(resolve_arguments(case.flags, case.world_size).config)
    gpu = find_gpu(case.gpu)
    run = dry_run(
        *(config, case.rank, gpu, pretrain_gpt.provide_model, pretrain_gpt.forward_step),
        num_steps=case.num_steps,
        has_triton=case.has_triton,
    )
    return to_json(EstimatedRun(run, estimate_step(run, gpu)), gpu)


def _last_line_of_project(error: Exception) -> str:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if str(REPOSITORY) in frame.filename]
    frames = [frame for frame in own if "dry_run" not in frame.filename]
    return f"{Path(frames[-1].filename).relative_to(REPOSITORY)}:{frames[-1].lineno}" if frames else ""


if __name__ == "__main__":
    main()
