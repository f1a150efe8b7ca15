"""Configurations side by side: the layout, the memory and the time of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.planner.explanation import Explanation
from megatron.planner.stage_memory import MEMORY_PARTS

_MIB = 2**20
_TIME_PARTS = {
    "busy": "busy",
    "bubble": "bubble",
    "neighbours": "pipeline communication",
    "exposed_data_parallel": "exposed data-parallel communication",
    "update": "update",
}


@dataclass(frozen=True)
class _Row:
    """Hold a line of the table: its label, a value per configuration, and how numbers are written."""

    label: str
    values: tuple[float | str | None, ...]
    digits: int = 0

    def texts(self) -> tuple[str, ...]:
        """Return the values as text, "-" for those that are not known."""
        return tuple(map(self._text, self.values))

    def _text(self, value: float | str | None) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else f"{value:.{self.digits}f}"

    @property
    def change(self) -> str:
        """Return by how much the last value differs from the first, in percent of the first."""
        first, last = self.values[0], self.values[-1]
        if isinstance(first, str) or isinstance(last, str) or first is None or last is None or first == last:
            return ""
        return f"{100 * (last / first - 1):+.1f} %" if first > 0 else ""


def describe_comparison(names: Sequence[str], explanations: Sequence[Explanation]) -> Iterator[str]:
    """Yield the lines of a table with a column per configuration, and the change from the first to the last."""
    rows = list(_rows(explanations))
    labels = max(len(row.label) for row in rows)
    widths = [max(len(name), *(len(row.texts()[place]) for row in rows)) for place, name in enumerate(names)]
    heads = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths))
    yield f"{'':{labels}}  {heads}  change"
    for row in rows:
        texts = "  ".join(f"{text:>{width}}" for text, width in zip(row.texts(), widths))
        yield f"{row.label:{labels}}  {texts}  {row.change}".rstrip()


def _rows(explanations: Sequence[Explanation]) -> Iterator[_Row]:
    def row(label: str, *values: float | str | None, digits: int = 0) -> _Row:
        return _Row(label, values, digits)

    plans = [each.plan for each in explanations]
    yield row("outcome", *(each.prediction.outcome for each in explanations))
    yield row("GPUs", *(str(each.sizes.world_size) for each in explanations))
    parameters = [(each.size.block + each.size.embedding) / 1e9 for each in explanations]
    yield row("parameters, billion", *parameters, digits=3)
    for axis in ("tp", "pp", "cp", "dp", "ep"):
        sizes = [getattr(each.sizes, axis) for each in explanations]
        if max(sizes) > 1:
            yield row(f"{axis} size", *map(str, sizes))
    yield row("pipeline schedule", *(plan.pipeline_schedule for plan in plans))
    yield row("precision", *("fp8" if plan.model.fp8_format else plan.model.params_dtype for plan in plans))
    yield row("recompute", *(plan.model.recompute_granularity or "none" for plan in plans))
    yield row("micro-batch size", *(str(plan.micro_batch_size) for plan in plans))
    yield row("micro-batches per step", *(str(plan.num_microbatches) for plan in plans))
    yield row("tokens per step", *(plan.global_batch_size * plan.seq_length for plan in plans))
    fullest = [
        max(each.prediction.stages, key=lambda stage: stage.total) if each.prediction.stages else None
        for each in explanations
    ]
    for part in MEMORY_PARTS:
        yield row(f"{part}, MiB", *(None if stage is None else getattr(stage, part) / _MIB for stage in fullest))
    yield row("fullest stage, total, MiB", *(None if stage is None else stage.total / _MIB for stage in fullest))
    left = [
        None if each.prediction.used_bytes is None else (each.usable - each.prediction.used_bytes) / _MIB
        for each in explanations
    ]
    yield row("free GPU memory, MiB", *left)
    times = [each.prediction.time for each in explanations]
    for part, label in _TIME_PARTS.items():
        yield row(f"{label}, ms", *(None if time is None else 1e3 * getattr(time, part) for time in times), digits=1)
    yield row("step, ms", *(None if time is None else 1e3 * time.total for time in times), digits=1)
    yield row("tokens per second", *(each.tokens_per_second for each in explanations))
    per_gpu = [
        None if each.tokens_per_second is None else each.tokens_per_second / each.sizes.world_size
        for each in explanations
    ]
    yield row("tokens per second per GPU", *per_gpu)
    yield row("TFLOP/s per GPU", *(each.prediction.tflops for each in explanations), digits=1)
