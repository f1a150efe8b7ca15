"""The FLOPs of a dry run, compared with the closed form of the model.

Hardware FLOPs are the FLOPs of all kernels of a step. Model FLOPs exclude three parts of them: recomputation, the
excess of attention kernels over the scores that the model uses (masked scores, and the scores that FlashAttention's
backward pass computes again), and the optimizer's GEMMs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.config.run_config import RunConfig
from megatron.planner.expert_layer import ExpertLayer
from megatron.planner.simulation.roofline import is_attention
from megatron.planner.simulation.step_record import Operation

_BACKWARD = 2
"""Ratio of backward to forward FLOPs: the gradients of both operands."""
_KERNELS = "megatron/core/ops/"
"""Where attention without a kernel of its own multiplies its batched matrices."""
_TOLERANCE = 0.01


@dataclass(frozen=True)
class ModelFlops:
    """Hold the FLOPs of a step, forward and backward, that a rank's layers need: of their GEMMs, and of attention."""

    gemms: float
    attention: float

    @property
    def total(self) -> float:
        return self.gemms + self.attention


NO_FLOPS = ModelFlops(0.0, 0.0)


@dataclass(frozen=True)
class CountedFlops:
    """Hold the FLOPs that a step's kernels compute.

    ``gemms`` and ``attention`` are of the forward and backward passes without recomputation, ``recomputed`` what that
    adds, and ``optimizer`` what the update computes. ``uncounted`` has the operators whose FLOPs are unknown.
    """

    gemms: float
    attention: float
    recomputed: float
    optimizer: float
    uncounted: Mapping[str, int]

    @property
    def hardware(self) -> float:
        return self.gemms + self.attention + self.recomputed + self.optimizer

    def of_model(self, needed: ModelFlops) -> float:
        """Return the passes' FLOPs without what attention computes beyond the scores that the model uses."""
        return self.gemms + min(self.attention, needed.attention)


def count_flops(operations: Iterable[Operation]) -> CountedFlops:
    """Return the FLOPs of a step by part."""
    parts, uncounted = defaultdict[str, float](float), Counter[str]()
    for each in operations:
        parts[_part(each)] += each.flops
        uncounted[each.name] += each.is_uncounted
    return CountedFlops(
        gemms=parts["gemms"],
        attention=parts["attention"],
        recomputed=parts["recomputed"],
        optimizer=parts["optimizer"],
        uncounted=+uncounted,
    )


def _part(operation: Operation) -> str:
    if operation.is_recomputed:
        return "recomputed"
    if operation.phase in ("optimizer", "end"):
        return "optimizer"
    is_score = operation.name in ("bmm", "baddbmm") and _KERNELS in operation.where
    return "attention" if is_score or is_attention(operation) else "gemms"


def needed_flops(config: RunConfig, pipeline_rank: int) -> ModelFlops:
    """Return what the layers of a rank need in a step, where tokens spread evenly over ranks and experts.

    A packed sample holds two documents of equal length, as a dry run's do, and attention needs what each of them shows.
    An expert of limited capacity needs no more than that, and rows that fill it up are computed too.
    Beside low-rank adapters weights have no gradients; the first
    layer of the model may need no backward pass at all, and its is left out.
    """
    model, length = config.model, config.data.seq_length
    gemms = attention = 0.0
    backward = 1 if model.lora_rank else _BACKWARD
    documents = 2 if config.data.reset_attention_mask else 1
    for chunk in config.stage_layout.chunks(pipeline_rank):
        further = range(model.num_layers, model.num_layers + model.num_further_tokens) if chunk.has_loss else ()
        for number in (*chunk.layer_numbers, *further):
            is_forward_only = model.lora_rank and number == 0
            of_gemms, _ = model.layer_forward_flops(number, length)
            of_attention = documents * model.layer_forward_flops(number, length // documents)[1]
            of_gemms += _beyond_choices(config, number)
            gemms += of_gemms * (1 if is_forward_only else 1 + backward)
            attention += of_attention * (1 if is_forward_only else 1 + _BACKWARD)
        if chunk.has_loss:
            gemms += model.output_forward_flops(length) * (1 + backward)
    sequences = config.training.global_batch_size / config.data_parallel_size
    share = sequences / (model.tensor_model_parallel_size * model.context_parallel_size)
    return ModelFlops(gemms * share, attention * share)


def _beyond_choices(config: RunConfig, layer_number: int) -> float:
    """Return the FLOPs of a layer's forward pass that experts of limited capacity save by what they drop, below 0, or
    add by rows that fill them up to their capacity.
    """
    model, length = config.model, config.data.seq_length
    if model.moe_expert_capacity_factor is None or not model.moe_layers[model.kind_of(layer_number)]:
        return 0.0
    sequences = config.training.micro_batch_size
    layer = ExpertLayer(model, length * sequences // model.context_parallel_size, sequences, element=1)
    chosen = layer.rows * model.moe_router_topk * layer.sizes.expert_tp
    of_experts = model.hidden_size * model.moe_router_topk * model.moe_ffn_hidden_size * (3 if model.is_gated else 2)
    return 2.0 * length * of_experts * (layer.given / chosen - 1)


def check_flops(counted: CountedFlops, needed: ModelFlops) -> None:
    """Check that the kernels compute at least what the model needs.

    The excess of attention kernels does not count, since it would hide a missing GEMM.

    Raises:
        RuntimeError: they compute less, so that some kernel's work is not counted: the step's time would be too short.
    """
    of_model = counted.of_model(needed)
    if of_model >= (1 - _TOLERANCE) * needed.total:
        return
    unknown = ", ".join(counted.uncounted) or "none"
    raise RuntimeError(
        f"the dry run counted {of_model:.4g} FLOPs in this rank's forward and backward passes, but its layers need "
        f"{needed.total:.4g} by TransformerConfig.layer_forward_flops; correct that if the "
        "model has changed, add a missing GEMM to megatron/planner/simulation/gemms.py, or register the FLOPs of a "
        f"custom operator with torch.utils.flop_counter.register_flop_formula; operators with unknown FLOPs: {unknown}"
    )
