"""Implementations whose runs are predicted: saved activations, memory traffic, kernel launches, fitted constants.

Every constant names its source. Three times and two amounts of memory are fitted by benchmarks/planner/run.py on the
measured runs in its folder. All other constants are counted, published, or assumed, as their docstrings say. The
measured runs do not separate ``pass_share`` and ``backward_share`` well: from 0.44 and 0.62, which the fit gives, to
0.56 and 0.53 the mean error of the step time stays between 0.98 and 1.10 %. The last of these pairs has the smallest
maximum error, 3.1 %.

Saved activations of Megatron-LM are counted with Transformer Engine and with its local layers. For local layers the
counts are those of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

A memory pass of Megatron-LM and torchtitan reads and writes tensors between GEMMs: norms, residual sums, activations,
rotary embeddings, casts. Counts are for one micro-batch of a layer, forward and backward together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from megatron.core.context_parallel import key_value_heads_of_rank
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.planner.plan import ExpertLayer, LayerKind, Plan

_WIDE = 4


def saved_by_transformer_engine(
    model: GPTConfig, seq_length: int, micro_batch_size: int, layer_number: int, *, weighs_early: bool = False
) -> Mapping[str, int]:
    """Return the saved activations of a Transformer Engine layer for one micro-batch, by part, with FlashAttention.

    With FP8 the inputs of linear layers are saved in 8 bits, and with NVFP4 in 4.5. The attention output is saved
    twice, since the backward pass of attention needs it in 16 bits. Experts save activations in 16 bits, unless
    ``weighs_early`` says that the routing weights are applied between the two linear layers of an expert. In that case
    experts save their inputs in 8 bits too with FP8, and do not save their outputs.
    """
    model = model.of_layer(layer_number)
    tokens, rows, element = _tokens(model, seq_length, micro_batch_size)
    join = _join(model, layer_number, rows, element)
    if model.recompute_granularity == "full":
        return {**_stream(model, rows, element), **join}
    t, h = model.tensor_model_parallel_size, model.hidden_size
    is_float8 = model.fp8.is_in_float8(layer_number, model.num_layers)
    product_input = model.fp8.saved_element_bytes if is_float8 else element
    queries, keys, ffn = model.query_projection_size // t, key_value_width(model), model.ffn_hidden_size // t
    feed_forward: dict[str, float] = {
        "feed-forward": tokens * ffn * ((2 if model.is_gated else 1) * element + product_input)
    }
    if model.has_experts(layer_number):
        experts = ExpertLayer(model, tokens, micro_batch_size, element)
        feed_forward = dict(experts.kept())
        if weighs_early:
            feed_forward |= {
                "experts' inputs": experts.given * model.expert_input_size * product_input,
                "experts": experts.given * experts.width * (experts.gates * element + product_input),
                "experts' outputs": experts.given * _WIDE,
            }
    parts = {
        "stream": 2 * rows * h * element,
        "norm outputs": 2 * rows * h * product_input,
        "query, key, value": tokens * (queries + 2 * keys) * element,
        # Recomputed attention saves another copy of the keys. It frees nothing, since FlashAttention saves no scores.
        "recomputed attention": tokens * keys * element * (model.recompute_granularity == "selective"),
        "attention output": tokens * queries * (element + is_float8 * product_input),
        **feed_forward,
        "dropout masks": 2 * rows * h * (model.hidden_dropout > 0.0),
        **join,
    }
    return {name: int(size) for name, size in parts.items() if size}


saved_by_megatron_bridge = partial(saved_by_transformer_engine, weighs_early=True)
"""Saved activations of Megatron-LM in 2025, which applies the routing weights between an expert's linear layers."""


def saved_by_local_layers(
    model: GPTConfig, seq_length: int, micro_batch_size: int, layer_number: int
) -> Mapping[str, int]:
    """Return the saved activations of a local Megatron-LM layer for one micro-batch, by part, with attention scores."""
    model = model.of_layer(layer_number)
    tokens, rows, element = _tokens(model, seq_length, micro_batch_size)
    join = _join(model, layer_number, rows, element)
    if model.recompute_granularity == "full":
        return {**_stream(model, rows, element), **join}
    t, h = model.tensor_model_parallel_size, model.hidden_size
    queries, keys, ffn = model.query_projection_size // t, key_value_width(model), model.ffn_hidden_size // t
    scores = 0 if "core_attn" in model.recomputed_modules else score_elements(model, seq_length, micro_batch_size)
    masks = model.attention_dropout > 0.0
    parts = {
        "stream": 2 * rows * h * element,
        "norm outputs": 2 * rows * h * element,
        "query, key, value": tokens * (queries + 2 * keys) * element,
        "scores": scores * (element + masks * (element + 1)),
        "attention output": tokens * queries * element,
        "feed-forward": tokens * ffn * ((2 if model.is_gated else 1) + 1) * element,
        "dropout masks": 2 * rows * h * (model.hidden_dropout > 0.0),
        **join,
    }
    return {name: size for name, size in parts.items() if size}


