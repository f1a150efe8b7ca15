"""Reports of a simulated step: text, JSON, and an SVG plot of its memory.

The plot stacks the memory of each holder over the operations of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from megatron.planner import Gpu
from megatron.planner.simulation.dry_run import DryRun, count_flops
from megatron.planner.simulation.estimate import ASSUMPTIONS, Estimate, EstimatedRun, kernel_count, kind_of, slowest_of
from megatron.planner.simulation.recorder import HOLDERS, PHASES
from megatron.planner.simulation.roofline import transfer_seconds

_NUM_LINES = 12
_GIB = 2**30
LABEL = "estimate of a dry run, not a measurement"


def to_json(reported: EstimatedRun, gpu: Gpu, stages: Sequence[EstimatedRun] = ()) -> dict[str, Any]:
    """Return everything that is known about the step as JSON-ready values; times are in milliseconds.

    The step time is the longest time of ``stages`` and of the reported rank; ``rank_ms`` is the time of the reported
    rank.
    """
    run, estimate = reported.run, reported.estimate
    record, slowest = run.record, slowest_of([reported, *stages])
    counted = count_flops(record.operations)
    return {
        "label": LABEL,
        "assumptions": list(ASSUMPTIONS),
        "gpu": gpu.name,
        "sources": list(gpu.sources),
        "rank": run.rank,
        "world_size": run.world_size,
        "pipeline_rank": run.pipeline_rank,
        "parameters": run.num_parameters,
        "layers": run.num_layers,
        "microbatches": run.num_microbatches,
        "kernels": sum(map(kernel_count, record.operations)),
        "operations": len(record.operations),
        "bytes": sum(operation.num_bytes for operation in record.operations),
        "flops": counted.hardware,
        "recomputed_flops": counted.recomputed,
        "gemm_flops": counted.gemms,
        "attention_flops": counted.attention,
        "needed_gemm_flops": run.needed_flops.gemms,
        "needed_attention_flops": run.needed_flops.attention,
        "uncounted": dict(counted.uncounted),
        "model_flops": run.model_flops,
        "waits": [{"phase": wait.phase, "where": wait.where, "what": wait.what} for wait in record.waits],
        "host_copies": _host_copies(run, gpu, estimate),
        "collectives": [
            {
                "phase": each.phase,
                "where": each.where,
                "operation": each.call.operation,
                "axes": list(each.call.axes),
                "ranks": each.call.group_size,
                "bytes": each.call.num_bytes,
                "predicted_ms": transfer_seconds(each, gpu) * 1e3,
            }
            for each in record.communications
        ],
        "peak_bytes": record.peak_bytes,
        "peak_phase": record.peak_phase,
        "peak_holders": dict(record.peak_holders),
        "start_peak_bytes": run.start_peak_bytes,
        "fits": max(record.peak_bytes, run.start_peak_bytes) <= gpu.memory_bytes,
        "predicted_ms": slowest.estimate.seconds * 1e3,
        "slowest_rank": slowest.run.rank,
        "rank_ms": estimate.seconds * 1e3,
        "stages": [
            {"rank": each.run.rank, "pipeline_rank": each.run.pipeline_rank, "ms": each.estimate.seconds * 1e3}
            for each in stages or [reported]
        ],
        "mfu": slowest.estimate.mfu,
        "tflops": slowest.estimate.tflops,
        "kernel_ms": estimate.kernel_seconds * 1e3,
        "communication_ms": estimate.communication_seconds * 1e3,
        "hidden_communication_ms": estimate.hidden_communication_seconds * 1e3,
        "bubble_ms": estimate.bubble_seconds * 1e3,
        "by_phase": {phase: part for phase in PHASES if (part := _phase(run, estimate, phase))["kernels"]},
        "by_kind": {kind: _kind(run, estimate, kind) for kind in sorted(estimate.by_kind)},
        "by_operation": dict(Counter(operation.name for operation in record.operations)),
        "by_line": {where: seconds * 1e3 for where, seconds in _dearest_first(estimate)},
    }


def to_text(reported: EstimatedRun, gpu: Gpu, stages: Sequence[EstimatedRun] = ()) -> str:
    """Return the report as text, with the assumptions at the end; ``stages`` as for `to_json`."""
    return "\n".join(_lines(reported, gpu, slowest_of([reported, *stages]), stages))


def _lines(reported: EstimatedRun, gpu: Gpu, slowest: EstimatedRun, stages: Sequence[EstimatedRun]) -> Iterator[str]:
    run, estimate = reported.run, reported.estimate
    record = run.record
    yield (
        f"rank {run.rank} of {run.world_size} on {gpu.name}: {run.num_parameters:,} parameters, {run.num_layers} "
        f"layers, {run.num_microbatches} micro-batches ({LABEL})"
    )
    of_step = slowest.estimate
    compared = ""
    if len(stages) > 1:
        others = ", ".join(
            f"stage {each.run.pipeline_rank} (rank {each.run.rank}) {each.estimate.seconds * 1e3:.1f} ms"
            for each in stages
        )
        compared = f", the time of rank {slowest.run.rank}, the slowest of {others}"
    yield (
        f"step {of_step.seconds * 1e3:.1f} ms predicted{compared}; {of_step.tflops:.0f} TFLOP/s, MFU {of_step.mfu:.1%}"
    )
    yield (
        f"rank {run.rank} {estimate.seconds * 1e3:.1f} ms: "
        f"kernels {estimate.kernel_seconds * 1e3:.1f} ms, communication {estimate.communication_seconds * 1e3:.1f} ms "
        f"(and {estimate.hidden_communication_seconds * 1e3:.1f} ms behind the passes), pipeline idle "
        f"{estimate.bubble_seconds * 1e3:.1f} ms"
    )
    counted = count_flops(record.operations)
    yield (
        f"hardware FLOPs of this rank {counted.hardware:.4g}, {counted.recomputed:.4g} of them recomputed; without "
        f"these and masked scores {counted.of_model(run.needed_flops):.4g}, by the closed form of its layers "
        f"{run.needed_flops.total:.4g}"
    )
    for name, count in counted.uncounted.items():
        yield f"FLOPs unknown: {name}, {count} times; only its bytes are in the time, which may be too short"
    holders = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in record.peak_holders.items() if size)
    fits = "fits in" if max(record.peak_bytes, run.start_peak_bytes) <= gpu.memory_bytes else "DOES NOT FIT in"
    yield (
        f"peak memory {record.peak_bytes / _GIB:.2f} GiB in the {record.peak_phase} part ({holders}), "
        f"{run.start_peak_bytes / _GIB:.2f} GiB before the first step; it {fits} {gpu.memory_bytes / _GIB:.0f} GiB"
    )
    for phase in PHASES:
        part = _phase(run, estimate, phase)
        if part["kernels"]:
            yield f"  {phase:<10} {part['kernels']:7,} kernels {part['bytes'] / 1e9:10.2f} GB {part['ms']:10.2f} ms"
    for kind in sorted(estimate.by_kind):
        part = _kind(run, estimate, kind)
        yield f"  {kind:<10} {part['kernels']:7,} kernels {part['bytes'] / 1e9:10.2f} GB {part['ms']:10.2f} ms"
    yield "most expensive lines:"
    for where, seconds in _dearest_first(estimate)[:_NUM_LINES]:
        yield f"  {seconds * 1e3:10.2f} ms  {where or 'autograd'}"
    yield f"host waits: {len(record.waits)}"
    for wait, count in Counter(record.waits).items():
        yield f"  {count:4} x {wait.phase}: {wait.what} at {wait.where}"
    yield f"copies between host and device: {len(record.host_copies)}"
    for each in _host_copies(run, gpu, estimate):
        yield (
            f"  {each['copies']:4} x {each['phase']}: {each['bytes'] / 1e9:.3f} GB {each['direction']} at "
            f"{each['where']}, {each['predicted_ms']:.2f} ms, {each['hidden_ms']:.2f} of them hidden"
        )
    yield f"communication: {len(record.communications)}"
    sent = Counter((each.phase, each.call.operation, "_".join(each.call.axes)) for each in record.communications)
    for (phase, operation, axes), count in sent.items():
        yield f"  {count:4} x {phase}: {operation} over {axes}"
    yield "assumptions:"
    yield from (f"  {assumption}" for assumption in ASSUMPTIONS)
    yield from (f"  source: {source}" for source in gpu.sources)


def _host_copies(run: DryRun, gpu: Gpu, estimate: Estimate) -> list[dict[str, Any]]:
    """Return the copies between device and host by phase, line and direction."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for copy, hidden in zip(run.record.host_copies, estimate.copies_hidden):
        place = {"phase": copy.phase, "where": copy.where, "direction": copy.direction}
        sums = {"copies": 0, "bytes": 0, "predicted_ms": 0.0, "hidden_ms": 0.0}
        entry = found.setdefault((copy.phase, copy.where, copy.direction), place | sums)
        entry["copies"] += 1
        entry["bytes"] += copy.num_bytes
        entry["predicted_ms"] += transfer_seconds(copy, gpu) * 1e3
        entry["hidden_ms"] += hidden * 1e3
    return list(found.values())


