"""Decoder layers of Llama and related architectures: RMSNorm, RoPE, GQA, gated MLP, MoE and sliding windows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.huggingface.family import (
    TensorLink,
    dtype_fields,
    one_of,
    query_key_value_rows,
    rows,
    whole,
)
from megatron.checkpoint.formats.huggingface.rope import read_rope, write_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import from_fields, with_fields
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import LINEAR_ATTENTION, MOE, LayerParts, format_layer_pattern

if TYPE_CHECKING:
    import torch


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(
    settings: Settings, default: Sequence[bool], kind: str = SLIDING, other: str = FULL, name: str = "layer_types"
) -> list[bool]:
    """Return whether each layer is of one of the two kinds of a setting; ``default`` if the setting is absent."""
    types = settings.values.get(name)
    if types is None:
        return list(default)
    kinds = list(types) if isinstance(types, list) else [types]
    unknown = sorted({str(each) for each in kinds if each not in (other, kind)})
    if unknown:
        settings.refuse(f"{name} contains {', '.join(unknown)}; supported values are {other} and {kind}")
    elif len(kinds) != len(default):
        settings.refuse(f"{name} has {len(kinds)} entries, but the model has {len(default)} layers")
    else:
        return [each == kind for each in kinds]
    return list(default)


def linear_attention_fields(variant: str, is_linear: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of a model with linear attention in some layers; empty if it has none."""
    if not any(is_linear):
        return {}
    pattern = str([1] * len(is_linear)) if all(is_linear) else format_layer_pattern(is_linear)
    return {"experimental_attention_variant": variant, "linear_attention_freq": pattern}


def written_linear_layers(config: GPTConfig) -> list[str]:
    """Return ``layer_types`` of a model with linear attention in some layers."""
    return [LINEAR if parts.mixer in LINEAR_ATTENTION else FULL for parts in config.layer_parts]


def window_fields(settings: Settings, has_window: Sequence[bool], default: int | None) -> dict[str, Any]:
    """Convert ``sliding_window`` (or ``default``), used in the given layers, to fields of a GPTConfig."""
    if not any(has_window):
        return {}
    window = settings.values.get("sliding_window", default)
    if type(window) is not int or window < 1:
        settings.refuse(f"sliding_window is {window!r}; a positive integer is expected")
        return {}
    pattern = None if all(has_window) else format_layer_pattern(has_window)
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": pattern}


def no_rope_pattern(has_rotary: Sequence[bool]) -> str | None:
    """Return the value of ``--no-rope-freq``, whose list has a 1 for layers without RoPE."""
    if all(has_rotary):
        return None
    text = format_layer_pattern(has_rotary)
    return text if text.isdecimal() else str([int(not has) for has in has_rotary])


def written_layer_types(config: GPTConfig) -> dict[str, Any]:
    """Return the settings ``sliding_window`` and ``layer_types`` of a model."""
    windows = config.layer_windows
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def window_of_all_layers(config: GPTConfig) -> int | None:
    """Return the window size if it is the same in all layers, otherwise None."""
    windows = set(config.layer_windows)
    return windows.pop() if len(windows) == 1 else None


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of a layer's router and experts, and of the three projections of each expert."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_IN_MEMORY = ExpertNames()
"""Names of router and experts in transformers' modules, which may differ from those in the files."""


def expert_fields(settings: Settings, num_experts: int, width: int, default_choices: int | None) -> dict[str, Any]:
    """Return the GPTConfig fields that all MoE architectures have; reject a top-k above the number of experts."""
    chosen = settings.integer("num_experts_per_tok", default_choices)
    if chosen > num_experts and not settings.problems:
        settings.refuse(f"num_experts_per_tok is {chosen}, but the model has {num_experts} experts")
        chosen = num_experts
    return {"num_experts": num_experts, "moe_ffn_hidden_size": width, "moe_router_topk": chosen}


ATTENTION_BIAS, MLP_BIAS = "attention_bias", "mlp_bias"