def _tokens(model: GPTConfig, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
    """Return a rank's tokens, the rows of its residual stream, and the bytes of an element."""
    tokens = seq_length // model.context_parallel_size * micro_batch_size
    rows = tokens // model.tensor_model_parallel_size if model.sequence_parallel else tokens
    return tokens, rows, ELEMENT_BYTES[model.params_dtype]


def _stream(model: GPTConfig, rows: int, element: int) -> dict[str, int]:
    return {"stream": rows * model.hidden_size * element}


def _join(model: GPTConfig, layer_number: int, rows: int, element: int) -> dict[str, int]:
    """Return an MTP module's saved activations outside its layer: inputs of its three norms and its linear layer."""
    if layer_number < model.num_layers:
        return {}
    hidden = rows * model.hidden_size * element
    if model.recompute_granularity == "full":
        return {"embedded tokens": hidden}
    return {"norms of the join": 3 * hidden, "joined": 2 * hidden}


def key_value_width(model: GPTConfig) -> int:
    """Return the width of all keys on one tensor-parallel rank; ranks share query groups if there are too few."""
    return key_value_heads_of_rank(model.num_query_groups, model.tensor_model_parallel_size) * model.head_width


def score_elements(model: GPTConfig, seq_length: int, micro_batch_size: int) -> int:
    """Return the number of attention scores of one layer and micro-batch on one rank."""
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    return heads * seq_length * (seq_length // model.context_parallel_size) * micro_batch_size


SavedBytes = Callable[[GPTConfig, int, int, int], Mapping[str, int]]
"""Function of (model, sequence length, micro-batch size, layer number) that returns saved activations by part."""


@dataclass(frozen=True, kw_only=True)
class FittedTimes:
    """Constants of the time model that are fitted to measured runs.

    ``pass_share`` is the share of the memory bandwidth that kernels between GEMMs reach. ``backward_share`` is the
    share of the published FLOP/s on Hopper that the backward pass of attention reaches, with the small kernels around
    it. ``ring_share`` is the FLOP/s of ring attention relative to attention without context parallelism.
    """

    pass_share: float
    backward_share: float
    ring_share: float


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A training program: what its layers save, what it caches, which kernels it uses, and what it does not support.

    ``saved`` returns the saved activations of another program's layer; it is None if the layers are those of this
    program, which are traced. ``is_traced`` says that the loss and the times come from traces too. ``wide_logit_bytes``
    are the peak bytes per logit in addition to the logits in the model's dtype. ``half_gradient_bytes`` are the bytes
    per gradient element of an fp16 model during the backward pass. ``keeps_half_weights`` is false if FP8 weights have
    no 16-bit copy. Without ``has_flash_attention`` the attention scores are in memory. ``fuses_permutation`` says that
    one kernel permutes the tokens by expert. ``loops_over_experts`` says that the matmuls of each expert are launched
    separately in 16 bits too. ``expert_imbalance`` is the number of tokens of the most loaded rank divided by the mean;
    it scales the time of expert GEMMs and token exchanges.
    """

    name: str
    saved: SavedBytes | None
    times: FittedTimes
    wide_logit_bytes: int
    half_gradient_bytes: int = 4
    caches_float8_weights: bool = False
    keeps_half_weights: bool = True
    reduces_in_half: bool = False
    has_flash_attention: bool = True
    is_rotation_fused: bool = True
    attention_on_hopper: str = "cudnn"
    waits_for_neighbors: bool = True
    fuses_weight_gradients: bool = True
    offloads_in_pipelines: bool = False
    offloads_beside_recompute: bool = False
    takes_any_microbatches: bool = False
    fuses_permutation: bool = False
    loops_over_experts: bool = False
    schedules_zero_bubble: bool = False
    is_traced: bool = False
    expert_imbalance: float = 1.0


_PUBLISHED = FittedTimes(pass_share=0.85, backward_share=1.0, ring_share=0.85)
"""Defaults without a measured run: bandwidth as in BabelStream, attention as published."""

MEGATRON_TE = Implementation(
    name="megatron-te",
    saved=saved_by_transformer_engine,
    times=FittedTimes(pass_share=0.56, backward_share=0.53, ring_share=0.83),
    wide_logit_bytes=4,
    half_gradient_bytes=2,
    caches_float8_weights=True,
    is_rotation_fused=False,
    fuses_permutation=True,
    loops_over_experts=True,
)
MEGATRON_BRIDGE = dataclasses.replace(
    MEGATRON_TE,
    name="megatron-bridge",
    saved=saved_by_megatron_bridge,
    times=dataclasses.replace(MEGATRON_TE.times, backward_share=1.0),
    is_rotation_fused=True,
    keeps_half_weights=False,
    reduces_in_half=True,
)
"""Megatron Bridge with Transformer Engine 2 and cuDNN attention.

It is assumed to have FP8 weights without 16-bit copies, and 16-bit gradients: otherwise a published run would not fit.
"""
MEGATRON_LOCAL = dataclasses.replace(
    MEGATRON_TE,
    name="megatron-local",
    saved=saved_by_local_layers,
    wide_logit_bytes=8,
    has_flash_attention=False,
    fuses_weight_gradients=False,
)
MEGATRON_2020 = dataclasses.replace(MEGATRON_LOCAL, name="megatron-2020", wide_logit_bytes=14)
TORCHTITAN = Implementation(
    name="torchtitan",
    saved=None,
    times=_PUBLISHED,
    wide_logit_bytes=8,
    attention_on_hopper="flash",
    is_rotation_fused=False,
    takes_any_microbatches=True,
    schedules_zero_bubble=True,
)
NATIVE = Implementation(
    name="native",
    saved=None,
    is_traced=True,
    times=_PUBLISHED,
    # The Triton cross-entropy writes the gradient over the logits.
    wide_logit_bytes=0,
    waits_for_neighbors=False,
    offloads_in_pipelines=True,
    offloads_beside_recompute=True,
    takes_any_microbatches=True,
    schedules_zero_bubble=True,
)

IMPLEMENTATIONS: Mapping[str, Implementation] = {
    each.name: each for each in (NATIVE, MEGATRON_TE, MEGATRON_BRIDGE, MEGATRON_LOCAL, MEGATRON_2020, TORCHTITAN)
}
"""Implementations by the names that ``--implementation`` takes."""


def find_implementation(name: str, expert_imbalance: float | None = None) -> Implementation:
    """Return an implementation by name; ``expert_imbalance`` is 1 if it is not given.

    Raises:
        ConfigurationError: the name is not known, or ``expert_imbalance`` is below 1 or not finite.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigurationError(f"--implementation {name} is not known; possible values: {', '.join(IMPLEMENTATIONS)}")
    if expert_imbalance is None:
        return IMPLEMENTATIONS[name]
    if not 1.0 <= expert_imbalance < math.inf:
        raise ConfigurationError(
            f"--expert-imbalance {expert_imbalance:g} is below 1 or not finite; use the ratio of the most loaded "
            "rank's tokens to the mean, such as 1.2"
        )
    return dataclasses.replace(IMPLEMENTATIONS[name], expert_imbalance=expert_imbalance)


def implementation_of_software(description: str, has_flash_attention: bool) -> Implementation:
    """Return the implementation that the software description of a run names."""
    words = description.lower()
    if "torchtitan" in words:
        return TORCHTITAN
    if not has_flash_attention:
        return MEGATRON_2020 if "2020" in words or "deepspeedexamples" in words else MEGATRON_LOCAL
    return MEGATRON_BRIDGE if "bridge" in words or "nemo" in words else MEGATRON_TE


_FUSED_ROTATION, _ROTATION = 8, 40
"""Bytes per element of queries and keys: read and written once per pass, or by about ten operations per pass."""
_LOSS_BYTES = 40
"""Bytes per logit, forward and backward: cast to float32, maximum, difference, exponential, sum, quotient."""
_SCORE_BYTES = 30
"""Bytes per score of unfused attention, forward and backward: matmul, scale and softmax, dropout, matmul."""
_SCORE_PASSES = 14
"""Reads and writes per router score, forward and backward: softmax, top-k, weights, losses. Counted."""
_FUSED_MOVES = 8
"""Reads and writes of the token rows per pass if one kernel permutes them."""
_LAUNCHES, _EXPERT_LAUNCHES = 70, 60
"""Kernels of a layer, and additional kernels of a router, a dispatcher and experts, forward and backward. Assumed."""
_LOOP_LAUNCHES, _CASTS = 6, 10
"""Kernels per expert if its matmuls are launched separately, and its operands that are cast to FP8. Counted."""
_CAST_LAUNCHES = {"delayed": 2, "tensorwise": 3}
"""Kernels per operand that is cast to FP8, by recipe."""
_HALF = 2


def expert_layer(plan: Plan) -> ExpertLayer:
    """Return the work of an MoE layer for one micro-batch on one rank."""
    element = ELEMENT_BYTES[plan.model.params_dtype]
    return ExpertLayer(plan.model, plan.num_tokens, plan.micro_batch_size, element)


def loss_bytes(plan: Plan) -> float:
    return float(plan.num_logits * _LOSS_BYTES)


def passed_bytes(plan: Plan, implementation: Implementation, kind: LayerKind) -> float:
    """Return the bytes that a layer's memory-bound kernels read and write."""
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
    """Return the number of kernels of a layer."""
    if not kind.has_experts:
        return _LAUNCHES
    per_expert = 0
    if kind.in_float8 or implementation.loops_over_experts:
        # Transformer Engine has different kernels for each recipe.
        most = max(_CAST_LAUNCHES.values())
        per_expert = _LOOP_LAUNCHES + kind.in_float8 * _CASTS * _CAST_LAUNCHES.get(plan.model.fp8.fp8_recipe, most)
    return _LAUNCHES + _EXPERT_LAUNCHES + expert_layer(plan).num_local * per_expert


def _feed_forward_width(plan: Plan, kind: LayerKind) -> int:
    """Return a rank's width of the feed-forward, or of the shared expert in an MoE layer."""
    model = plan.model
    whole = (model.moe.moe_shared_expert_intermediate_size or 0) if kind.has_experts else model.ffn_hidden_size
    return whole // plan.parallel_sizes.tp


def _dense_bytes(plan: Plan, implementation: Implementation, kind: LayerKind) -> float:
    """Return the bytes of a layer's memory passes; of an MoE feed-forward only those of the shared expert."""
    model, tokens, rows = kind.shape(plan.model), plan.num_tokens, plan.num_rows
    t, h = plan.parallel_sizes.tp, model.hidden_size
    queries, keys = model.num_attention_heads * model.head_width // t, key_value_width(model)
    ffn, gates = _feed_forward_width(plan, kind), 2 if model.is_gated else 1
    # Two norms (2 tensors forward, 3 backward) and two residual sums (3 each way).
    total = rows * h * _HALF * 2.0 * (2 + 3 + 3 + 3)
    if model.mla.multi_latent_attention:
        heads, narrow = model.num_attention_heads // t, (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
        rotated = (heads + 1) * model.mla.qk_pos_emb_head_dim * (model.position_embedding_type == "rope")
        total += tokens * rotated * _ROTATION
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
    """Return the bytes of the memory passes of a router, a dispatcher and experts."""
    layer, h = expert_layer(plan), plan.model.expert_input_size
    moves = 2 * _FUSED_MOVES if implementation.fuses_permutation else sum(layer.moved_rows)
    passed: float = layer.choices * h * layer.element * moves
    passed += layer.given * layer.width * layer.element * (3 * layer.gates + 2)
    passed += layer.rows * layer.num_experts * layer.wide * _SCORE_PASSES
    if kind.in_float8:
        # Inputs and gradients are read in 16 bits and written in 8, both as they are and transposed.
        passed += layer.given * (5 * (h + layer.width) + 4 * (layer.gates * layer.width + h))
    return passed


def _cast_bytes(plan: Plan, kind: LayerKind) -> float:
    """Return the bytes that Transformer Engine moves to cast operands to FP8.

    Norms write FP8 outputs directly. All other operands are read in 16 bits and written in FP8.
    """
    model, tokens, rows = kind.shape(plan.model), plan.num_tokens, plan.num_rows
    t, h, has_weight_gradients = plan.parallel_sizes.tp, model.hidden_size, not model.lora_rank
    queries, keys = model.query_projection_size // t, key_value_width(model)
    ffn, gates = _feed_forward_width(plan, kind), 2 if model.is_gated else 1
    inputs = 3 * tokens * (queries + ffn) - 2 * rows * h
    transposed = 2 * tokens * (2 * h + queries + ffn) if has_weight_gradients else 0
    # Gradients are read in 16 bits and written as they are, and once more transposed for the weight gradients.
    gradients = (4 if has_weight_gradients else 3) * tokens * (2 * h + queries + 2 * keys + gates * ffn)
    if kind.is_further:
        inputs += 3 * rows * 2 * h
        transposed += 2 * tokens * 2 * h
        gradients += 4 * tokens * h // t
    return float(inputs + transposed + gradients)
