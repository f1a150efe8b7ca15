"""Passes over memory of Megatron-LM and torchtitan, and their kernel launches, for one micro-batch of a layer.

A pass over memory reads and writes tensors between matmuls: norms, residual sums, activations, rotary positions, casts.
Counts are forward and backward together.
"""

from __future__ import annotations

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.planner.expert_layer import ExpertLayer
from megatron.planner.implementations import Implementation
from megatron.planner.layer_kinds import LayerKind
from megatron.planner.plan import Plan
from megatron.planner.saved_by_megatron import key_value_width, score_elements

_FUSED_ROTATION, _ROTATION = 8, 40
"""Bytes per element of queries and keys: read and written once each way, or by some ten operations each way."""
_LOSS_BYTES = 40
"""Bytes per logit: rounded logits widened, largest, difference, exponential, sum, quotient; and back again."""
_SCORE_BYTES = 30
"""Bytes per score of attention without flash: matmul, scale and softmax, dropout, matmul; and back again."""
_SCORE_PASSES = 14
"""How often a score of the router is read or written: softmax, the best, their weights, losses; and back. Counted."""
_FUSED_MOVES = 8
"""How often rows of tokens are read or written each way if a permutation is one kernel."""
_LAUNCHES, _EXPERT_LAUNCHES = 70, 60
"""Kernels of a layer, and of a router, a dispatch and experts in addition, forward and backward. Assumed."""
_LOOP_LAUNCHES, _CASTS = 6, 10
"""Kernels of one expert whose matmuls are its own, and operands of them that are rounded to fp8: counted."""
_CAST_LAUNCHES = {"delayed": 2, "tensorwise": 3}
"""Kernels that round an operand."""
_HALF = 2


def expert_layer(plan: Plan) -> ExpertLayer:
    """Return what a layer of experts has to do for one micro-batch on one rank."""
    element = ELEMENT_BYTES[plan.model.params_dtype]
    return ExpertLayer(plan.model, plan.num_tokens, plan.micro_batch_size, element)


def loss_bytes(plan: Plan) -> float:
    """Return the bytes that the loss reads and writes of the logits."""
    return float(plan.num_logits * _LOSS_BYTES)


def passed_bytes(plan: Plan, implementation: Implementation, kind: LayerKind) -> float:
    """Return the bytes that a layer's passes over memory read and write."""
    total = _dense_bytes(plan, implementation, kind)
    if kind.has_experts:
        total += _expert_bytes(plan, implementation, kind)
    if kind.in_float8:
        total += _cast_bytes(plan, kind)
    if kind.is_further:
        # Three norms, and the concatenation of the hidden states and the embedded tokens.
        total += plan.num_rows * plan.model.hidden_size * _HALF * (3 * 5.0 + 2 * 4.0)
    return total


def num_launches(plan: Plan, implementation: Implementation, kind: LayerKind) -> int:
    """Return the kernels of a layer."""
    if not kind.has_experts:
        return _LAUNCHES
    per_expert = 0
    if kind.in_float8 or implementation.loops_over_experts:
        # transformer-engine has a kernel of its own for each recipe.
        most = max(_CAST_LAUNCHES.values())
        per_expert = _LOOP_LAUNCHES + kind.in_float8 * _CASTS * _CAST_LAUNCHES.get(plan.model.fp8_recipe, most)
    return _LAUNCHES + _EXPERT_LAUNCHES + expert_layer(plan).num_local * per_expert


def _feed_forward_width(plan: Plan, kind: LayerKind) -> int:
    """Return a rank's width of the feed-forward, or of the shared expert in a layer of experts."""
    model = plan.model
    whole = (model.moe_shared_expert_intermediate_size or 0) if kind.has_experts else model.ffn_hidden_size
    return whole // plan.parallel_sizes.tp


def _dense_bytes(plan: Plan, implementation: Implementation, kind: LayerKind) -> float:
    """Return the bytes of a layer's passes; of a feed-forward of experts only those of the shared expert."""
    model, tokens, rows = plan.model, plan.num_tokens, plan.num_rows
    t, h = plan.parallel_sizes.tp, model.hidden_size
    queries, keys = model.num_attention_heads * model.head_width // t, key_value_width(model)
    ffn, gates = _feed_forward_width(plan, kind), 2 if model.is_gated else 1
    # Two norms (2 tensors forward, 3 backward) and two residual sums (3 each way).
    total = rows * h * _HALF * 2.0 * (2 + 3 + 3 + 3)
    if model.multi_latent_attention:
        heads, narrow = model.num_attention_heads // t, (model.q_lora_rank or 0) + model.kv_lora_rank
        total += tokens * (heads + 1) * model.qk_pos_emb_head_dim * _ROTATION
        total += rows * narrow * _HALF * 5.0 * model.qk_layernorm
    elif kind.has_rotary and model.position_embedding_type == "rope":
        total += tokens * (queries + keys) * (_FUSED_ROTATION if implementation.is_rotation_fused else _ROTATION)
    # Queries, keys and values are split, their gradients concatenated; gradients of shared heads are summed.
    total += tokens * _HALF * (4 * (queries + 2 * keys) + 4 * queries * (keys < queries))
    total += tokens * ffn * _HALF * ((gates + 1) + (2 * gates + 1))
    if model.hidden_dropout > 0.0:
        total += rows * h * 2 * 2
    if not implementation.has_flash_attention:
        total += score_elements(model, plan.seq_length, plan.micro_batch_size) * _SCORE_BYTES
    return total


def _expert_bytes(plan: Plan, implementation: Implementation, kind: LayerKind) -> float:
    """Return the bytes of the passes of a router, a dispatch and experts."""
    layer, h = expert_layer(plan), plan.model.hidden_size
    moves = 2 * _FUSED_MOVES if implementation.fuses_permutation else sum(layer.moved_rows)
    passed: float = layer.choices * h * layer.element * moves
    passed += layer.given * layer.width * layer.element * (3 * layer.gates + 2)
    passed += layer.rows * layer.num_experts * layer.wide * _SCORE_PASSES
    if kind.in_float8:
        # Inputs and gradients are read in 16 bits and written in 8, as they are and transposed.
        passed += layer.given * (5 * (h + layer.width) + 4 * (layer.gates * layer.width + h))
    return passed


def _cast_bytes(plan: Plan, kind: LayerKind) -> float:
    """Return the bytes of making fp8 operands as transformer-engine does: norms write fp8 at once, others are read in
    16 bits and written.
    """
    model, tokens, rows = plan.model, plan.num_tokens, plan.num_rows
    t, h, has_weight_gradients = plan.parallel_sizes.tp, model.hidden_size, not model.lora_rank
    queries, keys = model.query_projection_size // t, key_value_width(model)
    ffn, gates = _feed_forward_width(plan, kind), 2 if model.is_gated else 1
    inputs = 3 * tokens * (queries + ffn) - 2 * rows * h
    transposed = 2 * tokens * (2 * h + queries + ffn) if has_weight_gradients else 0
    # Gradients are read in 16 bits and written as they are, and once more transposed for the weights' gradients.
    gradients = (4 if has_weight_gradients else 3) * tokens * (2 * h + queries + 2 * keys + gates * ffn)
    if kind.is_further:
        inputs += 3 * rows * 2 * h
        transposed += 2 * tokens * 2 * h
        gradients += 4 * tokens * h // t
    return float(inputs + transposed + gradients)
