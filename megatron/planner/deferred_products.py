"""What weight gradients that are put off keep until their turn: the operands of their products, in bytes.

An operand is what a linear layer took, gathered where a sequence is cut over the tensor-parallel ranks, and the whole
gradient of what it gave. Frozen weights put nothing off, the adapters beside them keep their input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.pipeline_parallel.action import Action, Pass, StagePlace
from megatron.core.pipeline_parallel.schedules import with_deferred_grads
from megatron.planner.activation_memory import LayerBytes, kept_of_chunks
from megatron.planner.layer_kinds import layer_numbers
from megatron.planner.layer_widths import is_whole_on_ranks, layer_widths
from megatron.planner.plan import Plan
from megatron.planner.traffic.float8_traffic import fills_blocks


@dataclass(frozen=True)
class Deferred:
    """Hold what is there at the fullest moment beside what layers keep, and how many output layers wait at once.

    ``of_layer`` are the operands of the layer that has most.
    """

    num_bytes: int = 0
    num_outputs: int = 0
    of_layer: int = 0


def deferred_products(plan: Plan, stage: int, layers: Sequence[LayerBytes]) -> Deferred:
    """Return what a stage keeps of weight gradients that come later than the rest of their backward passes.

    ``layers`` is what `layer_bytes` returned. Logits are left out: each output layer that waits has those of one
    micro-batch.
    """
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    if not (
        plan.pipeline_schedule == "zero-bubble" or model.delay_wgrad_compute or model.defer_embedding_wgrad_compute
    ):
        return Deferred()
    actions = _actions(plan, stage, len(chunks))
    kept = kept_of_chunks(plan, stage, layers)
    has_experts = model.moe_layers
    output = 0 if model.lora_rank else plan.num_predictions * model.hidden_size * ELEMENT_BYTES[model.params_dtype]
    # Layers of a kind are many.
    of_kind = {
        (in_float8, has): _layer_operands(plan, in_float8=in_float8, has_experts=has)
        for in_float8 in (False, True)
        for has in set(has_experts)
    }
    join = _join_operands(plan)
    of_layers = [
        [
            of_kind[model.is_in_float8(number, model.num_layers), has_experts[model.kind_of(number)]]
            + join * (number >= model.num_layers)
            for number in layer_numbers(model, chunk)
        ]
        for chunk in chunks
    ]
    operands = [sum(several) for several in of_layers]
    operands[-1] += output * chunks[-1].has_loss
    most, num_outputs = _fullest(actions, kept, operands, output * chunks[-1].has_loss)
    return Deferred(most, num_outputs, max(itertools.chain(*of_layers), default=0))


def _actions(plan: Plan, stage: int, num_chunks: int) -> Sequence[Action]:
    model = plan.model
    return with_deferred_grads(
        plan.warm_up_actions(stage),
        StagePlace(plan.parallel_sizes.pp, stage, num_chunks),
        delays=model.delay_wgrad_compute,
        defers=model.defer_embedding_wgrad_compute,
        max_microbatches=model.wgrad_deferral_limit,
    )


def _layer_operands(plan: Plan, *, in_float8: bool, has_experts: bool) -> int:
    """Return the operands of one layer's weight gradients of a micro-batch: inputs and gradients of its products.

    Scales of operands in fp8 are not counted. Experts' weight gradients are not put off.
    """
    model, tokens = plan.model, plan.num_tokens
    widths = layer_widths(model, has_experts=has_experts)
    if model.lora_rank:
        adapted = sum(widths[name][0] for name in model.adapted_parts if name in widths)
        return tokens * adapted * ELEMENT_BYTES[model.params_dtype]
    element = _operand_bytes(plan, in_float8=in_float8)
    of_rows = sum(inner + columns for name, (inner, columns) in widths.items() if is_whole_on_ranks(name))
    of_tokens = sum(inner + columns for inner, columns in widths.values()) - of_rows
    return element * (tokens * of_tokens + plan.num_rows * of_rows)


def _join_operands(plan: Plan) -> int:
    """Return those of the product in front of a layer that predicts a further token: two inputs, and its gradient."""
    width = 2 * plan.model.hidden_size + plan.model.hidden_size // plan.parallel_sizes.tp
    return _operand_bytes(plan, in_float8=plan.model.fp8_format is not None) * plan.num_tokens * width


def _operand_bytes(plan: Plan, *, in_float8: bool) -> int:
    """Return the bytes of an operand's element."""
    is_rounded = in_float8 and plan.model.fp8_wgrad and fills_blocks(plan.model, plan.num_rows)
    return 1 if is_rounded else ELEMENT_BYTES[plan.model.params_dtype]


def _fullest(actions: Sequence[Action], kept: Sequence[int], operands: Sequence[int], output: int) -> tuple[int, int]:
    """Return what is more at the fullest moment than where nothing waits, and the most output layers that wait."""
    late = {action.microbatch for action in actions if action.kind is Pass.OUTPUT_WEIGHT}
    last = len(kept) - 1
    in_flight = most_kept = waiting = most = outputs = most_outputs = 0
    for kind, microbatch, chunk in actions:
        leaves_output = kind is Pass.BACKWARD and chunk == last and microbatch in late
        if kind is Pass.FORWARD:
            in_flight += kept[chunk]
        elif kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            in_flight -= kept[chunk]
        if kind is Pass.BACKWARD_INPUT:
            waiting += operands[chunk]
        elif kind is Pass.BACKWARD_WEIGHT:
            waiting -= operands[chunk]
        elif leaves_output:
            waiting += output
        elif kind is Pass.OUTPUT_WEIGHT:
            waiting -= output
        if chunk == last:
            outputs += (kind is Pass.BACKWARD_INPUT or leaves_output) - (
                kind in (Pass.BACKWARD_WEIGHT, Pass.OUTPUT_WEIGHT)
            )
        most_kept, most = max(most_kept, in_flight), max(most, in_flight + waiting)
        most_outputs = max(most_outputs, outputs)
    return most - most_kept, most_outputs