def bias_fields(*, of_queries: bool, of_output: bool, of_mlp: bool) -> dict[str, bool]:
    """Return the fields of the biases of QKV projections, attention's output projection, and the feed-forward."""
    return {
        "add_bias_linear": of_mlp,
        "add_qkv_bias": of_queries and not of_mlp,
        "add_proj_bias": of_output and not of_mlp,
        "disable_qkv_bias": of_mlp and not of_queries,
        "disable_proj_bias": of_mlp and not of_output,
    }


def is_unnormalized(settings: Settings) -> bool:
    """Return whether the chosen experts are weighted with their softmax score over all experts.

    With ``norm_topk_prob`` the scores are divided by their sum, which equals a softmax over the chosen experts.
    """
    return not settings.switch("norm_topk_prob", False)


def layer_frequency(has_experts: Sequence[bool]) -> str:
    """Return the value of ``--moe-layer-freq`` for these layers."""
    return "1" if all(has_experts) else str([int(has) for has in has_experts])


def windows_before_full_layers(settings: Settings, period: int) -> list[bool]:
    """Return whether each layer has a window: by default not every ``period``-th, and never the last layer."""
    by_default = [(layer + 1) % period != 0 for layer in range(settings.integer("num_hidden_layers"))]
    return [*read_layer_types(settings, by_default)[:-1], False]


