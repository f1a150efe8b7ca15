"""The parameters of a model chunk on one tensor-parallel rank: their sizes, and which gradients are parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planning.adapter_parameters import adapter_parameters, expert_adapter_parameters


@dataclass(frozen=True)
class ChunkParameter:
    """Hold a parameter's local size and, where its gradient is a part, how many of the t ranks hold a copy.

    ``is_tied`` says that the other end of the pipeline holds it too, ``is_trained`` that it has a gradient,
    ``is_sent_in_float8`` that it travels in fp8, with ``num_scales``, when it is gathered from shards, and
    ``is_matrix`` that it is a weight between the embeddings and the output layer. ``is_expert`` says that the ranks
    that hold the same experts replicate it, and not those that hold the same of the rest.
    """

    size: int
    copies_to_sum: int = 0
    is_tied: bool = False
    is_trained: bool = True
    is_sent_in_float8: bool = False
    num_scales: int = 1
    is_matrix: bool = False
    is_expert: bool = False


def expert_parameters(model: GPTConfig) -> list[ChunkParameter]:
    """Return a router's parameters and those of a rank's experts, in the order of the model."""
    experts, h, t = model.num_experts or 0, model.hidden_size, model.tensor_model_parallel_size
    sizes, copies = model.parallel_sizes, t if t > 1 else 0
    num_local, width = experts // sizes.ep, model.moe_ffn_hidden_size // sizes.expert_tp
    router = [ChunkParameter(experts * h, copies, is_matrix=True)]
    router += [ChunkParameter(experts, copies)] if model.add_bias_linear else []
    router += [ChunkParameter(experts, is_trained=False)] if model.moe_router_enable_expert_bias else []
    is_base = bool(model.lora_rank)
    parameters = [replace(parameter, is_trained=False) for parameter in router] if is_base else router
    for name, rows, columns in (("linear_fc1", width * (2 if model.is_gated else 1), h), ("linear_fc2", h, width)):
        size = num_local * rows * columns
        in_float8, num_scales = model.fp8_param_gather, num_local if model.fp8_param_gather else 1
        weight = ChunkParameter(
            size, is_sent_in_float8=in_float8, num_scales=num_scales, is_matrix=True, is_expert=True
        )
        own = [weight]
        own += [ChunkParameter(num_local * rows, is_expert=True)] if model.add_bias_linear else []
        parameters += [replace(parameter, is_trained=not is_base) for parameter in own]
        adapters = expert_adapter_parameters(model, name)
        parameters += [ChunkParameter(size, to_sum, is_matrix=True, is_expert=True) for size, to_sum in adapters]
    return parameters


def chunk_parameters(model: GPTConfig, chunk: StageContents) -> list[ChunkParameter]:
    """Return a chunk's parameters in the order of the model."""
    t, h, f, d = model.tensor_model_parallel_size, model.hidden_size, model.ffn_hidden_size, model.kv_channels
    queries, groups = model.query_projection_size // t, model.num_query_groups
    of_all_ranks = t if t > 1 else 0
    of_cut_tokens = of_all_ranks if model.sequence_parallel else 0

    def norm(width: int, copies_to_sum: int = of_cut_tokens) -> list[ChunkParameter]:
        return [ChunkParameter(width, copies_to_sum)] * (2 if model.normalization == "LayerNorm" else 1)

    def linear(rows: int, columns: int, copies_to_sum: int, has_bias: bool) -> list[ChunkParameter]:
        bias = [ChunkParameter(rows, copies_to_sum)] if has_bias else []
        return [ChunkParameter(rows * columns, is_sent_in_float8=model.fp8_param_gather, is_matrix=True), *bias]

    def latent() -> list[ChunkParameter]:
        heads, narrow = model.num_attention_heads // t, model.q_lora_rank
        of_queries = [ChunkParameter(h * heads * model.latent_query_width)]
        if narrow is not None:
            of_queries = [
                ChunkParameter(narrow * h, of_cut_tokens),
                ChunkParameter(narrow * heads * model.latent_query_width),
            ]
        weights = [
            *of_queries,
            ChunkParameter((model.kv_lora_rank + model.qk_pos_emb_head_dim) * h, of_cut_tokens),
            ChunkParameter(model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)),
        ]
        return [replace(weight, is_matrix=True, is_sent_in_float8=model.fp8_param_gather) for weight in weights]

    if model.multi_latent_attention:
        query_key_value = latent()
    elif groups % t == 0:
        query_key_value = linear(queries + 2 * model.kv_projection_size // t, h, 0, model.has_qkv_bias)
    else:
        query_key_value = [
            parameter
            for width in ((h, 1) if model.has_qkv_bias else (h,))
            for parameter in (
                replace(part, is_sent_in_float8=model.fp8_param_gather and width == h, is_matrix=width == h)
                for part in (ChunkParameter(queries * width), ChunkParameter(2 * d * width, t // groups))
            )
        ]
    queries_and_keys: list[ChunkParameter] = []
    if model.qk_layernorm_across_heads:
        key_copies = max(t // groups, 1)
        keys = ChunkParameter(model.kv_projection_size * key_copies // t, key_copies if key_copies > 1 else 0)
        queries_and_keys = [ChunkParameter(queries), keys]
    elif model.qk_layernorm and model.multi_latent_attention:
        queries_and_keys = [*(norm(model.q_lora_rank) if model.q_lora_rank else []), *norm(model.kv_lora_rank)]
    elif model.qk_layernorm:
        queries_and_keys = norm(d, of_all_ranks) * 2
    sinks = [ChunkParameter(model.num_attention_heads // t)] if model.softmax_type == "learnable" else []
    before = norm(h) if model.norm_placement != "after" else []
    after = norm(h) if model.norm_placement != "before" else []

    def adapters(name: str, width: int = 0) -> list[ChunkParameter]:
        found = adapter_parameters(model, name, width)
        return [ChunkParameter(size, copies, is_matrix=True) for size, copies in found]

    def base(*parameters: ChunkParameter) -> list[ChunkParameter]:
        return [replace(parameter, is_trained=False) for parameter in parameters] if model.lora_rank else [*parameters]

    attention = [
        *base(*before, *sinks, *linear(h, model.context_size // t, of_cut_tokens, model.add_bias_linear)),
        *adapters("linear_proj"),
        *base(*query_key_value),
        *adapters("linear_qkv"),
        *base(*queries_and_keys, *after, *before),
    ]

    def dense(width: int) -> list[ChunkParameter]:
        return [
            *base(*linear(width * (2 if model.is_gated else 1) // t, h, 0, model.add_bias_linear)),
            *adapters("linear_fc1", width),
            *base(*linear(h, width // t, of_cut_tokens, model.add_bias_linear)),
            *adapters("linear_fc2", width),
        ]

    def experts() -> list[ChunkParameter]:
        gate = [ChunkParameter(h, of_cut_tokens, is_matrix=True)] if model.moe_shared_expert_gate else []
        shared = model.moe_shared_expert_intermediate_size
        return [*expert_parameters(model), *([] if shared is None else [*base(*gate), *dense(shared)])]

    feed_forwards = {True: experts() if model.num_experts else [], False: dense(f)}
    is_untied, is_learned = (
        model.untie_embeddings_and_output_weights,
        model.position_embedding_type == "learned_absolute",
    )
    is_one_end, has_further = chunk.has_embedding != chunk.has_loss, chunk.has_loss and model.num_further_tokens > 0
    is_tied = is_one_end and (not is_untied or model.num_further_tokens > 0)
    vocabulary = ChunkParameter(model.padded_vocab_size // t * h, is_tied=is_tied)
    positions = [ChunkParameter(model.max_position_embeddings * h, of_cut_tokens)] if is_learned else []
    has_words = chunk.has_embedding or has_further
    output = [replace(vocabulary, is_tied=is_tied and not has_words)] if is_untied or not has_words else []
    first = [vocabulary, *positions] if has_words else []
    has_experts = model.moe_layers
    whole = {kind: (*attention, *feed_forwards[kind], *base(*after)) for kind in set(has_experts)}
    in_half = whole
    if model.fp8_param_gather:
        in_half = {
            kind: tuple(replace(parameter, is_sent_in_float8=False) for parameter in layer)
            for kind, layer in whole.items()
        }
    last_layer = [*attention, *feed_forwards[has_experts[-1]], *base(*after)]
    further = [
        *(*norm(h), *norm(h), *linear(h // t, 2 * h, 0, has_bias=False)),
        *last_layer,
        *norm(h),
    ]
    last = [*norm(h), *further * model.num_further_tokens, *output] if chunk.has_loss else []
    layers = [
        parameter
        for number in chunk.layer_numbers
        for parameter in (whole if model.is_in_float8(number, model.num_layers) else in_half)[has_experts[number]]
    ]
    return [*base(*first), *layers, *base(*last)]