def _phase(run: DryRun, estimate: Estimate, phase: str) -> dict[str, Any]:
    operations = [operation for operation in run.record.operations if operation.phase == phase]
    return {
        "kernels": sum(map(kernel_count, operations)),
        "bytes": sum(operation.num_bytes for operation in operations),
        "ms": estimate.by_phase.get(phase, 0.0) * 1e3,
    }


def _kind(run: DryRun, estimate: Estimate, kind: str) -> dict[str, Any]:
    operations = [operation for operation in run.record.operations if kind_of(operation) == kind]
    return {
        "kernels": sum(map(kernel_count, operations)),
        "bytes": sum(operation.num_bytes for operation in operations),
        "flops": sum(operation.flops for operation in operations),
        "ms": estimate.by_kind[kind] * 1e3,
    }


def _dearest_first(estimate: Estimate) -> list[tuple[str, float]]:
    return sorted(estimate.by_line.items(), key=lambda item: -item[1])


_COLORS = ("#4878a8", "#e49444", "#85b6b2", "#6a9f58", "#d1615d", "#a87c9f")
_WIDTH, _HEIGHT = 900, 360
_LEFT, _TOP, _BOTTOM, _RIGHT = 70, 40, 40, 130


def draw_memory(run: DryRun, gpu: Gpu) -> str:
    """Return the SVG plot of the memory; each column shows the peak of its operations."""
    columns = _columns(run, _WIDTH - _LEFT - _RIGHT)
    height = _HEIGHT - _TOP - _BOTTOM
    top = max(max(map(sum, columns)), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22">{escape(_title(run, gpu))}</text>',
    ]
    floor = [0] * len(columns)
    for index, name in enumerate(HOLDERS):
        ceiling = [low + column[index] for low, column in zip(floor, columns)]
        points = [(x, high) for x, high in enumerate(ceiling)] + [(x, low) for x, low in reversed([*enumerate(floor)])]
        path = " ".join(f"{_LEFT + x},{_TOP + height * (1 - value / top):.1f}" for x, value in points)
        parts.append(f'<polygon points="{path}" fill="{_COLORS[index]}"/>')
        place, line = _WIDTH - _RIGHT + 12, _TOP + 18 * index
        parts.append(f'<rect x="{place}" y="{line}" width="12" height="12" fill="{_COLORS[index]}"/>')
        parts.append(f'<text x="{place + 18}" y="{line + 11}">{name}</text>')
        floor = ceiling
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + height * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#00000030"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share * top / _GIB:.1f}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 14}">operations of one step, in order; GiB of live tensors</text>')
    return "\n".join([*parts, "</svg>\n"])


def _title(run: DryRun, gpu: Gpu) -> str:
    record = run.record
    return (
        f"rank {run.rank} of {run.world_size}, {gpu.name}: peak {record.peak_bytes / _GIB:.2f} GiB of "
        f"{gpu.memory_bytes / _GIB:.0f} (dry run)"
    )


def _columns(run: DryRun, count: int) -> list[tuple[int, ...]]:
    """Return the live bytes by holder at the peak of each of ``count`` equal parts of the step."""
    last = max(len(run.record.operations), 1)
    entries = run.record.memory
    columns: list[tuple[int, ...]] = []
    index, live = 0, entries[0][1]
    for column in range(count):
        fullest = live
        while index < len(entries) and entries[index][0] * count <= (column + 1) * last:
            live = entries[index][1]
            fullest = max(fullest, live, key=sum)
            index += 1
        columns.append(fullest)
    return columns
