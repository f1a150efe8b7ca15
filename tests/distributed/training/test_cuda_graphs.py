"""Layers as graphs train as layers without, whatever the schedule; graphs are work that is run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron.core.cuda_graph import GraphBackend
from megatron.core.device import Device
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.core.transformer import cuda_graphs
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.run_cell import CellResult, run_cell
from tests.harness.distributed import run_distributed
from tests.harness.graph_stand_in import RerunBackend
from tests.harness.penalized_layers import provide_penalized_gpt

TOLERANCE = 1e-10
PP2 = "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method"
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.3 --attention-backend unfused"
HYBRID = (
    "--hybrid-override-pattern PKG- --no-position-embedding --mamba-state-dim 5 --mamba-head-dim 6 "
    "--mamba-num-groups 4 --linear-key-head-dim 4 --linear-value-head-dim 6 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8"
)
UNTIED = "--untie-embeddings-and-output-weights"
CHUNKS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
DP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass
class Trained:
    """Hold what a rank saw, how many graphs it recorded, and how often its gradients' buckets began while recording."""

    result: CellResult
    num_graphs: int = 0
    num_begun_in_graphs: int = 0


class WatchedBackend(RerunBackend):
    """Note whether work is being recorded or run again, here or apart from here."""

    is_inside = False
    whole: WatchedBackend | None = None

    def capture(self, work: Callable[[], Any]) -> Any:
        whole = self.whole or self

        def watched() -> Any:
            whole.is_inside = True
            try:
                return work()
            finally:
                whole.is_inside = False

        return super().capture(watched)

    def apart(self) -> WatchedBackend:
        backend = WatchedBackend(self.graphs)
        backend.whole = self.whole or self
        return backend


def train(flags: str, world_size: int, with_graphs: bool, more: str = "") -> Trained:
    words = [*BASE_FLAGS, *flags.split()]
    backend = WatchedBackend()
    trained = Trained(CellResult())
    start = ParamAndGradBuffer._start_next_bucket

    def start_next_bucket(buffer: ParamAndGradBuffer) -> None:
        trained.num_begun_in_graphs += backend.is_inside
        start(buffer)

    def graph_backend(device: Device) -> GraphBackend:
        return backend

    if with_graphs:
        words += ["--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1", *more.split()]
    with (
        patch.object(Device, "graph_backend", graph_backend),
        patch.object(ParamAndGradBuffer, "_start_next_bucket", start_next_bucket),
    ):
        trained.result = run_cell(
            words, world_size, "plain", "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step
        )
    trained.num_graphs = len(backend.graphs)
    return trained


