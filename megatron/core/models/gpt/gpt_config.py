"""Configuration of a GPT model: transformer stack, vocabulary and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from megatron.core.config_base import IDENTITY, NOT_NEGATIVE, POSITIVE, FieldSpec, field_specs, field_value, flag
from megatron.core.transformer import (
    GATED_DELTA_NET,
    INDEPENDENT_SCORES,
    MAMBA,
    DecoderConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RotaryConfig,
    alibi_slopes,
    pattern_symbols,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig, in_args=True):
    """Configuration of a GPT model.

    ``vocab_size`` is the tokenizer's vocabulary size without padding. It is 0 until the tokenizer is known.
    """

    vocab_size: int = flag(0, cli=False, role="shape", most=2**31 - 1, in_args=False)
    """Number of tokens of the tokenizer, without padding."""
    make_vocab_size_divisible_by: int = flag(128, role="layout", bounds=POSITIVE)
    """Pad the vocabulary to a multiple of this number x the tensor-parallel size."""
    max_position_embeddings: int = flag(
        0, role="shape", bounds=NOT_NEGATIVE, most=2**31 - 1, where=("position_embedding_type", "learned_absolute")
    )
    """Positions of the model; by default the sequence length."""
    position_embedding_offset: int = flag(0, role="shape", bounds=NOT_NEGATIVE, most=2**31 - 1, in_args=False)
    """Row of the first position in the table of learned or sinusoidal positions."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "alibi", "sinusoidal", "none"),
        not_built=("relative", "mrope"),
        role="shape",
    )
    """Type of position embedding; alibi adds a bias to attention scores, linear in the distance, with a slope per head;
    sinusoidal adds sines and cosines to the embeddings."""
    use_rotary_position_embeddings: bool = flag(
        False,
        aliases=("--use-llama2-rotary-position-embeddings",),
        role="meaning",
        seen_as="position_embedding_type",
    )
    """Use rotary embeddings (same as --position-embedding-type rope)."""
    add_position_embedding: bool = flag(
        True, negative="--no-position-embedding", role="meaning", seen_as="position_embedding_type"
    )
    """Learn position embeddings unless rotary ones are configured. Off: do not learn position embeddings: use rotary
    ones if configured, else none."""
    rotary_base: float = flag(10000, role="meaning", bounds=POSITIVE, where=("position_embedding_type", "rope"))
    """Base of the rotary frequencies."""
    rotary_ntk_alpha: float = flag(
        1.0,
        role="meaning",
        bounds=POSITIVE,
        where=("position_embedding_type", "rope"),
        excludes=("multi_latent_attention",),
        in_args=False,
    )
    """NTK-aware scaling: multiply the rotary base by this number to the power of d / (d - 2), for d rotated channels
    per head."""
    rotary_percent: float = flag(1.0, role="meaning", where=("position_embedding_type", "rope"), seen_as="rotary_dim")
    """Fraction of each head's dimension that is rotated."""
    rotary_interleaved: bool = flag(False, role="meaning", where=("position_embedding_type", "rope"))
    """Rotate pairs of adjacent channels (interleaved), not the halves of a head."""
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, role="meaning", bounds=POSITIVE, where=("position_embedding_type", "rope")
    )
    """Divide positions by this factor for the rotary embedding."""
    use_rope_scaling: bool = flag(False, role="meaning", where=("position_embedding_type", "rope"))
    """Scale the rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, role="meaning", bounds=POSITIVE, where=("use_rope_scaling", True))
    """Llama 3.1 scaling: factor by which low frequencies are divided."""
    rope_scaling_low_freq_factor: float = flag(1.0, role="meaning", bounds=POSITIVE, where=("use_rope_scaling", True))
    """Llama 3.1 scaling: below original length / this wavelength ratio, frequencies are fully divided."""
    rope_scaling_high_freq_factor: float = flag(4.0, role="meaning", bounds=POSITIVE, where=("use_rope_scaling", True))
    """Llama 3.1 scaling: above original length / this wavelength ratio, frequencies are kept."""
    rope_scaling_original_max_position_embeddings: int = flag(
        8192, role="meaning", bounds=POSITIVE, where=("use_rope_scaling", True)
    )
    """Llama 3.1 scaling: number of positions in the original training."""
    longrope_long_factor: tuple[float, ...] = flag(
        (),
        nargs="+",
        metavar="X",
        role="meaning",
        where=("position_embedding_type", "rope"),
        excludes=(
            *("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rotary_base_local"),
            *("multi_latent_attention", "rotary_ntk_alpha", "rope_type", "reset_position_ids", "global_kv_channels"),
        ),
        seen_as="longrope_factors",
        in_args=False,
    )
    """LongRoPE: divide the rotary frequencies by these numbers, one per two rotated channels of a head, in sequences of
    more than --longrope-original-max-position-embeddings."""
    longrope_short_factor: tuple[float, ...] = flag(
        (),
        nargs="+",
        metavar="X",
        role="meaning",
        needs="longrope_long_factor",
        seen_as="longrope_factors",
        in_args=False,
    )
    """LongRoPE: divide the rotary frequencies by these numbers in shorter sequences; by default they are 1."""
    longrope_original_max_position_embeddings: int = flag(
        4096, role="meaning", bounds=POSITIVE, needs="longrope_long_factor", in_args=False
    )
    """LongRoPE: number of positions in the original training."""
    longrope_attention_factor: float = flag(
        1.0, role="meaning", bounds=POSITIVE, needs="longrope_long_factor", in_args=False
    )
    """LongRoPE: multiply the rotated part of queries and keys by this number."""
    rotary_base_local: float | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        where=("position_embedding_type", "rope"),
        needs="window_size",
        in_args=False,
    )
    """Unscaled base of the rotary frequencies in sliding-window layers; by default that of all layers."""
    scale_embeddings: bool = flag(False, role="meaning", in_args=False)
    """Multiply word embeddings by the square root of the hidden size."""
    add_embedding_norm: bool = flag(False, role="weights", in_args=False)
    """Normalize the embeddings before the first layer."""
    embedding_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, in_args=False)
    """Multiplier of the embeddings."""
    logit_scale: float = flag(1.0, role="meaning", bounds=POSITIVE, in_args=False)
    """Multiplier of the output logits."""
    final_logit_softcapping: float | None = flag(None, role="meaning", bounds=POSITIVE, in_args=False)
    """Soft-cap the output logits at this value with tanh."""
    embedding_init_method_std: float | None = flag(None, role="run", bounds=NOT_NEGATIVE, in_args=False)
    """Standard deviation of initial word and position embeddings; by default --init-method-std."""
    loss: str = flag("cross_entropy", choices=("cross_entropy",), registry="loss", role="recipe", in_args=False)
    """Loss per token in training: the cross-entropy, or one that a script registered. Evaluation reports the
    cross-entropy."""
    z_loss_coeff: float | None = flag(None, role="recipe", bounds=NOT_NEGATIVE, in_args=False)
    """Coefficient of the z-loss of output logits, the mean squared log-sum-exp, added to the trained loss. For routers:
    --moe-z-loss-coeff."""
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te", "linear"), role="run")
    """Implementation of the loss. ``linear`` computes output layer and loss in chunks of tokens, without all logits at
    once, and most logits again in the backward pass. ``te`` is the same as ``native`` here."""
    untie_embeddings_and_output_weights: bool = flag(False, role="weights")
    """Give the output layer a separate weight."""
    add_output_bias: bool = flag(False, role="weights", needs="untie_embeddings_and_output_weights", in_args=False)
    """Add a bias to the output layer."""

    def __post_init__(self) -> None:
        """Derive the fields that depend on others."""
        super().__post_init__()
        if self.use_rotary_position_embeddings:
            object.__setattr__(self, "position_embedding_type", "rope")
        elif not self.add_position_embedding and self.position_embedding_type == "learned_absolute":
            object.__setattr__(self, "position_embedding_type", "none")
        for name, base in (("rotary_base", self.rotary_base), ("rotary_base_local", self.rotary_base_local)):
            # Megatron-LM's argument is an integer.
            if isinstance(base, float) and base.is_integer():
                object.__setattr__(self, name, int(base))

    def has_experts_among(self, layer_numbers: Iterable[int], *, is_last: bool) -> bool:
        """Return whether a model chunk with these layers has experts. The last chunk includes the MTP modules."""
        further = range(self.num_layers, self.num_layers + self.mtp.mtp_depth * is_last)
        return any(self.has_experts(number) for number in (*layer_numbers, *further))

    @property
    def embedding_init_std(self) -> float:
        """Return the initial standard deviation of the embeddings, and of a tied output layer."""
        std = self.embedding_init_method_std
        return self.init_method_std if std is None else std

    @property
    def logit_multiplier(self) -> float:
        """Return the factor of the logits by --logit-scale and muP."""
        return self.logit_scale * (self.mup.mup_output_mult / self.width_multiplier)

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of embedding rows, including padding."""
        return padded_vocab_size(self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size)

    @property
    def scaled_rotary_base(self) -> float:
        """Return the rotary base after NTK-aware scaling."""
        if self.rotary_ntk_alpha == 1.0:
            return self.rotary_base
        return float(self.rotary_base * self.rotary_ntk_alpha ** (self.rotary_dim / (self.rotary_dim - 2)))

    @property
    def longrope_length(self) -> int | None:
        """Return the longest sequence in which LongRoPE uses its short factors, or None without LongRoPE."""
        return self.longrope_original_max_position_embeddings if self.longrope_long_factor else None

    @property
    def longrope_factors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return LongRoPE's factors in short and in long sequences, both empty without LongRoPE."""
        return self.longrope_short_factor or (1.0,) * len(self.longrope_long_factor), self.longrope_long_factor

    @property
    def num_position_embeddings(self) -> int:
        """Return the number of rows of a table of learned positions."""
        return self.max_position_embeddings + self.position_embedding_offset

    @property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """Return the slope of each head's linear bias (ALiBi), or None without such biases."""
        return alibi_slopes(self.num_attention_heads) if self.position_embedding_type == "alibi" else None

    @property
    def rotary_dim(self) -> int:
        """Return the number of rotated channels per head, in layers without a window if their heads are different."""
        channels = int(self.of_global_layers.kv_channels * self.rotary_percent)
        return channels // 2 * 2 if self.rope.rope_type == "proportional" else channels

    @property
    def rotary_width(self) -> int:
        """Return the number of channels per head that have a rotary angle, which may be 0."""
        return self.kv_channels if self.rope.rope_type == "proportional" else self.rotary_dim

    def forward_flops_per_sequence(self, seq_length: int) -> float:
        """Return the FLOPs of one forward pass over one sequence, including the output layer."""
        return super().forward_flops_per_sequence(seq_length) + self.output_forward_flops(seq_length)

    def output_forward_flops(self, seq_length: int) -> float:
        """Return the forward FLOPs of the output layer for one sequence, including those for the MTP modules."""
        return 2.0 * seq_length * self.hidden_size * self.padded_vocab_size * (1 + self.mtp.mtp_depth)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Return the next multiple of ``make_vocab_size_divisible_by`` x tensor-parallel size."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return (vocab_size + multiple - 1) // multiple * multiple


