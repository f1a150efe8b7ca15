"""A store scales traces to a micro-batch size, unless other sizes have other operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner import trace_store
from megatron.planner.plan import Plan
from megatron.planner.trace_store import TraceStore, UntraceableError
from megatron.planner.traces import TraceRequest
from tests.unit.config.command_lines import MINIMAL


def record_of(size: int, *, in_blocks: bool) -> Mapping[str, Any]:
    """Return what a tracer says of an operation of 10 bytes, and 100 bytes per sample, in blocks of two samples."""
    count = -(-size // 2) if in_blocks else 1
    operations = [[0, 2, 2, 0, 0, 0, 0, 10 + 100 * size / count, 0, 0, 0]] * count
    memory = [7 * size, 8 * size, 9 * size, 0, 0]
    return {"operations": operations, "sent": [], "launches": [[count, 0, 1], [0, 0, 0]], "memory": memory}


def request_of(size: int) -> TraceRequest:
    model = Plan.of(resolve_arguments([*MINIMAL], 1).config).model
    return TraceRequest(model, StageContents((0,)), seq_length=8, micro_batch_size=size, capability=(9, 0))


def test_a_model_that_cannot_be_traced_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fail(requests: Mapping[str, TraceRequest]) -> Mapping[str, Mapping[str, Any]]:
        tries.append(len(requests))
        raise ValueError("no\nsuch layer")

    monkeypatch.setattr(trace_store, "_may_trace_here", lambda: True)
    monkeypatch.setattr("megatron.planner.simulation.load_fake_cuda", lambda: None)
    monkeypatch.setattr("megatron.planner.simulation.take_traces", fail)
    store = TraceStore(tmp_path)
    for _ in range(2):
        with pytest.raises(UntraceableError, match="of this model cannot be traced: ValueError: no such layer"):
            store.trace(request_of(2))
    assert len(tries) == 1


@pytest.mark.parametrize(("in_blocks", "taken"), [(False, [2, 3]), (True, [2, 3, 5])])
def test_sizes_with_other_operations_are_traced_themselves(
    in_blocks: bool, taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def take(store: TraceStore, missing: Mapping[str, TraceRequest]) -> Mapping[str, Mapping[str, Any]]:
        seen.extend(request.micro_batch_size for request in missing.values())
        return {key: record_of(request.micro_batch_size, in_blocks=in_blocks) for key, request in missing.items()}

    monkeypatch.setattr(TraceStore, "_take", take)
    trace = TraceStore(tmp_path).trace(request_of(5))
    assert seen == taken
    count = 3 if in_blocks else 1
    assert trace.column("num_bytes").tolist() == pytest.approx([10 + 500 / count] * count)
    assert trace.launches == ((count, 0, 1), (0, 0, 0))
    assert trace.memory.kept == 35