def compare(world_size: int, flags: str, more: str = "") -> list[Trained]:
    """Return what the ranks have seen with graphs, and more flags for these: what they have seen without."""
    plain, graphed = (
        run_distributed(world_size, train, flags, world_size, graphs, more, timeout_s=60) for graphs in (False, True)
    )
    for ours, expected in zip(graphed, plain, strict=True):
        assert expected.num_graphs == 0
        assert ours.result.losses == pytest.approx(expected.result.losses, rel=TOLERANCE)
        assert ours.result.grad_norms == pytest.approx(expected.result.grad_norms, rel=TOLERANCE)
        for fragment, other in zip(ours.result.parameters, expected.result.parameters, strict=True):
            assert abs(fragment.values - other.values).max() < TOLERANCE, fragment.name
        assert ours.num_begun_in_graphs == 0
    return graphed


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("world_size", "flags", "expected"),
    [
        # Graphs of each rank: 4 layers, forward and backward, for each micro-batch in flight.
        pytest.param(1, DROPOUT, [8], id="one-rank-dropout", marks=pytest.mark.long),
        pytest.param(1, f"{FULL} uniform --recompute-num-layers 3", [4], id="recompute-groups", marks=pytest.mark.long),
        pytest.param(
            *(1, f"{FULL} block --recompute-num-layers 1 {DROPOUT}", [8]), id="recompute-block", marks=pytest.mark.long
        ),
        pytest.param(
            *(2, f"{PP2} --recompute-activations --recompute-modules core_attn layernorm mlp {DROPOUT}", [8, 4]),
            id="1f1b",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            f"{PP2} --num-layers-per-virtual-pipeline-stage 1 {DROPOUT}",
            None,
            id="interleaved",
            marks=pytest.mark.long,
        ),
        pytest.param(2, f"{PP2} --pipeline-schedule zero-bubble", [12, 12], id="zero-bubble"),
        pytest.param(2, f"--tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}", [8, 8], id="tp2-sp"),
        pytest.param(2, DP, [8, 8], id="dp2-overlapped", marks=pytest.mark.long),
        pytest.param(2, "--context-parallel-size 2", [8, 8], id="cp2", marks=pytest.mark.long),
        pytest.param(2, f"{HYBRID} --context-parallel-size 2", [8, 8], id="hybrid-cp2", marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_without_graphs(world_size: int, flags: str, expected: list[int] | None) -> None:
    ranks = compare(world_size, flags)
    if expected is not None:
        assert [rank.num_graphs for rank in ranks] == expected


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("world_size", "flags", "expected"),
    [
        # Two more graphs for an embedding, and two for a loss, for each micro-batch in flight.
        pytest.param(1, DROPOUT, [12], id="tied", marks=pytest.mark.long),
        pytest.param(
            1,
            f"{UNTIED} {CHUNKS} {FULL} uniform --recompute-num-layers 1",
            [12],
            id="untied-chunks",
            marks=pytest.mark.long,
        ),
        pytest.param(2, f"{PP2} {DROPOUT}", [12, 6], id="1f1b", marks=pytest.mark.long),
        pytest.param(
            *(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1 {UNTIED}", None),
            id="interleaved-untied",
            marks=pytest.mark.long,
        ),
        # Two micro-batches in flight. An embedding that only looks up rows defers nothing.
        pytest.param(2, f"{PP2} --pipeline-schedule zero-bubble", [16, 18], id="zero-bubble"),
        pytest.param(
            *(2, f"{PP2} --defer-embedding-wgrad-compute", None), id="late-output-gradients", marks=pytest.mark.long
        ),
        pytest.param(
            2,
            f"--tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}",
            [12, 12],
            id="tp2",
            marks=pytest.mark.long,
        ),
        pytest.param(2, f"{DP} --calculate-per-token-loss", [12, 12], id="dp2-overlapped", marks=pytest.mark.long),
        pytest.param(2, f"--context-parallel-size 2 {UNTIED}", [12, 12], id="cp2-untied", marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_without_graphs_of_the_loss(world_size: int, flags: str, expected: list[int] | None) -> None:
    ranks = compare(world_size, flags, "--loss-cuda-graph")
    if expected is not None:
        assert [rank.num_graphs for rank in ranks] == expected


def keep_slots_too_short() -> None:
    """Free a micro-batch's slot after its forward pass."""

    def when_finished(slot: Any, action: Callable[[], None]) -> None:
        pass

    def forward(ctx: Any, start: Any, slot: Any, release: Callable[[Any], None]) -> Any:
        ctx.slot, ctx.release = slot, release
        release(slot)
        return slot.forward()

    cuda_graphs._Slot.when_finished = when_finished  # type: ignore[method-assign]
    cuda_graphs._Replay.forward = staticmethod(forward)  # type: ignore[assignment]


def train_with_short_slots(flags: str) -> float:
    keep_slots_too_short()
    try:
        norms = train(flags, 2, True).result.grad_norms
    except (RuntimeError, TrainingError) as error:
        # Autograd has seen that a saved tensor was written over, or the step what came of it.
        if not any(words in str(error) for words in ("modified by an inplace operation", "a gradient is not finite")):
            raise
        return math.nan
    return norms[-1]


@pytest.mark.full
def test_a_slot_that_is_freed_too_early_is_found() -> None:
    expected = run_distributed(2, train, PP2, 2, False)[0].result.grad_norms[-1]
    found = run_distributed(2, train_with_short_slots, PP2)
    assert any(math.isnan(norm) or norm != pytest.approx(expected, rel=TOLERANCE) for norm in found)


def refuse_auxiliary_losses() -> str:
    with pytest.raises(ConfigurationError) as caught, patch.object(Device, "graph_backend", lambda d: RerunBackend()):
        run_cell(
            (*BASE_FLAGS, "--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1"),
            *(1, "plain", "float64", provide_penalized_gpt, pretrain_gpt.forward_step),
        )
    return str(caught.value)


def test_what_no_graph_can_hold_is_refused() -> None:
    assert "cannot capture layers with auxiliary losses" in run_distributed(1, refuse_auxiliary_losses)[0]
    with pytest.raises(ConfigurationError, match="needs a CUDA device, and this run is on CPU; omit it"):
        run_cell(
            (*BASE_FLAGS, "--cuda-graph-impl", "local"),
            *(1, "plain", "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step),
        )
