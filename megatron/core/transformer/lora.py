"""LoRA: attach low-rank adapters to the linear layers and experts of a transformer layer, and freeze the rest.

Each expert has its own pair of adapter matrices per weight matrix. Hu et al. 2021, https://arxiv.org/abs/2106.09685.
The frozen weights of these layers may be quantized to 4 bits (QLoRA). Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_state import ExpertGroups
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Shard, even_shards, full_shards, quantized_of, spec_of
from megatron.core.tensor_parallel import (
    AdapterOptions,
    ColumnAdapter,
    ColumnShardedLinear,
    LinearAdapters,
    LowRankAdapter,
    QuantizedWeight,
    RowAdapter,
    RowBlock,
    RowShardedLinear,
    adapt,
)
from megatron.core.transformer.attention import SelfAttention, SharedGroupQueryKeyValue
from megatron.core.transformer.attention_and_mamba import AttentionAndMamba
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.lora_targets import (
    OF_ATTENTION,
    OF_FEED_FORWARD,
    OF_RECURRENCE,
    PART_OF,
    QUERY_KEY_VALUE,
    WHOLE,
)
from megatron.core.transformer.mlp import FeedForward
from megatron.core.transformer.moe import ExpertLayer, GroupedLinear, expert_shards, grouped_linear
from megatron.core.transformer.recurrent_mixer import RecurrentMixer
from megatron.core.transformer.transformer_layer import TransformerLayer


class ExpertAdapter(LowRankAdapter):
    """Compute ``scale * B A x`` for each expert's rows with its own ``A`` and ``B``, or shards of them.

    If output features are sharded, ``A`` is replicated over the expert tensor-parallel ranks and ``B`` is sharded by
    row. If input features are sharded, ``A`` is sharded by column and ``B`` is replicated, and the result is a partial
    sum. Gradients of replicated weights are partial sums. Dropout is not supported.

    Shapes: ``[n, in] -> [n, out]``, rows sorted by expert; a sharded feature dim is this rank's shard.
    """

    def __init__(
        self,
        options: AdapterOptions,
        layer_number: int,
        site: int,
        linear: GroupedLinear,
        groups: ExpertGroups,
        num_rows: int,
        num_stacked: int,
    ) -> None:
        super().__init__(options, layer_number, site)
        num_experts, _, in_features = spec_of(linear.weight).global_shape
        num_local = num_experts // groups.size
        down, up = (num_experts, options.rank, in_features), (num_experts, num_rows, options.rank)
        is_in_cut = linear.cut_dim == 2
        own_inputs = in_features // groups.tensor_size if is_in_cut else in_features
        own_rows = num_rows if is_in_cut else num_rows // groups.tensor_size
        of_down = _spec("lora_A", down, groups, 2 if is_in_cut else None, 1)
        self.lora_A = self._make((num_local, options.rank, own_inputs), replace(of_down, init_bound=in_features**-0.5))
        of_up = _spec("lora_B", up, groups, None if is_in_cut else 1, num_stacked)
        self.lora_B = self._make((num_local, own_rows, options.rank), of_up)

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the adapters' contribution to the output; ``counts`` are the rows per expert of this rank."""
        library = self.options.product_library
        narrow = grouped_linear(x, self.lora_A, None, counts, library=library) * self.options.scale
        return grouped_linear(narrow, self.lora_B, None, counts, library=library)


def _spec(name: str, shape: tuple[int, ...], groups: ExpertGroups, cut_dim: int | None, num_stacked: int) -> ParamSpec:
    is_copied = cut_dim is None and groups.tensor_size > 1
    return ParamSpec(
        name,
        shape,
        expert_shards(shape, groups, cut_dim, num_stacked),
        gradient_sum_axes=("tp",) if is_copied else (),
        replica_index=groups.tensor_rank if is_copied else 0,
        num_replicas=groups.tensor_size if is_copied else 1,
        is_expert=True,
    )


_SITES = (WHOLE, *QUERY_KEY_VALUE, *PART_OF["linear_fc1"])


