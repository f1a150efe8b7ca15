"""What a training step on a CPU really holds, counted, is what the planner says of it under our own implementation.

One process stands in for each rank on torch's fake backend; its model, buffers, optimizer and saved tensors are real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pretrain_gpt
from megatron.core.device import Device
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.distributed.sharded_grad_buffer import ShardedGradBuffer
from megatron.core.distributed.sharded_weights import ShardedWeightBuffer
from megatron.core.kernels.matrix_product import has_library
from megatron.core.timers import Timers
from megatron.planning.activation_memory import activation_parts, layer_bytes
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS_ON_CPU
from megatron.planning.prediction.layer_work import megatron_step_flops
from megatron.planning.prediction.stage_memory import stage_memory
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import build_training_parts
from megatron.training.process.initialize import make_runtime
from megatron.training.train_state import TrainState
from megatron.training.training_step import TrainingStep
from megatron.verification.cells import MODULES, Cell, Layout, make_cell
from megatron.verification.collective_recorder import stand_in
from megatron.verification.run_cell import make_source, resolve_cell

SIZES = (
    *("--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "4", "--num-query-groups", "4"),
    *("--group-query-attention", "--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "200"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)
FULL = ("full", "uniform", "1")
BLOCK = ("full", "block", "1")
NORMS = ("selective", "layernorm")
LAYOUTS = (
    *(("gpt2", Layout(tp=tp, sequence_parallel=sp)) for tp, sp in ((1, False), (2, False), (2, True), (4, True))),
    *(("gpt2", Layout(pp=pp, virtual_stages=v)) for pp, v in ((2, 1), (4, 1), (2, 2))),
    *(("llama", Layout(tp=2, sequence_parallel=True, pp=2, dp=dp, sharding="optim")) for dp in (1, 2, 4)),
    *(
        ("llama", Layout(pp=2, recompute=recompute))
        for recompute in (("selective",), ("selective", "mlp"), FULL, BLOCK)
    ),
    *(("gpt2", Layout(tp=2, sequence_parallel=True, recompute=recompute)) for recompute in (MODULES, FULL)),
    *(("llama", Layout(tp=tp, virtual_stages=v, pp=2)) for tp, v in ((1, 2), (2, 1), (4, 2))),
    ("gpt2", Layout(pp=2, schedule="zero-bubble")),
    ("gpt2", Layout(pp=2, first_stage_layers=1)),
    ("gpt2", Layout(dp=4)),
    ("gpt2", Layout(dp=4, sharding="optim", overlap=True)),
    ("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True)),
    ("gpt2-untied", Layout(tp=2, sequence_parallel=True, pp=2)),
    ("gpt2-untied", Layout(pp=2, dp=2, sharding="optim")),
    ("llama", Layout(tp=2, pp=2, dp=2, sharding="optim", recompute=("selective", "core_attn", "mlp"))),
    ("llama", Layout(tp=2, sequence_parallel=True, pp=2, virtual_stages=2, recompute=("selective", "mlp"))),
    ("llama", Layout(pp=4, recompute=FULL)),
    ("llama", Layout(pp=4, virtual_stages=1, schedule="zero-bubble")),
    ("llama", Layout(tp=2, sequence_parallel=True, recompute=("selective",))),
    *(("llama", Layout(recompute=NORMS, tp=tp, sequence_parallel=tp > 1)) for tp in (1, 2)),
    ("llama", Layout(tp=2, sequence_parallel=True, recompute=MODULES)),
    ("llama", Layout(cp=2, pp=2, recompute=NORMS)),
    ("llama", Layout(cp=2, tp=2, sequence_parallel=True)),
    ("llama", Layout(cp=4, recompute=FULL)),
    ("gpt2", Layout(cp=2)),
    *(("llama", Layout(cp=4, cp_comm_type=exchange)) for exchange in ("a2a", "all_gather")),
    ("llama", Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2))),
    *(("gpt2", Layout(cp=2, cp_comm_type=exchange)) for exchange in ("a2a", "all_gather")),
    ("gpt2", Layout(cp=2, dp=2, sharding="optim", recompute=("selective",))),
)
FEW = (8, 13, len(LAYOUTS) - 10)
"""Layouts of every kind, which the default tests take."""


def linear_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """Return the operations of ``x @ weight.T``."""
    return 2 * x.numel() * weight[0]


UNKNOWN_TO_TORCH = {torch.ops.mkldnn._linear_pointwise: linear_flops} if has_library("onednn", torch.float32) else {}
"""oneDNN's own operator, which computes products of float32: on a CPU those of what is rounded to fp8 too."""