HYBRID_FIELDS = (
    *("experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("hybrid_override_pattern", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
)
"""Fields of hybrid models; Megatron's ``args`` contain them for a hybrid model."""

_IN_NO_ARGS = (
    *("moe_router_group_score_topk", "latent_norm_epsilon", "yarn_correction_range_round_to_int"),
    *("attention_temperature_beta", "moe_expert_norms", "moe_router_norm", "moe_router_expert_scale"),
    "dsa_indexer_layer_freq",
)
"""Fields of experts, MLA and YaRN that Megatron's ``args`` never contain."""
_SPELLED_OTHERWISE = (
    *("window_size", "window_attn_skip_freq", "no_rope_freq"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *HYBRID_FIELDS,
    *(
        field.name
        for kind in (MoEConfig, MTPConfig)
        for field in dataclasses.fields(kind)
        if field.name not in _IN_NO_ARGS
    ),
)
"""Fields that Megatron's ``args`` represent in another form."""
STRETCH_FIELDS = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"),
)
"""YaRN fields; Megatron's ``args`` contain them if YaRN is used."""
_OF_LATENT = {
    field.name
    for kind in (MLAConfig, RotaryConfig)
    for field in dataclasses.fields(kind)
    if field.name not in _IN_NO_ARGS
}
"""MLA fields; Megatron's ``args`` contain them for MLA, and Megatron always rounds YaRN's correction range."""

_VALUES_IN_ARGS: Mapping[str, tuple[str | None, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "experimental_attention_variant": (None, GATED_DELTA_NET),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "moe_router_score_function": ("softmax", *INDEPENDENT_SCORES),
}
"""Choices that Megatron has too; its checkpoint files cannot represent other choices."""


_EPSILON_OF_MAMBA = 1e-5
"""Epsilon of the gated norm in Megatron-LM's Mamba-2 layers, whatever its flags."""
_SYMBOLS_OF_MEGATRON = "M*-E"
_STAGES = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "pipeline_model_parallel_layout",
)


def hybrid_flags_without_argument(model: GPTConfig) -> list[str]:
    """Return what the ``args`` in Megatron's files cannot describe of a hybrid model, as typed where it is a flag."""
    if not model.hybrid.is_hybrid:
        return []
    try:
        mixers = {parts.mixer for parts in model.layer_parts}
    except ValueError:
        return []  # The checks of hybrid models report it.
    found: list[str] = []
    names: list[str] = []
    if model.hybrid.hybrid_override_pattern is not None:
        if others := sorted(set(pattern_symbols(model.layer_parts)) - set(_SYMBOLS_OF_MEGATRON)):
            found.append(f"{', '.join(others)} in --hybrid-override-pattern {model.hybrid.hybrid_override_pattern}")
        # Megatron-LM's MambaModel has neither norms of queries and keys, nor MLA, MTP or virtual stages.
        names += ("qk_layernorm", "multi_latent_attention", "mtp_num_layers", *_STAGES)
    elif GATED_DELTA_NET in mixers and not model.swiglu:
        found.append("gated delta-net without --swiglu")
    tp, groups = model.tensor_model_parallel_size, model.hybrid.mamba_num_groups
    if MAMBA in mixers and groups % tp:
        found.append(f"--mamba-num-groups {groups} at --tensor-model-parallel-size {tp}")
    if MAMBA in mixers and model.norm_epsilon != _EPSILON_OF_MAMBA:
        names.append("norm_epsilon")
    if GATED_DELTA_NET in mixers and model.normalization != "RMSNorm":
        names.append("normalization")
    specs = {spec.name: spec for spec in field_specs(GPTConfig)}
    values = {name: field_value(model, name) for name in names}
    is_needed = {"normalization", "norm_epsilon"}
    return [*found, *(specs[n].typed(v) for n, v in values.items() if n in is_needed or v != specs[n].default)]


def flags_without_argument(model: GPTConfig) -> list[str]:
    """Return the flags, as typed, of settings that the ``args`` in Megatron's files cannot describe."""
    all_specs = (spec for spec in field_specs(GPTConfig) if spec.options.cli)
    specs = (spec for spec in all_specs if spec.options.role in IDENTITY or spec.options.registry is not None)
    held: Collection[str] = ()
    if model.mla.multi_latent_attention:
        held = _OF_LATENT
    elif model.rope.rope_type == "yarn":
        held = ("rope_type", *STRETCH_FIELDS)
    elif model.rope.rope_type == "rope":
        held = ("rope_type",)  # RoPE without scaling is the default.

    def is_held(spec: FieldSpec) -> bool:
        value = field_value(model, spec.name)
        if value not in _VALUES_IN_ARGS.get(spec.name, (value,)):
            return False
        if spec.name == "rotary_base" and value != int(value):
            return False
        if spec.name == "position_embedding_type" and value != "rope" and model.mla.multi_latent_attention:
            return False  # Megatron's MLA has rotary position embeddings whatever this argument is.
        has_argument = spec.options.in_args or spec.name in _SPELLED_OTHERWISE or spec.name in held
        return bool(has_argument) or value == spec.default

    flags = [spec.typed(field_value(model, spec.name)) for spec in specs if not is_held(spec)]
    if model.moe.moe_router_enable_expert_bias and model.moe.moe_router_score_function == "softmax":
        flags.append("--moe-router-enable-expert-bias with softmax scores")
    return flags + [flag for flag in hybrid_flags_without_argument(model) if flag not in flags]