def expert_links(config: GPTConfig, names: ExpertNames, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Yield the links of a layer's router and experts; each expert's projections are separate tensors in files."""
    assert config.moe.num_experts is not None
    count, width, ffn = config.moe.num_experts, config.expert_input_size, config.moe.moe_ffn_hidden_size
    yield whole(f"{ours}mlp.router.weight", f"{theirs}{names.router}.weight", (count, config.hidden_size))
    for expert in range(count):
        of_expert = f"{theirs}{names.experts}.{expert}."
        for number, name in enumerate((names.gate, names.up)[0 if config.is_gated else 1 :]):
            first = f"{ours}mlp.experts.linear_fc1.weight"
            yield one_of(first, expert, number * ffn, f"{of_expert}{name}.weight", (ffn, width))
        yield one_of(f"{ours}mlp.experts.linear_fc2.weight", expert, 0, f"{of_expert}{names.down}.weight", (width, ffn))


def stacked_expert_links(
    config: GPTConfig, ours: str, theirs: str, router: str, first: str, second: str
) -> Iterator[TensorLink]:
    """Yield the links of a layer's router and experts, whose files stack all experts under these names."""
    assert config.moe.num_experts is not None
    count, width, ffn = config.moe.num_experts, config.hidden_size, config.moe.moe_ffn_hidden_size
    ours = f"{ours}mlp."
    yield whole(f"{ours}experts.linear_fc1.weight", f"{theirs}{first}", (count, 2 * ffn, width))
    yield whole(f"{ours}experts.linear_fc2.weight", f"{theirs}{second}", (count, width, ffn))
    yield whole(f"{ours}router.weight", f"{theirs}{router}", (count, width))


def shared_expert_links(
    config: GPTConfig, ours: str, theirs: str, name: str = "mlp.shared_experts"
) -> Iterator[TensorLink]:
    """Yield the links of a layer's shared expert, which has the given name in the files."""
    width, ffn = config.hidden_size, config.moe.moe_shared_expert_intermediate_size
    assert ffn is not None
    first, of_shared = f"{ours}mlp.shared_experts.linear_fc1.weight", f"{theirs}{name}."
    for number, part in enumerate(("gate_proj", "up_proj")[0 if config.is_gated else 1 :]):
        yield rows(first, number * ffn, f"{of_shared}{part}.weight", 0, ffn, (width,))
    yield whole(f"{ours}mlp.shared_experts.linear_fc2.weight", f"{of_shared}down_proj.weight", (width, ffn))


def linear_links(native: str, foreign: str, shape: tuple[int, int], *, has_bias: bool) -> Iterator[TensorLink]:
    """Yield the links of a linear layer: its weight of the given shape, and its bias if it has one."""
    yield whole(f"{native}.weight", f"{foreign}.weight", shape)
    if has_bias:
        yield whole(f"{native}.bias", f"{foreign}.bias", shape[:1])


def norm_links(config: GPTConfig, native: str, foreign: str) -> Iterator[TensorLink]:
    """Yield the links of a norm of hidden states: of its weight and bias, if it has them."""
    for kind in config.norm_parameter_names:
        yield whole(f"{native}.{kind}", f"{foreign}.{kind}", (config.hidden_size,))


LINEAR_QKV = "self_attention.linear_qkv"
STACKED_QKV = "stacked query, key and value"
"""Name in tables of links of a projection with the rows of all queries, then all keys, then all values."""


def named_layer_links(
    config: GPTConfig, ours: str, theirs: str, names: Iterable[tuple[str, str]]
) -> Iterator[TensorLink]:
    """Yield the links of a dense layer, given pairs of our and their module names, in the order of their tensors.

    ``LINEAR_QKV`` is a projection with the native order of rows, or, if its name has ``{}`` for ``q``, ``k`` or ``v``,
    three projections. ``STACKED_QKV`` is one with all queries first.
    """
    width, ffn = config.hidden_size, config.ffn_hidden_size
    shapes = {
        LINEAR_QKV: (config.query_projection_size + 2 * config.kv_projection_size, width),
        "self_attention.linear_proj": (width, config.context_size),
        "mlp.linear_fc1": (ffn, width),
        "mlp.linear_fc2": (width, ffn),
    }
    for native, foreign in names:
        if native == STACKED_QKV or "{}" in foreign:
            yield from projection_links(config, f"{ours}{LINEAR_QKV}", f"{theirs}{foreign}")
        elif native == LINEAR_QKV:
            yield whole(f"{ours}{native}.weight", f"{theirs}{foreign}.weight", shapes[native])
            if config.has_qkv_bias:
                yield whole(f"{ours}{native}.bias", f"{theirs}{foreign}.bias", shapes[native][:1])
        elif native in shapes:
            yield from linear_links(
                f"{ours}{native}", f"{theirs}{foreign}", shapes[native], has_bias=config.add_bias_linear
            )
        else:
            yield from norm_links(config, f"{ours}{native}", f"{theirs}{foreign}")


def qkv_parameters(config: GPTConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the kinds of parameters of the QKV projections with the shapes of one row: weight, and bias if any."""
    return (("weight", (config.hidden_size,)), *((("bias", ()),) if config.has_qkv_bias else ()))


def projection_links(config: GPTConfig, native: str, foreign: str) -> Iterator[TensorLink]:
    """Yield the links of query, key and value projections.

    ``foreign`` has ``{}`` for ``q``, ``k`` or ``v``, or is the name of one projection, with all queries first.
    """
    heads, groups, has_values = config.num_attention_heads, config.num_query_groups, not config.attention_k_eq_v
    fused = list(query_key_value_rows(heads, groups, config.kv_channels, has_values=has_values))
    starts, keys = {"q": 0, "k": 0, "v": 0}, config.query_projection_size
    if "{}" not in foreign:
        starts = {"q": 0, "k": keys, "v": keys + config.kv_projection_size}
    for name in ("q", "k", "v"):
        for kind, trailing in qkv_parameters(config):
            for part, native_start, foreign_start, count in fused:
                if part == name:
                    their_name, start = f"{foreign.format(name)}.{kind}", starts[name] + foreign_start
                    yield rows(f"{native}.{kind}", native_start, their_name, start, count, trailing)


def weights_as_in_files(weights: Mapping[str, torch.Tensor], names: ExpertNames) -> dict[str, torch.Tensor]:
    """Convert a loaded model's weights to the form of its files: the experts, stacked in memory, become separate.

    All tensors are views of the same memory.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer, of_router, kind = name.partition(f".{_IN_MEMORY.router}.")
        if of_router:
            found[f"{layer}.{names.router}.{kind}"] = weight
            continue
        place = names.experts if f".{names.experts}." in name else _IN_MEMORY.experts
        layer, of_experts, kind = name.partition(f".{place}.")
        stacked = {"gate_up_proj": (names.gate, names.up), "up_proj": (names.up,), "down_proj": (names.down,)}
        parts = stacked.get(kind)
        if not of_experts or parts is None:
            found[name] = weight
            continue
        for expert, of_expert in enumerate(weight):
            for part, values in zip(parts, of_expert.chunk(len(parts)), strict=True):
                found[f"{layer}.{names.experts}.{expert}.{part}.weight"] = values
    return found


def _layer_of(config: GPTConfig, ours: str) -> int:
    """Return the layer with this prefix of our tensor names, for an MTP module the last layer of the model."""
    number = ours.rstrip(".").rpartition(".")[2]
    return config.kind_of(int(number) if number.isdecimal() else config.num_layers)


def _has_keys(config: GPTConfig, ours: str) -> bool:
    return config.key_value_sources[_layer_of(config, ours)] is None


_BUFFER = re.compile(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class RotaryDecoderFamily:
    """Base of the RoPE decoder architectures; each subclass converts its additional settings.

    ``has_qkv_bias`` states whether the QKV projections have biases, unless ``own_fields`` decides. The defaults are
    those of the architecture's configuration class, since its files may omit them. By default each head has its own
    key-value group, and the head dimension is the hidden size divided by the number of heads. ``norm_names`` pairs our
    names of a layer's norms with theirs, and ``head_norm_names`` those of the QK norms. ``embedding_name``,
    ``attention_name`` and ``mlp_name`` are their names of these parts, and ``mlp_names`` of the MLP's projections: gate
    if it has one, up, and down. ``native_layers`` is the number of our layers per layer of theirs: 2 if ours have one
    part each, a mixer or a feed-forward. ``expert_names`` is None if the files stack the experts as a model in memory
    does.

    ``other_names`` pairs parts of tensor names with those of other folders, or of models in memory, and
    ``stacked_in_memory`` maps a part of the name of a tensor in memory to those of the tensors that it stacks.
    ``multimodal_architecture`` names folders whose ``text_config`` describes the model; their ``other_parts``, for
    images and audio, are left out.
    ``setting_names`` maps names of settings to the names that are read here, the one that is written first.
    ``bias_settings`` are ``attention_bias``, the biases of all four projections of attention, and ``mlp_bias`` with
    their defaults, if the architecture has them.
    """

    model_type: str
    architecture: str
    multimodal_architecture: str | None = None
    other_parts: tuple[str, ...] = ("model.visual.",)
    base_prefix = "model."
    has_qkv_bias = False
    default_positions: int
    default_groups: int | None = None
    default_head_dim: int | None = None
    default_epsilon = 1e-6
    default_rotary_base = 10000.0
    is_tied_by_default = False
    activation = ("hidden_act", "silu", "swiglu")
    """Setting of the activation, its only supported value, and the corresponding flag."""
    epsilon_name = "rms_norm_eps"
    embedding_name = "embed_tokens"
    attention_name = "self_attn"
    attention_output = "o_proj"
    final_norm = "norm"
    native_layers = 1
    mlp_name = "mlp"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    head_norm_names: Mapping[str, str] = MappingProxyType({"q": "q_norm", "k": "k_norm"})
    expert_names: ExpertNames | None = ExpertNames()
    other_names: tuple[tuple[str, str], ...] = ()
    stacked_in_memory: Mapping[str, Sequence[str]] = MappingProxyType({})
    setting_names: Mapping[str, str] = MappingProxyType({})
    norm_names: tuple[tuple[str, str], ...] = (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    )
    default_ffn_size: int | None = None
    bias_settings: Mapping[str, bool] = MappingProxyType({})

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        settings = self._with_usual_names(settings)
        width = settings.integer("hidden_size")
        heads = settings.integer("num_attention_heads")
        # A null value, unlike an absent setting, means that the value is computed from the other sizes.
        usual_groups = heads if "num_key_value_heads" in settings.values else self.default_groups or heads
        usual_width = None if "head_dim" in settings.values else self.default_head_dim
        groups = settings.integer("num_key_value_heads", usual_groups)
        head_dim = settings.integer("head_dim", usual_width or max(width // heads, 1))
        if not settings.problems:
            self.check_heads(settings, width, heads, groups, head_dim)
        setting, activation, switch = self.activation
        settings.require(setting, activation, activation, "it is the activation of the feed-forward layer")
        positions = settings.integer("max_position_embeddings", self.default_positions)
        config = from_fields(
            GPTConfig,
            num_layers=settings.integer("num_hidden_layers"),
            hidden_size=width,
            num_attention_heads=heads,
            num_query_groups=groups,
            group_query_attention=groups != heads,
            ffn_hidden_size=settings.integer("intermediate_size", self.default_ffn_size),
            kv_channels=head_dim,
            normalization="RMSNorm",
            norm_epsilon=settings.number(self.epsilon_name, self.default_epsilon),
            swiglu=switch == "swiglu",
            geglu=switch == "geglu",
            squared_relu=switch == "squared_relu",
            xielu=switch == "xielu",
            add_bias_linear=False,
            add_qkv_bias=self.has_qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=settings.number("attention_dropout", 0.0),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=settings.integer("vocab_size"),
            max_position_embeddings=positions,
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", self.is_tied_by_default),
            **self.read_rope(settings, positions),
            **dtype_fields(settings),
        )
        return with_fields(config, **(self.bias_fields_of(settings) | self.own_fields(settings)))

    def bias_fields_of(self, settings: Settings) -> dict[str, bool]:
        """Return the fields of ``bias_settings``."""
        has = {name: settings.switch(name, default) for name, default in self.bias_settings.items()}
        if not has:
            return {}
        of_attention = has.get(ATTENTION_BIAS, False)
        return bias_fields(of_queries=of_attention, of_output=of_attention, of_mlp=has.get(MLP_BIAS, False))

    def _with_usual_names(self, settings: Settings) -> Settings:
        given, usual_values = settings.values, dict[str, Any]()
        for name, usual in self.setting_names.items():
            if name not in given:
                continue
            other = usual_values.get(usual, given.get(usual, given[name]))
            if other != given[name]:
                settings.refuse(f"{name} is {given[name]!r:.40}, but another name of this setting has {other!r:.40}")
            usual_values[usual] = given[name]
        return settings.replaced(usual_values) if usual_values else settings

    def with_own_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings under the architecture's names for them."""
        own = {usual: name for name, usual in reversed([*self.setting_names.items()])}
        return {own.get(name, name): value for name, value in values.items()}

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        return read_rope(settings, positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields that only this architecture's settings determine; reject unsupported settings."""
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "attention_dropout": config.attention_dropout,
            self.activation[0]: self.activation[1],
            "hidden_size": config.hidden_size,
            "initializer_range": config.init_method_std,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": config.max_position_embeddings,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_layers // self.native_layers,
            "num_key_value_heads": config.num_query_groups,
            self.epsilon_name: config.norm_epsilon,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "vocab_size": config.vocab_size,
        }
        if self.default_head_dim or config.kv_channels * config.num_attention_heads != config.hidden_size:
            settings["head_dim"] = config.kv_channels
        biases = {ATTENTION_BIAS: config.has_proj_bias, MLP_BIAS: config.add_bias_linear}
        settings |= {name: biases[name] for name in self.bias_settings}
        return settings | write_rope(config)

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        embedding = f"{prefix}{self.embedding_name}.weight"
        yield whole("model.embedding.word_embeddings.weight", embedding, (config.vocab_size, width))
        for layer in range(config.num_layers):
            ours, theirs = f"model.decoder.layers.{layer}.", f"{prefix}layers.{layer // self.native_layers}."
            yield from self.layer_links(config.of_layer(layer), ours, theirs, config.layer_parts[layer])
        yield from norm_links(config, "model.decoder.final_layernorm", f"{prefix}{self.final_norm}")
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", (config.vocab_size, width))
        if config.add_output_bias:
            yield whole("model.output_layer.bias", "lm_head.bias", (config.vocab_size,))

    def as_in_files(self, config: GPTConfig, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert a loaded model's weights to the form of its files."""
        if config.moe.num_experts is not None and self.expert_names is not None:
            weights = weights_as_in_files(weights, self.expert_names)
        for stacked, parts in self.stacked_in_memory.items():
            found: dict[str, torch.Tensor] = {}
            for name, weight in weights.items():
                names = [name.replace(stacked, part) for part in parts] if stacked in name else [name]
                found |= zip(names, weight.chunk(len(names)) if stacked in name else [weight])
            weights = found
        return weights

    def is_buffer(self, name: str, config: GPTConfig) -> bool:
        """Return whether the tensor is a buffer of RoPE frequencies, which older files contain, or of other parts."""
        is_other = self.multimodal_architecture is not None and name.startswith(self.other_parts)
        return is_other or _BUFFER.fullmatch(name) is not None

    def fc1_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a dense layer's gate and up projections."""
        width, ffn = config.hidden_size, config.ffn_size_of(_layer_of(config, ours))
        for number, name in enumerate(self.mlp_names[:-1]):
            for kind, trailing in (("weight", (width,)), ("bias", ()))[: 2 if config.add_bias_linear else 1]:
                native, foreign = f"{ours}mlp.linear_fc1.{kind}", f"{theirs}{self.mlp_name}.{name}.{kind}"
                yield rows(native, number * ffn, foreign, 0, ffn, trailing)

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's QKV projections, or of its query projection if it has no keys of its own."""
        if not _has_keys(config, ours):
            native, foreign = f"{ours}self_attention.linear_q", f"{theirs}{self.attention_name}.q_proj"
            shape = (config.query_projection_size, config.hidden_size)
            yield from linear_links(native, foreign, shape, has_bias=config.has_qkv_bias)
            return
        yield from projection_links(config, f"{ours}{LINEAR_QKV}", f"{theirs}{self.attention_name}.{{}}_proj")

    def attention_norm_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's QK norms."""
        across = config.qk_layernorm_across_heads
        rows = {"q": config.query_projection_size, "k": config.kv_projection_size}
        for name in ("q", "k") if _has_keys(config, ours) else ("q",):
            native = f"{ours}self_attention.{name}_layernorm"
            foreign = f"{theirs}self_attn.{self.head_norm_names[name]}"
            for kind in config.norm_parameter_names:
                shape = (rows[name] if across else config.kv_channels,)
                yield whole(f"{native}.{kind}", f"{foreign}.{kind}", shape)

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's router and experts."""
        assert self.expert_names is not None, "a family that stacks experts has links of its own"
        yield from expert_links(config, self.expert_names, ours, theirs)

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's attention."""
        yield from self.attention_links(config, ours, theirs)
        projection = (config.hidden_size, config.context_size)
        output = f"{theirs}{self.attention_name}.{self.attention_output}"
        native, has_bias = f"{ours}self_attention.linear_proj", config.has_proj_bias
        yield from linear_links(native, output, projection, has_bias=has_bias)
        if config.qk_layernorm:
            yield from self.attention_norm_links(config, ours, theirs)

    def layer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer; ``ours`` and ``theirs`` are the prefixes of its tensor names."""
        width, ffn = config.hidden_size, config.ffn_size_of(_layer_of(config, ours))
        if parts.mixer is not None:
            yield from self.mixer_links(config, ours, theirs, parts)
        if parts.feed_forward == MOE:
            yield from self.expert_layer_links(config, ours, theirs)
        elif parts.feed_forward is not None:
            down = f"{theirs}{self.mlp_name}.{self.mlp_names[-1]}"
            yield from self.fc1_links(config, ours, theirs)
            yield from linear_links(f"{ours}mlp.linear_fc2", down, (width, ffn), has_bias=config.add_bias_linear)
        names = self.norm_names[: 1 if config.shared_parallel_norm else None]
        if not all(parts):
            # A layer with one part has one norm, under the name of the first.
            names = ((names[0][0], names[0 if parts.mixer else -1][1]),)
        for name, their_name in names:
            yield from norm_links(config, f"{ours}{name}", f"{theirs}{their_name}")

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Reject an inconsistent number or dimension of heads."""
        if heads % groups:
            settings.refuse(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
        if settings.values.get("head_dim", self.default_head_dim) is None and width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_attention_heads {heads}; set head_dim")
        elif head_dim % 2:
            settings.refuse(f"head_dim is {head_dim}; rotary position embeddings need an even number")