def add_adapters(model: nn.Module, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
    """Attach the configured adapters to every transformer layer of a model, and freeze all other parameters.

    Must be called before parameters are named and initialized.

    Raises:
        ConfigurationError: a layer has an unsupported kind of attention or feed-forward.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    options = AdapterOptions(
        rank=config.lora_rank,
        scale=config.lora_alpha / config.lora_rank,
        dropout=config.lora_dropout,
        tp=tp,
        sequence_parallel=config.sequence_parallel,
        dtype=dtype_from_name(config.params_dtype),
        device=device,
        product_library=config.cpu_gemm_backend,
    )
    for layer in [module for module in model.modules() if isinstance(module, TransformerLayer)]:
        _adapt_layer(layer, config, options)
        layer.adapters = tuple(module for module in layer.modules() if isinstance(module, LowRankAdapter))


def quantize_base(module: nn.Module, config: DecoderConfig) -> None:
    """Store the weights of the linear layers and experts of transformer layers in 4 bits, and free their own memory.

    Routers, norms and biases are not quantized. Layers that are quantized already are unchanged.
    """
    kind, doubly = config.lora_base_quantization, config.lora_double_quantization
    assert kind is not None, "the base weights are quantized"
    for layer in [each for each in module.modules() if isinstance(each, TransformerLayer)]:
        for linear in layer.modules():
            if not isinstance(linear, (ColumnShardedLinear, SharedGroupQueryKeyValue, RowShardedLinear, GroupedLinear)):
                continue
            shards_inputs = isinstance(linear, RowShardedLinear) or getattr(linear, "cut_dim", None) == 2
            weights = (linear.weight,) if isinstance(linear, (RowShardedLinear, GroupedLinear)) else _weights(linear)
            for weight in weights:
                if quantized_of(weight) is None:
                    QuantizedWeight(weight, kind, doubly=doubly, group_dim=-2 if shards_inputs else -1)


def _adapt_layer(layer: TransformerLayer, config: DecoderConfig, options: AdapterOptions) -> None:
    kinds = config.parts_of(layer.layer_number)
    mixer = getattr(layer, "mixer", getattr(layer, "self_attention", None))
    attention = recurrence = mixer
    if isinstance(mixer, AttentionAndMamba):
        attention, recurrence = mixer.self_attention, mixer.mamba
    for linear, parts in config.adapted_parts.items():
        if linear in OF_ATTENTION:
            if kinds.has_attention:
                _adapt_linear(attention, SelfAttention, linear, parts, layer.layer_number, config, options)
        elif linear in OF_RECURRENCE:
            if kinds.recurrence is not None:
                is_second = isinstance(mixer, AttentionAndMamba)
                _adapt_linear(
                    recurrence, RecurrentMixer, linear, parts, layer.layer_number, config, options, is_second=is_second
                )
        elif kinds.feed_forward is None:
            continue
        elif not isinstance(layer.mlp, ExpertLayer):
            _adapt_linear(layer.mlp, FeedForward, linear, parts, layer.layer_number, config, options)
        else:
            _adapt_experts(layer.mlp, linear, parts, layer.layer_number, options)
            width = config.moe.moe_shared_expert_intermediate_size
            if width is not None:
                shared, own = layer.mlp.shared_experts, replace(config, ffn_hidden_size=width)
                _adapt_linear(shared, FeedForward, linear, parts, layer.layer_number, own, options)


def _adapt_linear(
    block: nn.Module | None,
    kind: type[nn.Module],
    linear: str,
    parts: tuple[str, ...],
    layer_number: int,
    config: DecoderConfig,
    options: AdapterOptions,
    *,
    is_second: bool = False,
) -> None:
    """Attach the adapters of a linear layer; ``is_second`` is that of a mixer next to another one in its layer."""
    is_second = is_second or linear in OF_FEED_FORWARD
    if not isinstance(block, kind):
        raise ConfigurationError(
            f"--lora-rank: {type(block).__name__} has no {linear}; remove it from --lora-target-modules"
        )
    module = getattr(block, linear)
    if isinstance(module, RowShardedLinear):
        out_features, in_features = spec_of(module.weight).global_shape
        site = len(_SITES) + 1 if is_second else len(_SITES)
        only = RowAdapter(options, layer_number, site, in_features, out_features)
        adapt(module, LinearAdapters({WHOLE: only}, {WHOLE: 0}))
        return
    config = config.of_layer(layer_number)
    if config.attention_k_eq_v:
        parts = tuple(part for part in parts if part != "v")
        if not parts:
            return
    widths, num_groups = _widths(linear, parts, config, options.tp)
    adapters = {
        part: ColumnAdapter(
            *(options, layer_number, _site(part, is_second=is_second)),
            config.hidden_size,
            tuple(_row_blocks(module, part, config, options)),
        )
        for part in parts
    }
    adapt(module, LinearAdapters(adapters, widths, num_groups))


def _adapt_experts(
    layer: ExpertLayer, linear: str, parts: tuple[str, ...], layer_number: int, options: AdapterOptions
) -> None:
    module = getattr(layer.experts, linear)
    whole_rows, is_whole = spec_of(module.weight).global_shape[1], WHOLE in parts
    num_stacked = len(spec_of(module.weight).shards)
    num_rows = whole_rows if is_whole else whole_rows // num_stacked
    adapters = {
        part: ExpertAdapter(
            *(options, layer_number, _site(part, is_second=linear in OF_FEED_FORWARD), module, layer.groups),
            num_rows=num_rows,
            num_stacked=num_stacked if is_whole else 1,
        )
        for part in parts
    }
    widths = {WHOLE: 0} if is_whole else dict.fromkeys(PART_OF[linear], num_rows // layer.groups.tensor_size)
    adapt(module, LinearAdapters(adapters, widths))


def _site(part: str, *, is_second: bool) -> int:
    """Return the dropout site of a column-parallel layer's adapter; the second one's differs from the first one's."""
    return _SITES.index("gate") if part == WHOLE and is_second else _SITES.index(part)


def _widths(linear: str, parts: tuple[str, ...], config: DecoderConfig, tp: Group) -> tuple[dict[str, int], int]:
    """Return the width of each part of a layer on a rank, per query group, and the number of groups on the rank."""
    if WHOLE in parts:
        return {WHOLE: 0}, 1
    if linear == "linear_fc1":
        return dict.fromkeys(PART_OF[linear], config.ffn_hidden_size // tp.size), 1
    num_groups = max(config.num_query_groups // tp.size, 1)
    queries = config.query_projection_size // tp.size // num_groups
    keys = ("k",) if config.attention_k_eq_v else ("k", "v")
    return {"q": queries, **dict.fromkeys(keys, config.kv_channels)}, num_groups


def _row_blocks(module: nn.Module, part: str, config: DecoderConfig, options: AdapterOptions) -> Iterable[RowBlock]:
    """Yield the rows of a part's ``B`` that this rank holds; a whole layer's are sharded like its own rows."""
    if part == WHOLE:
        for weight in _weights(module):
            yield RowBlock(weight.shape[0], _like(spec_of(weight), options.rank))
        return
    tp = options.tp
    is_shared = part in ("k", "v") and config.num_query_groups < tp.size
    width = {"q": config.query_projection_size, "gate": config.ffn_hidden_size, "up": config.ffn_hidden_size}.get(
        part, config.kv_projection_size
    )
    shape = (width, options.rank)
    if not is_shared:
        yield RowBlock(width // tp.size, ParamSpec("lora_B", shape, even_shards(shape, 0, tp.rank, tp.size)))
        return
    # As in the layer itself: ranks that share a group hold equal rows with partial gradients.
    ranks_per_group = tp.size // config.num_query_groups
    group, member = divmod(tp.rank, ranks_per_group)
    own = (config.kv_channels, options.rank)
    shard = Shard(Box((group * config.kv_channels, 0), own), (0, 0))
    yield RowBlock(
        config.kv_channels,
        ParamSpec(
            *("lora_B", shape, (shard,)),
            gradient_sum_axes=("tp",),
            replica_index=member,
            num_replicas=ranks_per_group,
        ),
    )


def _weights(module: nn.Module) -> tuple[nn.Parameter, ...]:
    if isinstance(module, SharedGroupQueryKeyValue):
        return module.query_weight, module.key_value_weight
    assert isinstance(module, ColumnShardedLinear)
    return (module.weight,)


def _like(spec: ParamSpec, rank: int) -> ParamSpec:
    """Return a weight's `ParamSpec` with ``rank`` columns: the same rows on the same ranks, initialized to zero."""

    def narrowed(box: Box) -> Box:
        return full_shards((box.shape[0], rank))[0].global_box.rebased((0, 0), (box.offset[0], 0))

    return ParamSpec(
        "lora_B",
        (spec.global_shape[0], rank),
        tuple(Shard(narrowed(shard.global_box), (shard.local_offset[0], 0)) for shard in spec.shards),
        gradient_sum_axes=spec.gradient_sum_axes,
        replica_index=spec.replica_index,
        num_replicas=spec.num_replicas,
    )
