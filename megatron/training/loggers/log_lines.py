"""Log lines of steps, evaluations and memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from megatron.core.collectives import broadcast_object
from megatron.core.console import format_duration, print_line
from megatron.core.device import Device
from megatron.core.process_group import Group
from megatron.core.transformer.moe import LoadReport
from megatron.training import Runtime


@dataclass(frozen=True)
class DataSetLoss:
    """Mean loss per token of one data set in an iteration, and its number of tokens."""

    lm_loss: float
    num_tokens: int


@dataclass(frozen=True)
class StepReport:
    """Metrics of one iteration, equal on all ranks.

    ``lm_loss`` and the ``auxiliary`` losses by name are means over the tokens of the global batch, even if the update
    was skipped. The iteration used ``learning_rate`` and ``loss_scale``; ``next_learning_rate`` and ``next_loss_scale``
    are the new values. The ``decoupled`` learning rates are those of the word embedding and the output layer. ``mfu``
    is the model FLOPs utilization, a fraction of the device's peak, or None if the peak is unknown. ``expert_load`` is
    set for MoE models, and its summary is included in ``auxiliary``. ``data_sets`` has the data sets of a blend that
    contributed tokens to the iteration, by name.
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
        return math.isnan(self.lm_loss)


@dataclass
class IntervalAverage:
    """Averages over the iterations between two log lines; skipped iterations contribute no loss."""

    totals: dict[str, float] = field(default_factory=dict)
    count: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    elapsed_s: float = 0.0
    num_iterations: int = 0
    tflops_seconds: float = 0.0
    mfu_seconds: float = 0.0

    def add(self, step: StepReport) -> None:
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


_LINE_EVERY_S, _LINE_AT_LEAST_EVERY_S = 5.0, 60.0
_NUM_LINES, _FEWEST_LINES = 100, 10


def choose_log_interval(num_iterations: int, step_time_s: float) -> int:
    """Choose the iterations between log lines: 1, 2 or 5 times a power of ten.

    A line comes about every 5 seconds, in long runs a hundred times, but at least every minute, and in short runs ten
    times.
    """
    seconds = min(max(num_iterations * step_time_s / _NUM_LINES, _LINE_EVERY_S), _LINE_AT_LEAST_EVERY_S)
    most = max(min(seconds / step_time_s, num_iterations / _FEWEST_LINES), 1.0)
    power: int = 10 ** math.floor(math.log10(most))
    return max(number * power for number in (1, 2, 5) if number * power <= most)


class LogInterval:
    """Iterations between log lines, as given, or with 0 as chosen from the run's length and step time.

    ``num_iterations`` is the number of iterations from the start of this process to ``last_iteration``.
    """

    def __init__(self, given: int, num_iterations: int, last_iteration: int) -> None:
        self.value = given or 1
        self._is_chosen = given == 0
        self._num_iterations, self._last_iteration = num_iterations, last_iteration

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration has a line; with a chosen interval, the last iteration always has one."""
        return iteration % self.value == 0 or (self._is_chosen and iteration == self._last_iteration)

    def adapt(self, average: IntervalAverage, world: Group) -> None:
        """Choose the interval again after a line, from the step time of rank 0; collective.

        An interval above 1 is kept unless the choice differs from it by more than a factor of two.
        """
        if not self._is_chosen:
            return
        step_time_s = average.elapsed_s / average.num_iterations
        chosen: int = broadcast_object(choose_log_interval(self._num_iterations, step_time_s), world)
        if self.value == 1 or not self.value <= 2 * chosen <= 4 * self.value:
            self.value = chosen


def format_brief_step(step: StepReport, average: IntervalAverage, train_iters: int, log_throughput: bool) -> str:
    """Format the line of a brief log for the iterations since the previous line.

    It leaves out what has not changed and what did not happen.
    """
    step_s = average.elapsed_s / average.num_iterations
    tokens_per_second = step.tokens_per_second * step.step_time_s / step_s
    parts = [f" iteration {step.iteration:{len(str(train_iters))}d}/{train_iters}"]
    parts += [f"{name}: {total / average.count:.4f}" for name, total in average.totals.items()]
    parts.append(f"lr: {step.learning_rate:.3E}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    parts += [f"step: {step_s * 1000.0:,.1f} ms", f"{tokens_per_second:,.0f} tokens/s"]
    if log_throughput:
        parts.append(f"{_tflops(average.tflops_seconds / average.elapsed_s)} TFLOP/s per GPU")
    if step.mfu is not None:
        parts.append(f"MFU: {average.mfu_seconds / average.elapsed_s:.1%}")
    parts.append(f"{format_duration((train_iters - step.iteration) * step_s)} left")
    optional = {
        "loss scale": f"{step.next_loss_scale:.1f}" if step.next_loss_scale != 1.0 else None,
        "num zeros": step.num_zeros,
        "params norm": None if step.params_norm is None else f"{step.params_norm:.3f}",
        "max attention logit": None if step.max_attention_logit is None else f"{step.max_attention_logit:.3f}",
        "number of skipped iterations": average.num_skipped or None,
        "number of nan iterations": average.num_nan or None,
    }
    parts += [f"{name}: {value}" for name, value in optional.items() if value is not None]
    return " | ".join(parts)


def format_step(step: StepReport, average: IntervalAverage, train_iters: int, log_throughput: bool) -> str:
    """Format Megatron's log line for the iterations since the previous line."""
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


def _tflops(value: float) -> str:
    """Format a throughput as Megatron does, but with two significant digits if that would give 0.0."""
    return f"{value:.1f}" if value >= 0.05 or value <= 0.0 else f"{value:.{1 - math.floor(math.log10(value))}f}"


def format_memory(rank: int, iteration: int, device: Device, with_device: bool = False) -> str:
    """Format the memory use of one rank in MiB; ``with_device`` adds the total of all processes on its device."""
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
    """Print the pinned host memory of each rank of the first replica, if it has grown within the context."""
    before = runtime.device.pinned_bytes() if runtime.state.dp_cp.is_first else None
    yield
    after = None if before is None else runtime.device.pinned_bytes()
    if before is not None and after is not None and after > before:
        words = f"pinned host memory of the node (MB): {after / 2**20:.2f}"
        print_line(f"[Rank {runtime.state.rank}] (after {iteration} iterations) {words}")


def format_evaluation(heading: str, lm_loss: float, *, is_brief: bool = False) -> str:
    """Format the line of an evaluation, framed unless brief; ``heading`` names the iteration and the data set."""
    perplexity = math.exp(min(20.0, lm_loss))
    if is_brief:
        return f" validation loss at {heading} | lm loss value: {lm_loss:.4f} | lm loss PPL: {perplexity:,.1f}"
    line = f" validation loss at {heading} | lm loss value: {lm_loss:.6E} | lm loss PPL: {perplexity:.6E} |"
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def format_training_finished(evaluation_s: float | None) -> str:
    """Format the line before the last evaluations, with their estimated seconds; None is unknown."""
    return "training finished, evaluating" + ("" if evaluation_s is None else f", about {max(evaluation_s, 1):.0f} s")


def format_datetime(heading: str) -> str:
    return f"[{heading}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}"


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()
