"""Memory and traces of a model's layers and ends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation, SavedBytes
from megatron.planner.layer_kinds import layer_kinds
from megatron.planner.memory_passes import expert_layer
from megatron.planner.piece_memory import NOTHING, ModelPieces
from megatron.planner.plan import Plan
from megatron.planner.saved_by_megatron import score_elements
from megatron.planner.trace_store import default_store
from megatron.planner.traces import PieceMemory, PieceTrace, TraceRequest

_SCORES_AT_WORK = 3
"""Tensors of scores in the backward pass of one layer's attention."""
HOPPER = (9, 0)
"""The compute capability for which a model is traced if no GPU type is given."""


def model_pieces(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> ModelPieces:
    """Return the memory of every piece of a plan's model for one micro-batch.

    Raises:
        ConfigurationError: this node cannot simulate CUDA, which traces of pieces need.
    """
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    hidden = plan.num_rows * model.hidden_size * element
    kept_input = hidden // plan.parallel_sizes.tp if model.distribute_saved_activations else hidden
    numbers = _representatives(model, plan.seq_length)
    own, again = numbers[: model.num_layers], dict[int, PieceMemory]()
    if implementation.saved is None:
        capability = HOPPER if gpu is None else gpu.capability
        of_number = {number: layer_trace(plan, capability, number).memory for number in set(own)}
        if model.recompute_granularity == "full":
            again = {number: layer_trace(plan, capability, number, is_again=True).memory for number in set(own)}
        embedding = end_trace(plan, capability, has_loss=False).memory
    else:
        of_number = {number: _described_layer(plan, implementation, number) for number in set(own)}
        embedding = NOTHING
    deferred = 0
    if implementation.is_traced:
        loss = end_trace(plan, HOPPER if gpu is None else gpu.capability, has_loss=True).memory
        if model.defer_embedding_wgrad_compute:
            deferred = plan.num_predictions * model.hidden_size * element + loss.logits
    else:
        loss = _described_loss(plan, implementation, of_number[own[-1]])
    return ModelPieces(
        layers=[of_number[number] for number in own],
        embedding=embedding,
        loss=loss,
        input_bytes=kept_input,
        gradient_bytes=hidden,
        output_deferred=deferred,
        again=[again[number] for number in own] if again else (),
    )


def layer_trace(plan: Plan, capability: tuple[int, int], number: int, *, is_again: bool = False) -> PieceTrace:
    """Return the trace of a layer, or of the first one that is like it, with selective recompute if the plan has it.

    ``is_again`` is set for a layer that full recompute runs again alone.
    """
    contents = StageContents((_representatives(plan.model, plan.seq_length)[number],))
    return default_store().trace(_request(plan, capability, contents, is_again=is_again))


def end_trace(plan: Plan, capability: tuple[int, int], *, has_loss: bool) -> PieceTrace:
    """Return the trace of the embedding, or of the final norm, the MTP modules, the output layer and the loss."""
    contents = StageContents((), has_embedding=not has_loss, has_loss=has_loss)
    return default_store().trace(_request(plan, capability, contents))


def _request(
    plan: Plan, capability: tuple[int, int], contents: StageContents, *, is_again: bool = False
) -> TraceRequest:
    splits = plan.pipeline_schedule == "zero-bubble" or plan.model.delay_wgrad_compute
    splits = splits and (contents.has_loss or len(contents.layer_numbers) > 0)
    return _request_of(
        plan.model,
        contents,
        plan.seq_length,
        plan.micro_batch_size,
        capability,
        splits,
        plan.ddp.gradient_accumulation_fusion,
        not plan.ddp.grad_reduce_in_bf16,
        is_again,
    )


# A request's key takes longer to make than to look up, and a search asks for the same ones thousands of times.
@functools.lru_cache(maxsize=8192)
def _request_of(
    model: GPTConfig,
    contents: StageContents,
    seq_length: int,
    micro_batch_size: int,
    capability: tuple[int, int],
    splits_backward: bool,
    fuses_accumulation: bool,
    reduces_in_float32: bool,
    is_again: bool,
) -> TraceRequest:
    return TraceRequest(
        model=_for_trace(model, is_again=is_again, is_end=not contents.layer_numbers),
        contents=contents,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        capability=capability,
        splits_backward=splits_backward,
        fuses_accumulation=fuses_accumulation,
        reduces_in_float32=reduces_in_float32,
    )


# A search asks for the same models thousands of times.
@functools.lru_cache(maxsize=4096)
def _for_trace(model: GPTConfig, *, is_again: bool, is_end: bool) -> GPTConfig:
    """Return a model whose layers keep what they save, but for modules that are computed again, or run again alone.

    Recompute and fp8 are of layers: at the ends of a model they are those of its MTP modules.
    """
    alone = {"recompute_method": "uniform", "recompute_num_layers": 1}
    none = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    fields: dict[str, Any] = {}
    if is_end and not model.num_further_tokens:
        fields = none | {"fp8_format": None, "distribute_saved_activations": False}
    elif model.recompute_granularity == "full":
        fields = alone if is_again or is_end else none | {"distribute_saved_activations": False}
    return dataclasses.replace(model, **fields) if fields else model


# A search asks for the same models thousands of times.
@functools.lru_cache(maxsize=1024)
def _representatives(model: GPTConfig, seq_length: int) -> Sequence[int]:
    """Return for each layer, those of the MTP modules included, the first one that is like it."""
    first: dict[object, int] = {}
    kinds = layer_kinds(model, seq_length)
    # After a frozen embedding a layer keeps less.
    keys = [(kind, number == 0 and bool(model.lora_rank)) for number, kind in enumerate(kinds)]
    return [first.setdefault(key, number) for number, key in enumerate(keys)]


def _described_layer(plan: Plan, implementation: Implementation, number: int) -> PieceMemory:
    """Return the memory of another program's layer: what it keeps, and gradients at work in its feed-forward."""
    assert implementation.saved is not None
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    kept, whole = (_sum(implementation.saved, each, plan, number) for each in _with_and_without_recompute(model))
    at_work = element * _feed_forward_gradients(plan, has_experts=model.moe_layers[model.kind_of(number)])
    if not implementation.has_flash_attention:
        at_work += _SCORES_AT_WORK * element * score_elements(model, plan.seq_length, plan.micro_batch_size)
    return PieceMemory(kept, kept, whole + at_work)


def _described_loss(plan: Plan, implementation: Implementation, further: PieceMemory) -> PieceMemory:
    """Return the memory of another program's final norm, MTP modules, output layer and loss."""
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    logits = plan.num_logits * (element + implementation.wide_logit_bytes)
    inputs = 1 if model.lora_rank else 2 + model.num_further_tokens
    ends = inputs * plan.num_rows * model.hidden_size * element
    if model.sequence_parallel:
        ends += element * plan.num_predictions * model.hidden_size  # the output layer's input, gathered
    if not implementation.fuses_weight_gradients and not model.lora_rank:
        ends += element * (model.padded_vocab_size // plan.parallel_sizes.tp) * model.hidden_size
    kept = model.num_further_tokens * further.kept
    return PieceMemory(kept, kept + ends + logits, kept + ends + logits, 0, logits)


def _sum(saved: SavedBytes, model: GPTConfig, plan: Plan, number: int) -> int:
    return sum(saved(model, plan.seq_length, plan.micro_batch_size, number).values())


@functools.lru_cache(maxsize=256)
def _with_and_without_recompute(model: GPTConfig) -> tuple[GPTConfig, GPTConfig]:
    """Return a model with its selective recompute, if it has that, and without any."""
    without = model
    if model.recompute_granularity is not None:
        without = dataclasses.replace(model, recompute_granularity=None)
    return (model if model.recompute_granularity == "selective" else without), without


def _feed_forward_gradients(plan: Plan, *, has_experts: bool) -> int:
    """Return the numbers at work in a feed-forward's backward pass: gradients of its output, its middle, its gates."""
    model, at_work = plan.model, plan.num_rows * plan.model.hidden_size
    if has_experts:
        return at_work + expert_layer(plan).at_work
    return at_work + plan.num_tokens * model.ffn_hidden_size // model.tensor_model_parallel_size * (2 + model.is_gated)
