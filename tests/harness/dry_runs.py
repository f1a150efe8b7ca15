"""Many dry runs in one process of their own: the library that stands in for CUDA must come before torch."""

from __future__ import annotations

import json
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


def run_dry_runs(cases: Sequence[DryRunCase], cache: Path | None = None) -> dict[str, DryRunResult]:
    """Return the results by name.

    ``cache`` keeps the library that is built, by default where every dry run looks for it: it takes seconds to build.
    """
    given = json.dumps({"cache": cache and str(cache), "cases": [asdict(case) for case in cases]})
    command = [sys.executable, "-m", "tests.harness.dry_runs"]
    done = subprocess.run(command, input=given, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: DryRunResult(**result) for name, result in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    """Run the cases that standard input has, and print the results."""
    from megatron.planner.simulation.fake_cuda import load_fake_cuda

    given = json.load(sys.stdin)
    load_fake_cuda(Path(given["cache"]) if given["cache"] else None)
    import torch

    torch.set_num_threads(1)
    print(json.dumps(dict(_results([DryRunCase(**case) for case in given["cases"]]))))


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
