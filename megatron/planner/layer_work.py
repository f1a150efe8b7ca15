"""What one rank computes in a transformer layer and in the output layer: products, attention, and passes over memory.

A pass over memory reads and writes tensors between the products: norms, residual sums, activations, rotations, casts.
Counts are for one micro-batch, forward and backward.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.adapter_parameters import adapter_parameters, expert_adapter_parameters
from megatron.planner.layer_widths import is_whole_on_ranks, key_value_width, layer_widths
from megatron.planner.plan import Plan

_FUSED_ROTATION, _ROTATION = 8, 40
"""Bytes an element of queries and keys: read and written once each way, or by some ten operations each way."""
_LOSS_BYTES = 40
"""Bytes a logit: rounded logits widened, largest, difference, exponential, sum, quotient; and back again."""
_SCORE_BYTES = 30
"""Bytes a score of attention without flash: product, scale and softmax, dropout, product; and back again."""
_HALF = 2


@dataclass(frozen=True)
class Product:
    """Hold a linear layer on one rank: its weight is ``[columns, inner]``, and has a gradient where it is trained.

    ``share`` is the part of the tensor-parallel group's tokens that the rank multiplies.
    """

    inner: int
    columns: int
    is_trained: bool = True
    share: float = 1.0

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return self.inner * self.columns

    @property
    def passes(self) -> int:
        """Return the number of products: the layer's own, its input's gradient, and its weight's where it has one."""
        return 3 if self.is_trained else 2


def layer_products(model: GPTConfig, *, has_experts: bool = False) -> tuple[Product, ...]:
    """Return a layer's products on one tensor-parallel rank: attention's and the feed-forward's two.

    Of a feed-forward of experts only the shared one's are there, if it is.
    """
    of_rows = 1 / model.tensor_model_parallel_size if model.sequence_parallel else 1.0
    return tuple(
        Product(inner, columns, not model.lora_rank, of_rows if is_whole_on_ranks(name) else 1.0)
        for name, (inner, columns) in layer_widths(model, has_experts=has_experts).items()
    )


def num_attention_products(model: GPTConfig) -> int:
    """Return how many of a layer's products, the first ones, are attention's."""
    return len(layer_widths(model)) - 2


