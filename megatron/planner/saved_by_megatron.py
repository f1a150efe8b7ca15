"""What a layer of Megatron-LM keeps for its backward pass, in bytes, with transformer-engine and with its own layers.

With its own layers the counts are those of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron.core.context_parallel.key_value_heads import key_value_heads_of_rank
from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.expert_layer import ExpertLayer

_WIDE = 4


def saved_by_transformer_engine(
    model: GPTConfig, seq_length: int, micro_batch_size: int, layer_number: int, *, weighs_early: bool = False
) -> Mapping[str, int]:
    """Return by part what a layer of transformer-engine's modules keeps of one micro-batch, with flash attention.

    In fp8 the inputs of products are kept in 8 bits; attention's output then twice, as attention needs it in 16. What
    experts keep is taken to be in 16 bits, unless ``weighs_early`` says that a token's weights are applied between an
    expert's two products: then these too keep 8 bits beside fp8, and what experts give is not kept.
    """
    tokens, rows, element = _tokens(model, seq_length, micro_batch_size)
    join = _join(model, layer_number, rows, element)
    if model.recompute_granularity == "full":
        return {**_stream(model, rows, element), **join}
    t, h = model.tensor_model_parallel_size, model.hidden_size
    is_float8 = model.is_in_float8(layer_number, model.num_layers)
    product_input = 1 if is_float8 else element
    queries, keys, ffn = model.query_projection_size // t, key_value_width(model), model.ffn_hidden_size // t
    feed_forward = {"feed-forward": tokens * ffn * ((2 if model.is_gated else 1) * element + product_input)}
    if model.moe_layers[model.kind_of(layer_number)]:
        experts = ExpertLayer(model, tokens, micro_batch_size, element)
        feed_forward = dict(experts.kept())
        if weighs_early:
            feed_forward |= {
                "experts' inputs": experts.given * h * product_input,
                "experts": experts.given * experts.width * (experts.gates * element + product_input),
                "experts' outputs": experts.given * _WIDE,
            }
    parts = {
        "stream": 2 * rows * h * element,
        "norm outputs": 2 * rows * h * product_input,
        "query, key, value": tokens * (queries + 2 * keys) * element,
        # Recomputed attention keeps another copy of the keys: it frees nothing, as flash attention keeps no scores.
        "recomputed attention": tokens * keys * element * (model.recompute_granularity == "selective"),
        "attention output": tokens * queries * (element + is_float8),
        **feed_forward,
        "dropout masks": 2 * rows * h * (model.hidden_dropout > 0.0),
        **join,
    }
    return {name: size for name, size in parts.items() if size}


saved_by_megatron_bridge = partial(saved_by_transformer_engine, weighs_early=True)
"""What a layer keeps where Megatron-LM is of 2025, which multiplies an expert's middle by the weights of its tokens."""


def saved_by_local_layers(
    model: GPTConfig, seq_length: int, micro_batch_size: int, layer_number: int
) -> Mapping[str, int]:
    """Return by part what a layer of Megatron's own modules keeps of one micro-batch, scores of attention included."""
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
    """Return what is kept around the layer of an MTP module: inputs of its three norms and of its linear layer."""
    if layer_number < model.num_layers:
        return {}
    hidden = rows * model.hidden_size * element
    if model.recompute_granularity == "full":
        return {"embedded tokens": hidden}
    return {"norms of the join": 3 * hidden, "joined": 2 * hidden}


def key_value_width(model: GPTConfig) -> int:
    """Return the width of all keys on one tensor-parallel rank; ranks in excess of the groups hold copies."""
    return key_value_heads_of_rank(model.num_query_groups, model.tensor_model_parallel_size) * model.head_width


def score_elements(model: GPTConfig, seq_length: int, micro_batch_size: int) -> int:
    """Return the attention scores of one layer and micro-batch on one rank."""
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    return heads * seq_length * (seq_length // model.context_parallel_size) * micro_batch_size
