"""The progress log: a line in ``DIR/progress.txt`` for each start of a job and each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.console import print_line
from megatron.training import Runtime, scheduler_job_id
from megatron.training.callbacks.callback import Callback, TrainingRun

PROGRESS_FILE = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_STARTING = "Starting job"


@dataclass(eq=False)
class ProgressLog(Callback):
    """Writer of a run's progress log, in Megatron's format; only the reporting rank has one.

    If the file cannot be written, a warning is printed and the run continues.
    """

    folder: Path
    world_size: int
    job_id: str
    seq_length: int
    _started: datetime = field(default_factory=datetime.now, init=False)
    _operations_at_start: float = field(default=0.0, init=False)

    def start(self, state: TrainState) -> None:
        """Record the start of a job from a state."""
        self._started = datetime.now()
        self._operations_at_start = state.floating_point_operations_so_far
        self._append(_STARTING)

    def after_save(self, run: TrainingRun) -> None:
        self.save(run.train_state, is_async=run.config.checkpoint.async_save)

    def save(self, state: TrainState, *, is_async: bool) -> None:
        """Record a save, or with ``is_async`` its start, and the throughput so far.

        The cumulative throughput counts from the first job with this world size, including the time between jobs.
        """
        operations, now = state.floating_point_operations_so_far, datetime.now()
        start, operations_then = self._first_start()
        job = self._throughput(operations - self._operations_at_start, (now - self._started).total_seconds())
        cumulative = self._throughput(operations - operations_then, (now - start).total_seconds())
        tokens = state.consumed_train_samples * self.seq_length
        self._append(
            "\t".join(
                (
                    "Saving async checkpoint" if is_async else "Saved checkpoint",
                    f"Iteration: {state.iteration}",
                    f"Job throughput: {job:.1f} TFLOP/s/GPU",
                    f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU",
                    f"Floating-point operations: {operations:.2e}",
                    f"Tokens (in billions): {tokens / 1e9:.2f}",
                )
            )
        )

    def _throughput(self, operations: float, seconds: float) -> float:
        return operations / max(seconds, 1.0e-9) / self.world_size / 1e12

    def _first_start(self) -> tuple[datetime, float]:
        """Return when the first job of the latest series with this world size started, and its FLOP count then."""
        start, operations, before = self._started, self._operations_at_start, 0.0
        is_running = False
        for moment, num_gpus, words in self._lines():
            if num_gpus != self.world_size:
                is_running = False
            elif words[0] == _STARTING and not is_running:
                start, operations, is_running = moment, before, True
            for word in words[1:]:
                name, _, value = word.partition(": ")
                if name == "Floating-point operations":
                    before = float(value)
        return start, operations

    def _lines(self) -> Iterator[tuple[datetime, int, list[str]]]:
        """Yield the time, the number of GPUs and the other fields of each readable line."""
        try:
            text = (self.folder / PROGRESS_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        for line in text.splitlines():
            try:
                moment, _, gpus, event, *figures = line.split("\t")
                yield datetime.strptime(moment, _TIME), int(gpus.removeprefix("# GPUs: ")), [event, *figures]
            except ValueError:
                continue

    def _append(self, text: str) -> None:
        line = f"{datetime.now():{_TIME}}\tJob ID: {self.job_id}\t# GPUs: {self.world_size}\t{text}\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / PROGRESS_FILE).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            print_line(f"WARNING: cannot write {self.folder / PROGRESS_FILE}: {error.strerror}")


def open_progress(config: RunConfig, runtime: Runtime, train_state: TrainState) -> ProgressLog | None:
    """Open the progress log of the reporting rank and record the start of this job; None if there is no log."""
    if not config.logging.log_progress or config.checkpoint.save is None or not runtime.is_reporter:
        return None
    folder, seq_length = Path(config.checkpoint.save), config.data.seq_length
    progress = ProgressLog(folder, config.world_size, scheduler_job_id(), seq_length)
    progress.start(train_state)
    return progress
