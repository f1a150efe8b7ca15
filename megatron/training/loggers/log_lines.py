"""Log lines of steps, evaluations and memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from megatron.core.console import print_line
from megatron.core.device import Device
from megatron.core.transformer.moe import LoadReport
from megatron.training import Runtime


@dataclass(frozen=True)
class DataSetLoss:
    """Hold the mean loss over the tokens that an iteration had of one data set, and their number."""

    lm_loss: float
    num_tokens: int


@dataclass(frozen=True)
class StepReport:
    """Hold the figures of one iteration, equal on all ranks.

    ``lm_loss`` is the mean over the tokens of the global batch, whether the update was skipped or not, and so are the
    ``auxiliary`` losses by name.
    ``learning_rate`` and ``loss_scale`` are what the iteration trained with, ``next_learning_rate`` and
    ``next_loss_scale`` what was just set; those that are ``decoupled`` are of the word embedding and the output layer;
    ``mfu`` is the share of the device's peak that was used, None where the peak
    is not known. ``expert_load`` is there where the model has experts; what it comes to is among the ``auxiliary``.
    ``data_sets`` has, of a blend, the data sets that the iteration had tokens of, by name.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    num_tokens: float
    lm_loss: float
    learning_rate: float
    next_learning_rate: float
    loss_scale: float
    next_loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    is_skipped: bool
    step_time_s: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    sample_ids_hash: str | None
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    decoupled_learning_rate: float | None = None
    next_decoupled_learning_rate: float | None = None
    max_attention_logit: float | None = None
    stragglers: Mapping[str, object] | None = None
    expert_load: LoadReport | None = None
    data_sets: Mapping[str, DataSetLoss] = field(default_factory=dict)

    @property
    def is_nan(self) -> bool:
        """Return whether the loss is not a number."""
        return math.isnan(self.lm_loss)


@dataclass
class IntervalAverage:
    """Average the iterations between two log lines; skipped ones contribute no loss."""

    totals: dict[str, float] = field(default_factory=dict)
    count: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    elapsed_s: float = 0.0
    num_iterations: int = 0
    tflops_seconds: float = 0.0
    mfu_seconds: float = 0.0

    def add(self, step: StepReport) -> None:
        """Add one iteration."""
        self.num_iterations += 1
        self.elapsed_s += step.step_time_s
        self.tflops_seconds += step.tflops_per_device * step.step_time_s
        self.mfu_seconds += (step.mfu or 0.0) * step.step_time_s
        self.num_nan += step.is_nan
        if step.is_skipped:
            self.num_skipped += 1
        else:
            for name, value in {"lm loss": step.lm_loss, **step.auxiliary}.items():
                self.totals[name] = self.totals.get(name, 0.0) + value
            self.count += 1


def format_step(step: StepReport, average: IntervalAverage, train_iters: int, log_throughput: bool) -> str:
    """Return Megatron's line for the iterations since the last one."""
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{train_iters:8d} |",
        f" consumed samples: {step.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {average.elapsed_s * 1000.0 / average.num_iterations:.1f} |",
    ]
    if log_throughput:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {_tflops(average.tflops_seconds / average.elapsed_s)} |")
        if step.mfu is not None:
            parts.append(f" MFU: {100.0 * average.mfu_seconds / average.elapsed_s:.1f}% |")
    parts.append(f" learning rate: {step.next_learning_rate:.6E} |")
    if step.next_decoupled_learning_rate is not None:
        parts.append(f" decoupled learning rate: {step.next_decoupled_learning_rate:.6E} |")
    parts.append(f" global batch size: {step.global_batch_size:5d} |")
    parts += [f" {name}: {total / average.count:.6E} |" for name, total in average.totals.items()]
    parts.append(f" loss scale: {step.next_loss_scale:.1f} |")
    if step.grad_norm is not None:
        parts.append(f" grad norm: {step.grad_norm:.3f} |")
    if step.num_zeros is not None:
        parts.append(f" num zeros: {step.num_zeros} |")
    if step.params_norm is not None:
        parts.append(f" params norm: {step.params_norm:.3f} |")
    if step.max_attention_logit is not None:
        parts.append(f" max attention logit: {step.max_attention_logit:.3f} |")
    parts.append(f" number of skipped iterations: {average.num_skipped:3d} |")
    parts.append(f" number of nan iterations: {average.num_nan:3d} |")
    return "".join(parts)


def format_first_step(step: StepReport, train_iters: int, log_throughput: bool) -> str:
    """Return the line of the first iteration of a run, where ``--log-interval`` gives it none; no average counts it."""
    average = IntervalAverage()
    average.add(step)
    return format_step(step, average, train_iters, log_throughput)


def _tflops(value: float) -> str:
    """Return a throughput as Megatron prints it, and with two digits that say something where that would be 0.0."""
    return f"{value:.1f}" if value >= 0.05 or value <= 0.0 else f"{value:.{1 - math.floor(math.log10(value))}f}"


def format_memory(rank: int, iteration: int, device: Device, with_device: bool = False) -> str:
    """Return the memory figures of one rank in MiB; ``with_device`` adds those of all processes on its device."""
    use = device.memory_use()
    used = device.used_bytes() if with_device else None
    of_device = "" if used is None else f" | total device memory used: {used / 2**20:.2f}"
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB) | allocated: {use.allocated:.2f} | "
        f"max allocated: {use.max_allocated:.2f} | reserved: {use.reserved:.1f} | max reserved: {use.max_reserved:.1f}"
        f"{of_device}"
    )


@contextmanager
def pinned_memory_told(runtime: Runtime, iteration: int) -> Iterator[None]:
    """Print what the first copy's ranks have pinned of the machine's memory, where that has grown in the context."""
    before = runtime.device.pinned_bytes() if runtime.state.dp_cp.is_first else None
    yield
    after = None if before is None else runtime.device.pinned_bytes()
    if before is not None and after is not None and after > before:
        words = f"pinned memory of the machine (MB): {after / 2**20:.2f}"
        print_line(f"[Rank {runtime.state.rank}] (after {iteration} iterations) {words}")


def format_evaluation(heading: str, lm_loss: float) -> str:
    """Return the framed line of an evaluation; ``heading`` says when and on what."""
    perplexity = math.exp(min(20.0, lm_loss))
    line = f" validation loss at {heading} | lm loss value: {lm_loss:.6E} | lm loss PPL: {perplexity:.6E} |"
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def format_datetime(heading: str) -> str:
    return f"[{heading}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}"


def is_terminal() -> bool:
    """Return whether what this process prints is seen on a terminal, as it comes."""
    return sys.stdout is not None and sys.stdout.isatty()
