"""Measure the memory that a training step really holds on CPU, and compare it with the planner.

One process acts as each rank on torch's fake backend. Its model, buffers, optimizer and saved tensors are real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.distributed.fully_sharded_data_parallel import ShardedGradBuffer, ShardedWeightBuffer
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.ops.gemm import has_library
from megatron.core.sharding import held_of, quantized_of
from megatron.core.timers import Timers
from megatron.planner.implementations import NATIVE
from megatron.planner.memory import stage_state
from megatron.planner.plan import Plan
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.cells import Cell
from megatron.verification.collective_recorder import stand_in
from megatron.verification.run_cell import make_source, resolve_cell
from tests.closed_forms.saved_activations import activation_parts, layer_bytes
from tests.closed_forms.saved_on_cpu import saved_on_cpu
from tests.harness.balanced_experts import balanced_experts


def linear_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """Count the FLOPs of ``x @ weight.T``."""
    return 2 * x.numel() * weight[0]


UNKNOWN_TO_TORCH = {torch.ops.mkldnn._linear_pointwise: linear_flops} if has_library("onednn", torch.float32) else {}
"""The operator of oneDNN, which computes float32 GEMMs on CPU, also those of fp8 layers."""


class _Saved:
    """Save a tensor for the backward pass, and count its memory while autograd holds it."""

    def __init__(self, tensor: torch.Tensor, kept: SavedMemory) -> None:
        self.tensor, self.kept = tensor, kept
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self.kept.add(self.tensor, -1)


class SavedMemory:
    """Count the bytes of tensors saved for the backward pass, each storage once; ``most`` is the peak.

    Parameters, logits and rotary angles are left out. Integers are left out unless ``counts_integers`` is set.
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
        """Count one more (1) or one less (-1) holder of a tensor's storage."""
        storage = tensor.untyped_storage()
        is_other = tensor.dim() > 1 and tensor.shape[-1] in self.other_widths
        is_angles = tensor.dim() == 4 and tensor.shape[1:3] == (1, 1) and tensor.dtype is torch.float32
        is_other = is_other or is_angles
        is_other = is_other or not (self.counts_integers or tensor.is_floating_point())
        if is_other or storage._cdata in self.parameters:
            return
        before = self.holders[storage._cdata] > 0
        self.holders[storage._cdata] += count
        self.live += storage.nbytes() * ((self.holders[storage._cdata] > 0) - before)
        self.most = max(self.most, self.live)


@dataclass(frozen=True)
class Held:
    """Measured bytes of a step on one rank, and the FLOPs of its GEMMs."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    flops: int


def held_by_step(config: RunConfig, rank: int, data: str, *, counts_integers: bool = False) -> Held:
    """Run one training step as ``rank`` and measure its memory and FLOPs."""
    with stand_in(rank, config.world_size):
        runtime = make_runtime(config, Device("cpu"))
        parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
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
        quantized = [stored for each in parameters if quantized_of(each) for _, stored in held_of(each)]
        return Held(
            _size([*parameters, *shards, *quantized]), gradients, _size(held), kept.most, counter.get_total_flops()
        )


def _pool_bytes(buffer: ParamAndGradBuffer) -> int:
    """Count the bytes of full buckets, through which sharded gradients are reduced."""
    if not isinstance(buffer, ShardedGradBuffer):
        return 0
    most = max(bucket.num_elements for bucket in buffer.layout.buckets)
    return buffer.pool.num_allocated * most * buffer.grad_data.element_size()


def _size(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def assert_memory_matches_the_plan(cell: Cell, *, saved_bytes_per_token: int, checks_flops: bool = True) -> None:
    """Compare the memory of every stage, and the FLOPs of a step, with the planner within 1 percent.

    The loss and an MoE router save a few numbers per predicted token that the planner leaves out. They may take up to
    ``saved_bytes_per_token`` more.
    """
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    model, per_stage = plan.model, config.world_size // plan.parallel_sizes.pp
    has_experts = model.moe.num_experts is not None
    # On CPU the last norm also saves its input in float32.
    wide = 4 * plan.num_rows * model.hidden_size * (model.normalization == "RMSNorm")
    flops = 0
    for stage in range(plan.parallel_sizes.pp):
        with balanced_experts() if has_experts else nullcontext():
            held = held_by_step(config, stage * per_stage, cell.data, counts_integers=has_experts)
        flops += held.flops * per_stage
        name = f"{cell.name}, stage {stage}"
        state = stage_state(plan, stage, NATIVE)
        # A rank frees the gathered weights and keeps only its shards by the end of the step.
        weights, gradients = state.weights, state.gradients + state.gradient_pool
        # In this process the offloaded part of the state is measured, too.
        optimizer = state.optimizer / (1.0 - plan.optimizer.offload_fraction)
        counted = (held.weights, held.gradients, held.optimizer)
        assert counted == pytest.approx((weights, gradients, optimizer), rel=0.01), name
        # The hooks do not see tensors that are recomputed inside the backward pass.
        kept, ends = activation_parts(plan, stage, layer_bytes(plan, saved_on_cpu))
        # With LoRA the weight of the last norm is frozen, so the norm saves only its input in float32.
        ends = (wide if model.lora_rank else ends + wide) * (ends > 0)
        numbers = saved_bytes_per_token * plan.num_predictions
        assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=numbers), name
    # Recomputation adds FLOPs, and frozen weights save FLOPs, which the formula leaves out.
    if checks_flops and model.recompute_granularity is None and not model.lora_rank:
        assert flops == pytest.approx(counted_flops(plan), rel=0.01), cell.name


def counted_flops(plan: Plan, cores: int = 0) -> float:
    """Predict the FLOPs that torch counts in a step.

    torch counts no flash attention. It counts the scores of unfused attention whole, with the masked half. ``cores`` is
    the number of score matrices per layer that are in memory.
    """
    model, s = plan.model, plan.seq_length
    counted = model.forward_flops_per_sequence(s)
    for number in range(model.num_layers + model.mtp.mtp_depth):
        of_scores = 4.0 * model.of_layer(number).query_projection_size
        if model.mla.multi_latent_attention:
            of_scores = 2.0 * model.num_attention_heads * (model.mla.latent_query_width + model.mla.v_head_dim)
        window = model.layer_windows[model.kind_of(number)] or s
        counted += of_scores * (cores * s * s - window * (s - window / 2))
    return 3.0 * plan.global_batch_size * counted
