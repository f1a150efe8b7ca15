"""The time of a step by the source line that asked for it: python -m tests.gpu.source_lines FILE TRAINING-FLAGS …"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.timing import dry_run
from tests.harness.training_run import REPOSITORY, run_command

_PACKAGE = str(REPOSITORY / "megatron")
_SCRIPT = str(REPOSITORY / "pretrain_gpt.py")
_RANGE = "line "
_NUM_WARMUP = 2


class SourceLines(TorchDispatchMode):
    """Make a range of every operation, named as the dry run names the line that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self._where_of_node: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation within its range."""
        with record_function(_RANGE + self._line()):
            return func(*args, **(kwargs or {}))

    def _line(self) -> str:
        where, node = _line_of_project(), torch._C._current_autograd_node()
        if node is None:
            self._where_of_node[torch._C._autograd._get_sequence_nr()] = where
            return where
        number = node._sequence_nr()
        known = self._where_of_node.get(number) or self._where_of_node.get(number + 1)
        return where or f"gradient of {known or node.name()}"


def _line_of_project() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) or path == _SCRIPT:
            return f"{Path(path).relative_to(REPOSITORY).as_posix()}:{frame.f_lineno}"
        if frame.f_code.co_name == "_engine_run_backward":
            return ""
        frame = frame.f_back
    return ""


def measure_lines(name: str, flags: Sequence[str], gpu: str | None, folder: Path) -> dict[str, Any]:
    """Return a row with the milliseconds of each line in one step of one rank, and what the dry run predicts of it."""
    path = folder / "source_lines.json"
    run_command([sys.executable, "-m", "tests.gpu.source_lines", path, *flags], timeout_s=600.0).check()
    measured: dict[str, float] = json.loads(path.read_text())
    predicted = {} if gpu is None else dry_run(flags, 1, gpu, folder / "source_lines_dry_run.json")["by_line"]
    return {
        "name": name,
        "flags": list(flags),
        "gpu": gpu,
        "measured_total_ms": sum(measured.values()),
        "predicted_total_ms": sum(predicted.values()) if predicted else None,
        "lines": [
            {"where": where, "measured_ms": measured.get(where, 0.0), "predicted_ms": predicted.get(where)}
            for where in dict.fromkeys((*measured, *predicted))
        ],
    }


def main(path: str, *flags: str) -> None:
    """Run a few steps, and write the milliseconds of the last by line: of kernels on CUDA, of operations on a CPU."""
    import pretrain_gpt
    from megatron.checkpoint.train_state import TrainState
    from megatron.config.arguments import resolve_arguments
    from megatron.core.device import select_device
    from megatron.core.timers import Timers
    from megatron.planner.explanation import with_known_vocabulary
    from megatron.training.initialize import make_runtime
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.training.training_step import TrainingStep
    from megatron.verification.run_cell import make_source

    config = with_known_vocabulary(resolve_arguments((*flags, "--train-iters", "3"), 1).config)
    device = select_device(0)
    device.make_current()
    runtime = make_runtime(config, device)
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
    state, batch_size = TrainState(), config.training.global_batch_size
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    # The thread of a backward pass has no dispatch modes unless it is this one.
    with (
        contextlib.closing(make_source(config, runtime, "plain")) as source,
        torch.autograd.set_multithreading_enabled(False),
    ):
        for _ in range(_NUM_WARMUP):
            step.run(state, source, batch_size, None)
        device.synchronize()
        with profile(activities=activities) as recorder, SourceLines():
            step.run(state, source, batch_size, None)
            device.synchronize()
    milliseconds: dict[str, float] = defaultdict(float)
    for event in recorder.events() or []:
        # CUDA's own copy of a range spans the idle time between its kernels.
        if event.name.startswith(_RANGE) and event.device_type == DeviceType.CPU:
            spent = event.device_time_total if device.is_cuda else event.cpu_time_total
            milliseconds[event.name.removeprefix(_RANGE)] += spent / 1e3
    Path(path).write_text(json.dumps(milliseconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