class _Saved:
    """Keep a tensor for the backward pass, and count its memory while it is kept."""

    def __init__(self, tensor: torch.Tensor, kept: SavedMemory) -> None:
        self.tensor, self.kept = tensor, kept
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self.kept.add(self.tensor, -1)


class SavedMemory:
    """Count the memory of saved numbers, each piece once; ``most`` is the largest count.

    Left out are parameters, logits, the angles of a rotation and, where they are not asked for, whole numbers.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], other_widths: Iterable[int], *, counts_integers: bool = False
    ) -> None:
        self.counts_integers = counts_integers
        self.parameters = {tensor.untyped_storage()._cdata for tensor in parameters}
        self.other_widths = set(other_widths)
        self.holders = Counter[int]()
        self.live = self.most = 0

    def add(self, tensor: torch.Tensor, count: int) -> None:
        """Count one more or one less that keeps a tensor's memory."""
        storage = tensor.untyped_storage()
        is_other = tensor.dim() > 1 and tensor.shape[-1] in self.other_widths
        is_other = is_other or (tensor.dim() == 4 and tensor.shape[1:3] == (1, 1))
        is_other = is_other or not (self.counts_integers or tensor.is_floating_point())
        if is_other or storage._cdata in self.parameters:
            return
        before = self.holders[storage._cdata] > 0
        self.holders[storage._cdata] += count
        self.live += storage.nbytes() * ((self.holders[storage._cdata] > 0) - before)
        self.most = max(self.most, self.live)