def join_product(model: GPTConfig) -> Product:
    """Return the product in front of a layer that predicts a further token: of the states and the embedded tokens."""
    return Product(2 * model.hidden_size, model.hidden_size // model.tensor_model_parallel_size)


def join_bytes(plan: Plan) -> float:
    """Return the bytes that such a layer's three norms and the joining of two tensors read and write, each way."""
    return plan.num_rows * plan.model.hidden_size * _HALF * (3 * 5.0 + 2 * 4.0)


def adapter_products(model: GPTConfig, *, has_experts: bool = False) -> list[Product]:
    """Return the narrow products of a layer's low-rank adapters on one tensor-parallel rank."""
    rank, sizes = model.lora_rank, model.parallel_sizes
    width = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    products = []
    for name in model.adapted_parts:
        is_of_feed_forward = name in ("linear_fc1", "linear_fc2")
        if width or not is_of_feed_forward:
            products += [Product(rank, size // rank) for size in adapter_parameters(model, name, width)]
        if has_experts and is_of_feed_forward:
            num_local = (model.num_experts or 0) // sizes.ep
            share = model.moe_router_topk * sizes.expert_tp / sizes.tp
            of_experts = expert_adapter_parameters(model, name)
            products += [Product(rank, size // num_local // rank, share=share) for size in of_experts]
    return products


def attention_flops(plan: Plan, window: int) -> float:
    """Return the operations of causal attention in one layer, forward; the backward pass has 2.5 times as many.

    A query looks back to ``window`` keys at most, its own among them.
    """
    model, s = plan.model, plan.seq_length
    looked_at = window * (s - window / 2)
    width = model.head_width * model.num_attention_heads
    return 4.0 * looked_at * width * plan.micro_batch_size / (plan.parallel_sizes.tp * plan.parallel_sizes.cp)


def megatron_step_flops(plan: Plan) -> float:
    """Return the operations of a step as Megatron counts them for its TFLOP/s: attention as if all looked at all."""
    return plan.global_batch_size * _megatron_flops(plan.model, plan.seq_length)


def step_flops(plan: Plan) -> float:
    """Return the operations of a step that a model needs, of attention those that are used."""
    return 3.0 * plan.global_batch_size * _forward_flops(plan.model, plan.seq_length)


# A search asks for the same models thousands of times.
@functools.lru_cache(maxsize=64)
def _forward_flops(model: GPTConfig, s: int) -> float:
    return model.forward_flops_per_sequence(s)


@functools.lru_cache(maxsize=64)
def _megatron_flops(model: GPTConfig, s: int) -> float:
    causal = dataclasses.replace(model, window_size=None, window_attn_skip_freq=None) if model.window_size else model
    of_scores = 2 * model.query_projection_size
    if model.multi_latent_attention:
        of_scores = model.num_attention_heads * (model.latent_query_width + model.v_head_dim)
    unused_half = 1.0 * s * s * of_scores * (model.num_layers + model.num_further_tokens)
    return 3.0 * (_forward_flops(causal, s) + unused_half)


def passed_bytes(
    plan: Plan,
    is_rotation_fused: bool,
    has_flash_attention: bool,
    *,
    has_experts: bool = False,
    has_rotary: bool = True,
) -> float:
    """Return the bytes that a layer's passes over memory read and write, casts to fp8 left out.

    Of a feed-forward of experts only the shared one's are counted, if it is there. ``has_rotary`` is False for a layer
    that leaves queries and keys as they are.
    """
    model, tokens, rows = plan.model, plan.num_tokens, plan.num_rows
    t, h = plan.parallel_sizes.tp, model.hidden_size
    queries, keys = model.num_attention_heads * model.head_width // t, key_value_width(model)
    whole = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    ffn, gates = whole // t, 2 if model.is_gated else 1
    # Two norms (2 tensors forward, 3 backward) and two residual sums (3 each way).
    total = rows * h * _HALF * 2.0 * (2 + 3 + 3 + 3)
    if model.multi_latent_attention:
        heads, narrow = model.num_attention_heads // t, (model.q_lora_rank or 0) + model.kv_lora_rank
        total += tokens * (heads + 1) * model.qk_pos_emb_head_dim * _ROTATION
        total += rows * narrow * _HALF * 5.0 * model.qk_layernorm
    elif has_rotary and model.position_embedding_type == "rope":
        total += tokens * (queries + keys) * (_FUSED_ROTATION if is_rotation_fused else _ROTATION)
    # Queries, keys and values are taken apart, their gradients joined; gradients of shared heads are summed.
    total += tokens * _HALF * (4 * (queries + 2 * keys) + 4 * queries * (keys < queries))
    total += tokens * ffn * _HALF * ((gates + 1) + (2 * gates + 1))
    if model.hidden_dropout > 0.0:
        total += rows * h * 2 * 2
    if not has_flash_attention:
        total += score_elements(model, plan.seq_length, plan.micro_batch_size) * _SCORE_BYTES
    return total


def score_elements(model: GPTConfig, seq_length: int, micro_batch_size: int) -> int:
    """Return the attention scores of one layer and micro-batch on one rank."""
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    return heads * seq_length * (seq_length // model.context_parallel_size) * micro_batch_size


def loss_bytes(plan: Plan) -> float:
    """Return the bytes that the loss reads and writes of the logits."""
    return float(plan.num_logits * _LOSS_BYTES)


def fused_cast_bytes(plan: Plan, *, has_experts: bool = False, has_join: bool = False) -> float:
    """Return the bytes of making fp8 operands as transformer-engine does: norms write fp8 at once, others are read in
    16 bits and written.
    """
    model, tokens, rows = plan.model, plan.num_tokens, plan.num_rows
    t, h, has_weight_gradients = plan.parallel_sizes.tp, model.hidden_size, not model.lora_rank
    queries, keys = model.query_projection_size // t, key_value_width(model)
    whole = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    ffn, gates = whole // t, 2 if model.is_gated else 1
    inputs = 3 * tokens * (queries + ffn) - 2 * rows * h
    transposed = 2 * tokens * (2 * h + queries + ffn) if has_weight_gradients else 0
    # Gradients are read in 16 bits and written as they are, and once more transposed for the weights' gradients.
    gradients = (4 if has_weight_gradients else 3) * tokens * (2 * h + queries + 2 * keys + gates * ffn)
    if has_join:
        inputs += 3 * rows * 2 * h
        transposed += 2 * tokens * 2 * h
        gradients += 4 * tokens * h // t
    return float(inputs + transposed + gradients)
