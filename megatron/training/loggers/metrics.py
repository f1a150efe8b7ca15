"""Metrics: one JSON object per iteration in the metrics file, and scalars for TensorBoard and other loggers."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.collectives import raise_on_all_ranks
from megatron.core.console import print_line
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.training import Runtime
from megatron.training.fault_tolerance import FOLDER_RECORD, RunLock, own_folder
from megatron.training.loggers.experiment_loggers import OF_DATA_SET, RunLogger, open_loggers
from megatron.training.loggers.log_lines import StepReport


class MetricsWriter:
    """Writer of the metrics file and the loggers; only the reporting rank has one.

    A resumed run appends after the iteration of its checkpoint. Later lines of the interrupted run are moved to
    ``FILE.superseded``, so that every iteration is in the file once and nothing is lost. A full disk does not stop
    training: one warning is printed, and writing resumes when there is space again.
    """

    def __init__(self, config: RunConfig, device: Device, start_iteration: int, data_sets: Sequence[str] = ()) -> None:
        self._logging = config.logging
        self._world_size = config.world_size
        self._device = device
        self._file: TextIO | None = None
        self._is_refused = False
        self._owner: RunLock | None = None
        if config.metrics_jsonl is not None:
            path = Path(config.metrics_jsonl)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._owner = own_metrics_file(path, config.checkpoint.save)
            set_superseded_lines_aside(path, start_iteration)
            self._file = path.open("a", buffering=1)
        self._loggers = open_loggers(config, start_iteration, data_sets)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one JSON object with full precision; a value that is not finite is written as null."""
        if self._file is not None:
            cleaned = {key: _finite(value) for key, value in values.items()}
            try:
                # A line that cannot be written stays in the file's buffer, and is written before the next line.
                self._file.write(json.dumps(cleaned, allow_nan=False) + "\n")
                self._is_refused = False
            except OSError as error:
                self._report_refused(error)

    def write_step(self, step: StepReport, *, is_logged: bool) -> None:
        """Append the metrics of one iteration, with the memory in use if the iteration has a log line."""
        decoupled = step.decoupled_learning_rate
        self.write(
            {
                "iteration": step.iteration,
                "consumed_samples": step.consumed_samples,
                "lm_loss": step.lm_loss,
                "grad_norm": step.grad_norm,
                "learning_rate": step.learning_rate,
                "loss_scale": step.loss_scale,
                "skipped": step.is_skipped,
                "tokens_per_second": step.tokens_per_second,
                "step_time_s": step.step_time_s,
                "sample_ids_hash": step.sample_ids_hash,
                "global_batch_size": step.global_batch_size,
                "num_zeros": step.num_zeros,
                "params_norm": step.params_norm,
                "tflops_per_device": step.tflops_per_device,
                "mfu": step.mfu,
                **step.auxiliary,
                **(self._memory() if is_logged else {}),
                **({} if decoupled is None else {"decoupled_learning_rate": decoupled}),
                **({} if step.stragglers is None else {"stragglers": step.stragglers}),
                **({} if step.expert_load is None else {"expert_load": step.expert_load.by_layer()}),
                **({} if step.max_attention_logit is None else {"max_attention_logit": step.max_attention_logit}),
                **_data_sets(step),
            }
        )

    def step_scalars(self, step: StepReport) -> None:
        """Log the scalars of one iteration under Megatron's names, over iterations and over samples."""
        logging = self._logging
        scalars: dict[str, float | None] = {
            "lm loss": None if step.is_skipped else step.lm_loss,
            **({} if step.is_skipped else step.auxiliary),
            **({} if step.expert_load is None else step.expert_load.scalars()),
            "grad-norm": step.grad_norm,
            "num-zeros": step.num_zeros,
            "params-norm": step.params_norm,
            "learning-rate": step.learning_rate if logging.log_learning_rate_to_tensorboard else None,
            "decoupled-learning-rate": step.decoupled_learning_rate
            if logging.log_learning_rate_to_tensorboard
            else None,
            "loss-scale": step.loss_scale if logging.log_loss_scale_to_tensorboard else None,
            "batch-size": step.global_batch_size if logging.log_batch_size_to_tensorboard else None,
            "world-size": self._world_size if logging.log_world_size_to_tensorboard else None,
        }
        self.scalars(scalars, step.iteration, step.consumed_samples)
        machine: dict[str, float | None] = {
            "samples vs steps": step.consumed_samples,
            "iteration-time": step.step_time_s,
            "max_attention_logit": step.max_attention_logit,
            "throughput": step.tflops_per_device if logging.log_throughput else None,
        }
        if logging.log_memory_to_tensorboard:
            use = self._device.memory_use()
            for name, mebibytes in (
                ("mem-allocated-bytes", use.allocated),
                ("mem-max-allocated-bytes", use.max_allocated),
                ("mem-reserved-bytes", use.reserved),
            ):
                machine[name] = mebibytes * 1024 * 1024
        if not step.is_skipped:
            machine |= {f"{OF_DATA_SET}/{name}": each.lm_loss for name, each in step.data_sets.items()}
        self.scalars(machine, step.iteration)

    def evaluation_scalars(self, split: str, lm_loss: float, state: TrainState) -> None:
        """Log the loss of an evaluation, and its perplexity if requested."""
        with_perplexity = self._logging.log_validation_ppl_to_tensorboard
        perplexity = math.exp(min(20.0, lm_loss)) if with_perplexity else None
        figures = {f"lm loss {split}": lm_loss, f"lm loss {split} ppl": perplexity}
        self.scalars(figures, state.iteration, state.consumed_train_samples)

    def scalars(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        """Log the scalars that are not None; with ``samples``, TensorBoard also plots them over samples."""
        given = {name: value for name, value in values.items() if value is not None}
        if given:
            self._tell(lambda logger: logger.scalars(given, iteration, samples))

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Log a text in Markdown."""
        self._tell(lambda logger: logger.text(tag, text, iteration))

    def close(self) -> None:
        """Flush and close the files and the loggers."""
        try:
            if self._file is not None:
                self._file.close()
            self._tell(lambda logger: logger.close())
            if self._owner is not None:
                self._owner.release()
        except OSError as error:
            self._report_refused(error)

    def _tell(self, say: Callable[[RunLogger], None]) -> None:
        """Call each logger; a logger that fails, for example on a full disk, is dropped and does not end the run."""
        for logger in list(self._loggers):
            try:
                say(logger)
            except OSError as error:
                self._loggers.remove(logger)
                print_line(
                    f"WARNING: cannot write to {logger.name}: {error.strerror or error}; it gets no more metrics"
                )

    def _memory(self) -> dict[str, Any]:
        """Return the memory use of this rank in MiB."""
        return {"memory_mib": {name: round(value, 3) for name, value in vars(self._device.memory_use()).items()}}

    def _report_refused(self, error: OSError) -> None:
        if not self._is_refused:
            name = "" if self._file is None else f" {self._file.name}"
            print_line(f"WARNING: cannot write the metrics of this run{name}: {error.strerror}")
        self._is_refused = True


def open_metrics(
    config: RunConfig, runtime: Runtime, start_iteration: int, data_sets: Sequence[str]
) -> MetricsWriter | None:
    """Create the writer on the reporting rank; None elsewhere. ``data_sets`` are the names of the blend's data sets.

    Raises:
        ConfigurationError: a file or folder cannot be written. Every rank raises it.
    """
    metrics, error = None, None
    if runtime.is_reporter:
        try:
            metrics = MetricsWriter(config, runtime.device, start_iteration, data_sets)
        except ConfigurationError as failure:
            error = failure
        except OSError as failure:
            error = ConfigurationError(
                f"cannot write {failure.filename}: {failure.strerror}; change --metrics-jsonl, --tensorboard-dir or "
                "--save"
            )
    raise_on_all_ranks(error, runtime.state.world)
    return metrics


def _data_sets(step: StepReport) -> dict[str, Any]:
    losses = {name: {"lm_loss": each.lm_loss, "num_tokens": each.num_tokens} for name, each in step.data_sets.items()}
    return {"data_sets": losses} if losses else {}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def own_metrics_file(path: Path, save: str | None) -> RunLock | None:
    """Lock the metrics file against writes of other runs.

    No lock is needed, and None is returned, if the file is in the folder of ``--save``, which has its own lock, or if
    it is a device or a pipe.

    Raises:
        FolderInUseError: another run writes to it.
        OSError: the folder cannot be written to.
    """
    if path.exists() and not path.is_file():
        return None
    if save is not None and path.parent.resolve() == Path(save).resolve():
        return None
    given = f"--metrics-jsonl {path}"
    prefix = f".{path.name}{FOLDER_RECORD}"
    return own_folder(path.parent, secrets.token_hex(4), "a training run", print_line, prefix, given)


def set_superseded_lines_aside(path: Path, start_iteration: int) -> None:
    """Move lines of iterations after ``start_iteration``, and a partial last line, to ``FILE.superseded``.

    A device or a pipe is not read, because reading it may never end.

    Raises:
        ConfigurationError: the file is not a text file.
    """
    if not path.is_file():
        return
    kept: list[str] = []
    superseded: list[str] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--metrics-jsonl {path} is not a text file; use a different file name") from error
    for line in text.splitlines(keepends=True):
        (kept if _iteration_of(line) <= start_iteration else superseded).append(line)
    if not superseded:
        return
    with path.with_name(path.name + ".superseded").open("a") as aside:
        aside.writelines(line if line.endswith("\n") else line + "\n" for line in superseded)
    rewritten = path.with_name(path.name + ".rewritten")
    rewritten.write_text("".join(kept))
    os.replace(rewritten, path)


def _iteration_of(line: str) -> float:
    if not line.endswith("\n"):
        return float("inf")
    try:
        return float(json.loads(line)["iteration"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return float("inf")