@dataclass(frozen=True)
class Held:
    """Hold bytes that a step really had, and the operations of its products."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    flops: int


def held_by_step(config: RunConfig, rank: int, data: str, *, counts_integers: bool = False) -> Held:
    with stand_in(rank, config.world_size):
        runtime = make_runtime(config, Device("cpu"))
        parts = build_training_parts(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
        parameters = [parameter for chunk in parts.chunks for parameter in chunk.parameters()]
        step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
        widths = (config.model.padded_vocab_size // config.model.tensor_model_parallel_size,)
        kept = SavedMemory(parameters, widths, counts_integers=counts_integers)
        counter = FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(tensor, kept), lambda saved: saved.tensor
        )
        with closing(make_source(config, runtime, data)) as source, counter, hooks:
            step.run(TrainState(), source, config.training.global_batch_size, None)
        buffers = [buffer for chunk in parts.ddp_chunks for buffer in chunk.grad_buffers]
        gradients = _size(buffer.grad_data for buffer in buffers) + sum(_pool_bytes(buffer) for buffer in buffers)
        held = list(parts.optimizer.held_tensors())
        shards = [buffer.weights.data for buffer in buffers if isinstance(buffer, ShardedWeightBuffer)]
        return Held(_size([*parameters, *shards]), gradients, _size(held), kept.most, counter.get_total_flops())


def _pool_bytes(buffer: ParamAndGradBuffer) -> int:
    """Return the memory of full buckets, through which gradients go that are sharded."""
    if not isinstance(buffer, ShardedGradBuffer):
        return 0
    most = max(bucket.num_elements for bucket in buffer.layout.buckets)
    return buffer.pool.num_allocated * most * buffer.grad_data.element_size()


def _size(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def assert_held(cell: Cell) -> None:
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    model, per_stage = plan.model, config.world_size // plan.parallel_sizes.pp
    # The last norm too has its input in float32 there; the loss keeps a few numbers a token.
    wide = 4 * plan.num_rows * model.hidden_size * (model.normalization == "RMSNorm")
    numbers = 20 * plan.num_tokens
    flops = 0
    for stage in range(plan.parallel_sizes.pp):
        held = held_by_step(config, stage * per_stage, cell.data)
        predicted = stage_memory(plan, stage, OURS_ON_CPU)
        # The hooks do not see what is computed again inside the backward pass.
        kept, ends = activation_parts(plan, stage, layer_bytes(plan, OURS_ON_CPU.saved))
        ends += wide * (ends > 0)
        flops += held.flops * per_stage
        counted = (held.weights, held.gradients, held.optimizer)
        name = f"{cell.name}, stage {stage}"
        expected = (predicted.weights, predicted.gradients, predicted.optimizer)
        assert counted == pytest.approx(expected, rel=0.01), name
        assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=numbers), name
    if model.recompute_granularity is None:
        assert flops == pytest.approx(counted_flops(plan), rel=0.01), cell.name


def counted_flops(plan: Plan, cores: int = 0) -> float:
    """Return the operations of a step; torch counts no flash attention, and of other attention the unused half too."""
    model, s = plan.model, plan.seq_length
    of_scores = 4.0 * model.query_projection_size
    if model.multi_latent_attention:
        of_scores = 2.0 * model.num_attention_heads * (model.latent_query_width + model.v_head_dim)
    num_layers = model.num_layers + model.num_further_tokens
    windows = [model.layer_windows[model.kind_of(number)] or s for number in range(num_layers)]
    used = sum(window * (s - window / 2) for window in windows)
    counted = model.forward_flops_per_sequence(s) + of_scores * (cores * num_layers * s * s - used)
    return 3.0 * plan.global_batch_size * counted


def cell_of(number: int) -> Cell:
    shape, layout = LAYOUTS[number]
    return make_cell(shape, layout, extra=SIZES)


@pytest.mark.default(1)
@pytest.mark.parametrize("number", FEW, ids=[LAYOUTS[number][1].name for number in FEW])
def test_a_step_holds_what_is_predicted(number: int) -> None:
    assert_held(cell_of(number))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sequence_parallel=True), Layout(pp=2, dp=2, sharding="optim"), Layout(dp=2, sharding="optim_grads")],
    ids=lambda layout: layout.name,
)
def test_a_step_of_adapters_holds_no_gradients_and_no_state_of_frozen_weights(layout: Layout) -> None:
    adapters = ("--lora-rank", "3", "--load", "somewhere", "--finetune")
    cell = make_cell("llama", layout, extra=(*SIZES, *adapters))
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    for stage in range(layout.pp):
        held = held_by_step(config, stage * config.world_size // layout.pp, cell.data)
        predicted = stage_memory(plan, stage, OURS_ON_CPU)
        counted = (held.weights, held.gradients, held.optimizer)
        assert counted == pytest.approx((predicted.weights, predicted.gradients, predicted.optimizer), rel=0.01)
        kept, ends = activation_parts(plan, stage, layer_bytes(plan, OURS_ON_CPU.saved))
        # Of the last norm its input in float32 alone: its weight is frozen.
        ends = 4 * plan.num_rows * plan.model.hidden_size * (ends > 0)
        assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=40 * plan.num_tokens), stage


def test_buckets_are_open_while_weight_gradients_are_put_off() -> None:
    """Every bucket has a bias or a norm's weight, whose gradients come first."""
    layout = Layout(pp=2, dp=2, sharding="optim_grads", overlap=True, schedule="zero-bubble")
    assert_held(make_cell("gpt2", layout, extra=(*SIZES, "--no-check-for-nan-in-loss-and-grad")))


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["optim", "optim_grads"])
def test_copies_of_what_is_sharded_are_held(sharding: str) -> None:
    copies = ("--num-distributed-optimizer-instances", "2")
    for layout in (Layout(dp=4), Layout(tp=2, pp=2, dp=4, sequence_parallel=True)):
        assert_held(make_cell("llama", replace(layout, sharding=sharding, overlap=True), extra=(*SIZES, *copies)))


@pytest.mark.long
def test_steps_of_all_layouts_hold_what_is_predicted() -> None:
    assert len(LAYOUTS) >= 30
    for number in range(len(LAYOUTS)):
        assert_held(cell_of(number))


def test_attention_whose_scores_are_in_memory_is_counted_whole() -> None:
    cell = make_cell("llama", Layout(), extra=(*SIZES, "--attention-backend", "unfused", "--num-layers", "2"))
    config = resolve_cell(cell.flags, 1, "bfloat16")
    plan = Plan.of(config)
    flops = held_by_step(config, 0, cell.data).flops
    assert flops == pytest.approx(counted_flops(plan, cores=1), rel=0.01)
    assert megatron_step_flops(plan) == pytest.approx(flops, rel=0.01)
