"""DecoderConfig: shape and arithmetic of a stack of transformer layers, with MLA, MoE, MTP and muP options.

muP (maximal update parametrization): Yang et al. 2022, https://arxiv.org/abs/2203.03466. Importing this module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

from megatron.core.config_base import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Config,
    flag,
    group,
    idle_with,
    idle_without,
)
from megatron.core.parallel_config import Fp8Config, Fp8TensorIndex, ParallelConfig
from megatron.core.registry import find_registered, is_registered
from megatron.core.transformer.alibi import extended_head_width
from megatron.core.transformer.hybrid_config import (
    ATTENTION,
    MLP,
    MOE,
    SPARSE_ATTENTION,
    HybridConfig,
    LayerParts,
    format_layers,
    layer_parts,
    recurrent_kinds_of,
)
from megatron.core.transformer.layer_pattern import parse_layer_pattern, parse_window
from megatron.core.transformer.lora_targets import adapted_parts, linear_layers_of

if TYPE_CHECKING:
    from typing_extensions import Self


def without_rotary(pattern: str | None, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotary position embedding (NoPE).

    Raises:
        ValueError: the pattern is neither a number nor a list with one entry per layer; the message gives the reason.
    """
    if pattern is None:
        return (False,) * num_layers
    kinds = parse_layer_pattern(pattern, num_layers)
    # For a number, `parse_layer_pattern` returns False for every Nth layer; these are the layers without RoPE.
    return tuple(not kind for kind in kinds) if pattern.strip().isdecimal() else kinds


_LATENT, _VARIANT = "multi_latent_attention", "experimental_attention_variant"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig(Config):
    """Widths of multi-head latent attention (MLA), which ``multi_latent_attention`` enables."""

    multi_latent_attention: bool = flag(False, role="shape")
    """Use multi-head latent attention (MLA): all heads' keys and values from one latent vector per token."""
    q_lora_rank: int | None = flag(None, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Rank of the latent query vector; by default queries are computed from hidden states."""
    kv_lora_rank: int = flag(32, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Rank of the latent vector of keys and values."""
    qk_head_dim: int = flag(128, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Query and key dimension per head without the rotary part."""
    qk_pos_emb_head_dim: int = flag(64, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Dimension of the rotary part of queries and keys; all heads share the key's. It is not rotated without position
    embeddings."""
    v_head_dim: int = flag(128, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Value dimension per head."""
    latent_norm_epsilon: float | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        needs=_LATENT,
        idle=idle_without("qk_layernorm"),
        seen_as="epsilon_of_latent_norms",
    )
    """Epsilon of the norms of MLA's latent vectors, and of the keys of DSA's indexer; by default --norm-epsilon."""
    dsa_indexer_n_heads: int | None = flag(None, role="shape", bounds=POSITIVE, needs=_VARIANT)
    """DSA: query heads of the indexer, which selects the keys that a query attends to."""
    dsa_indexer_head_dim: int | None = flag(None, role="shape", bounds=POSITIVE, needs=_VARIANT)
    """DSA: query and key dimension per head of the indexer, its rotary part included."""
    dsa_indexer_topk: int | None = flag(None, role="meaning", bounds=POSITIVE, needs=_VARIANT)
    """DSA: keys per query, those with the largest scores of the indexer."""
    dsa_indexer_layer_freq: str = flag("1", metavar="N", role="shape", needs=_VARIANT, seen_as="layers_with_indexer")
    """DSA: layers with an indexer: every Nth from the first on, or a list of 1 or 0 per layer: ([1]+[0]*3)*4. The
    others attend to the keys that the last indexer before them selected."""
    dsa_indexer_loss_coeff: float | None = flag(None, role="recipe", bounds=NOT_NEGATIVE, needs=_VARIANT)
    """DSA: coefficient of the indexer loss, the KL divergence from the indexer's distribution to the attention's,
    which alone trains the indexer; 0 does not train it."""
    dsa_indexer_use_sparse_loss: bool = flag(False, role="recipe", needs="dsa_indexer_loss_coeff")
    """DSA: compare the two distributions over the selected keys only, not over all keys."""

    @property
    def latent_query_width(self) -> int:
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def latent_head_width(self) -> int:
        """Return the padded head width, because attention kernels need queries, keys and values of equal width."""
        return max(self.latent_query_width, self.v_head_dim)

    @property
    def num_attention_maps(self) -> int:
        """Return the number of linear layers of an attention layer."""
        if not self.multi_latent_attention:
            return 2
        return 4 if self.q_lora_rank is None else 5

    def latent_projections(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of weights in the linear layers of one MLA layer."""
        queries = num_heads * self.latent_query_width
        of_queries = hidden_size * queries
        if self.q_lora_rank is not None:
            of_queries = self.q_lora_rank * (hidden_size + queries)
        down = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        up = self.kv_lora_rank * num_heads * (self.qk_head_dim + self.v_head_dim)
        return of_queries + down + up + num_heads * self.v_head_dim * hidden_size

    def indexer_multiply_adds(self, hidden_size: int, seq_length: int) -> tuple[int, float]:
        """Return the multiply-adds per token of one indexer of DSA: of its linear layers, and of its causal scores.

        Without a loss, sequences of at most top-k tokens need no scores.
        """
        heads, width = self.dsa_indexer_n_heads or 0, self.dsa_indexer_head_dim or 0
        of_hidden = hidden_size * (width + heads)
        if not self.dsa_indexer_loss_coeff and seq_length <= (self.dsa_indexer_topk or 0):
            return of_hidden, 0.0
        return of_hidden + (self.q_lora_rank or hidden_size) * heads * width, heads * width * seq_length / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(Config):
    """Kind of rotary position embedding, and its YaRN scaling."""

    rope_type: str | None = flag(None, choices=("rope", "yarn", "proportional"), role="meaning")
    """Type of rotary embedding: plain (rope), or scaled by --rotary-scaling-factor (yarn); by default yarn with MLA,
    else rope. proportional: the channels of --rotary-percent have the highest frequencies of a whole head."""
    rotary_scaling_factor: float = flag(1.0, role="meaning", bounds=POSITIVE)
    """YaRN: factor of the number of positions."""
    original_max_position_embeddings: int = flag(4096, role="meaning", bounds=POSITIVE)
    """YaRN: number of positions in the original training."""
    beta_fast: float = flag(32.0, role="meaning", bounds=POSITIVE)
    """YaRN: keep frequencies with more rotations than this over the original positions."""
    beta_slow: float = flag(1.0, role="meaning", bounds=POSITIVE)
    """YaRN: divide frequencies with fewer rotations than this over the original positions by the factor."""
    yarn_correction_range_round_to_int: bool = flag(
        True, negative="--no-yarn-correction-range-round-to-int", role="meaning"
    )
    """YaRN: round the blended range to whole channels. Off: YaRN: blend between the exact positions of --beta-fast and
    --beta-slow."""
    mscale: float = flag(1.0, role="meaning", bounds=NOT_NEGATIVE)
    """YaRN: growth of the rotary part of queries and keys with the logarithm of the factor."""
    mscale_all_dim: float = flag(0.0, role="meaning", bounds=NOT_NEGATIVE)
    """YaRN: growth of attention scores with the logarithm of the factor, instead of the rotary part."""

    attention_temperature_beta: float = flag(
        0.0, role="meaning", bounds=NOT_NEGATIVE, excludes=("multi_latent_attention",)
    )
    """YaRN: multiply rotated queries at position p by 1 + this x ln(1 + p // --original-max-position-embeddings)."""

    def yarn_mscale(self, scale: float) -> float:
        """Return YaRN's mscale: 0.1 x ``scale`` x ln(``rotary_scaling_factor``) + 1, or 1 for a factor of at most 1."""
        factor = self.rotary_scaling_factor
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(Config):
    """Multi-token prediction (MTP); without ``mtp_num_layers`` the model predicts only the next token."""

    mtp_num_layers: int | None = flag(None, role="weights", bounds=POSITIVE, most=1000)
    """Multi-token prediction (MTP) modules, each predicting one more token in training."""
    mtp_loss_scaling_factor: float = flag(0.1, role="recipe", bounds=NOT_NEGATIVE, needs="mtp_num_layers")
    """Weight of the mean MTP loss."""

    @property
    def mtp_depth(self) -> int:
        return self.mtp_num_layers or 0


def further_loss_names(config: MTPConfig) -> tuple[str, ...]:
    """Return the log names of the MTP losses, in order of depth."""
    return tuple(f"mtp_{depth + 1}_loss" for depth in range(config.mtp_depth))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig(Config):
    """Multipliers of maximal update parametrization (muP); without ``use_mup`` none applies."""

    use_mup: bool = flag(False, role="meaning", in_args=False)
    """Scale initial values, learning rates and logits with the width (muP), so that the best learning rate does not
    depend on it."""
    mup_base_hidden_size: int | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        seen_as="width_multiplier",
        in_args=False,
    )
    """Hidden size of the base model, to which learning rates and --init-method-std refer."""
    mup_width_mult: float | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        seen_as="width_multiplier",
        in_args=False,
        excludes=("mup_base_hidden_size",),
    )
    """Ratio of the width to the base model's; by default --hidden-size / --mup-base-hidden-size."""
    mup_embedding_mult: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="use_mup", in_args=False
    )
    """Multiplier of the embeddings."""
    mup_output_mult: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="use_mup", in_args=False
    )
    """Multiplier of the logits, which are also divided by the width ratio."""
    mup_base_head_dim: float | None = flag(
        None,
        role="meaning",
        excludes=("query_pre_attn_scalar", "softmax_scale"),
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        in_args=False,
    )
    """Head dimension of the base model, if different: attention scores are divided by a power of the head dimension,
    and at this value by its root."""
    mup_attn_scale_power: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="mup_base_head_dim", in_args=False
    )
    """Power of the head dimension with --mup-base-head-dim."""

    def width_multiplier_of(self, hidden_size: int) -> float:
        """Return the ratio of this width to the width of the muP base model."""
        if not self.use_mup:
            return 1.0
        if self.mup_width_mult is not None:
            return self.mup_width_mult
        return hidden_size / (self.mup_base_hidden_size or hidden_size)


INDEXER_LOSS = "indexer loss"
"""Log name of the loss of DSA's indexers."""

_BIASED = ("moe_router_enable_expert_bias", True)
INDEPENDENT_SCORES = ("sigmoid", "sqrtsoftplus")
"""Score functions of one logit each; the weights are normalized over the selected experts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(Config, in_args=False):
    """Mixture of experts (MoE); without ``num_experts`` every feed-forward layer is dense."""

    num_experts: int | None = flag(None, role="shape", bounds=POSITIVE)
    """Number of experts per MoE layer."""
    moe_layer_freq: str = flag("1", metavar="N", role="shape", needs="num_experts", seen_as="moe_layers")
    """Layers with experts: every Nth from the first on, or a list of 1 or 0 per layer: ([0]+[1]*3)*4."""
    moe_ffn_hidden_size: int = flag(0, role="shape", bounds=NOT_NEGATIVE, needs="num_experts")
    """Hidden size of an expert; by default --ffn-hidden-size."""
    moe_latent_size: int | None = flag(None, role="shape", bounds=POSITIVE, needs="num_experts")
    """Width of the routed experts' inputs and outputs, with a linear layer before the dispatch and one after the
    weighted sum (LatentMoE); by default --hidden-size. Router and shared expert read hidden states."""
    moe_shared_expert_intermediate_size: int | None = flag(None, role="shape", bounds=POSITIVE, needs="num_experts")
    """FFN hidden size of the shared expert, which processes every token; by default there is no shared expert."""
    moe_shared_expert_gate: bool = flag(False, role="shape", needs="moe_shared_expert_intermediate_size")
    """Gate the shared expert's output by one number per token."""
    moe_expert_norms: bool = flag(
        False,
        role="weights",
        needs="moe_shared_expert_intermediate_size",
        excludes=("hybrid_override_pattern", "apply_residual_connection_post_layernorm", "moe_latent_size"),
    )
    """Normalize the routed experts' input apart from the shared expert's, and both outputs before their sum. The router
    reads the residual stream."""
    moe_shared_expert_overlap: bool = flag(False, role="run", needs="moe_shared_expert_intermediate_size")
    """Compute the shared expert during token dispatch."""

    moe_router_topk: int = flag(2, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Number of experts per token."""
    moe_router_pre_softmax: bool = flag(False, role="meaning", needs="num_experts")
    """Apply the softmax over all experts, before the top-k, instead of over the selected experts."""
    moe_router_score_function: str = flag(
        "softmax",
        choices=("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"),
        role="meaning",
        needs="num_experts",
    )
    """Function from logits to scores; sigmoid and sqrtsoftplus (root of softplus) scores are normalized over the
    selected experts. sparsemixer: each selected expert's softmax over the experts that are not better and not much
    worse."""
    moe_router_sparsemixer_eps: float = flag(
        0.01,
        role="meaning",
        bounds=NOT_NEGATIVE,
        where=("moe_router_score_function", "sparsemixer"),
        needs="num_experts",
        in_args=False,
    )
    """SparseMixer: half the relative difference of logits beyond which an expert is much worse."""
    moe_router_num_groups: int | None = flag(None, role="meaning", bounds=POSITIVE, needs="moe_router_group_topk")
    """Equal groups of experts for group-limited routing."""
    moe_router_group_topk: int | None = flag(None, role="meaning", bounds=POSITIVE, needs="moe_router_num_groups")
    """Groups per token: those whose best experts have the largest sum of scores."""
    moe_router_group_score_topk: int | None = flag(
        None, role="meaning", bounds=POSITIVE, needs="moe_router_group_topk", seen_as="experts_that_rank_a_group"
    )
    """Best experts whose scores rank a group; by default --moe-router-topk / --moe-router-group-topk."""
    moe_router_topk_scaling_factor: float | None = flag(None, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Multiply the weights of the selected experts by this factor."""
    moe_router_norm: bool = flag(False, role="weights", needs="num_experts")
    """Normalize the router's input without parameters, and multiply it by a learned vector / square root of the hidden
    size."""
    moe_router_expert_scale: bool = flag(False, role="weights", needs="num_experts")
    """Multiply the weight of a selected expert by a learned number per expert, initially 1."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), role="meaning", needs="num_experts")
    """Type of the router's GEMM and of expert weights until outputs are summed; by default the model's. Scores use
    float32 at least."""
    moe_router_enable_expert_bias: bool = flag(False, role="shape", needs="num_experts")
    """Select experts by scores plus a bias, updated after each step to balance the load."""
    moe_router_bias_update_rate: float = flag(1e-3, role="recipe", bounds=NOT_NEGATIVE, where=_BIASED)
    """Step size of the expert bias."""

    moe_router_force_load_balancing: bool = flag(False, role="recipe", needs="num_experts")
    """Route at random in training, for benchmarks under balanced load, the same at any layout; evaluation and
    generation use logits."""
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        role="recipe",
        needs="num_experts",
    )
    """Auxiliary load balancing loss: per micro-batch, per sequence, over the global batch so far, several of these, or
    none. sinkhorn instead balances the choices of each micro-batch in training by Sinkhorn's algorithm."""
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,), nargs="+", role="recipe", bounds=None, needs="num_experts", metavar="X"
    )
    """Coefficient of the auxiliary loss; one, or one per --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float | None = flag(None, role="recipe", bounds=NOT_NEGATIVE, needs="num_experts")
    """Coefficient of the router z-loss (squared log-sum-exp of logits)."""

    moe_expert_capacity_factor: float | None = flag(None, role="meaning", bounds=POSITIVE, needs="num_experts")
    """Drop an expert's tokens beyond this factor x balanced load per micro-batch; by default none."""
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), role="meaning", needs="moe_expert_capacity_factor"
    )
    """Tokens that a full expert keeps: the largest weights, or the first."""
    moe_pad_expert_input_to_capacity: bool = flag(False, role="run", needs="moe_expert_capacity_factor", in_args=False)
    """Pad the input of every expert to its capacity."""
    moe_token_dispatcher_type: str = flag(
        "allgather",
        choices=("allgather", "alltoall", "flex"),
        role="run",
        needs="num_experts",
    )
    """Dispatch of tokens to other ranks' experts: all-gather, all-to-all, or with flex DeepEP. Without CUDA
    or the package deep_ep, flex is alltoall."""
    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        choices=("deepep", "hybridep"),
        role="run",
        idle=idle_without("moe_token_dispatcher_type", value="flex"),
    )
    """Package that --moe-token-dispatcher-type flex uses. hybridep is alltoall: no HybridEP kernels."""
    moe_deepep_num_sms: int = flag(
        20,
        aliases=("--moe-flex-dispatcher-num-sms",),
        bounds=POSITIVE,
        role="run",
        idle=idle_without("moe_token_dispatcher_type", value="flex"),
    )
    """Multiprocessors of a GPU that DeepEP's kernels use; an even number."""

    @property
    def asks_for_deepep(self) -> bool:
        """Return whether DeepEP exchanges the tokens, if the device and the installed packages allow it."""
        return self.moe_token_dispatcher_type == "flex" and self.moe_flex_dispatcher_backend == "deepep"

    @property
    def routes_by_sinkhorn(self) -> bool:
        """Return whether Sinkhorn's algorithm chooses the experts in training."""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def group_score_topk(self) -> int | None:
        """Return the number of best experts whose scores rank a group; None without group-limited routing."""
        if self.moe_router_group_topk is None:
            return None
        return self.moe_router_group_score_topk or max(self.moe_router_topk // self.moe_router_group_topk, 1)

    @property
    def moe_aux_losses(self) -> dict[str, float]:
        """Return the coefficient of each load-balancing auxiliary loss."""
        names = [name for name in self.moe_router_load_balancing_type if name not in ("none", "sinkhorn")]
        coefficients = self.moe_aux_loss_coeff * (len(names) if len(self.moe_aux_loss_coeff) == 1 else 1)
        return {name: coefficient for name, coefficient in zip(names, coefficients) if coefficient}


def moe_layers(config: MoEConfig, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its feed-forward layer has experts.

    Raises:
        ValueError: --moe-layer-freq is invalid; the message gives the reason.
    """
    if config.num_experts is None:
        return (False,) * num_layers
    return _chosen_layers(config.moe_layer_freq.strip(), num_layers)


# Cached because a search for the fastest layout evaluates the same patterns thousands of times.
@functools.lru_cache(maxsize=64)
def _chosen_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Parse a list of layers, or a number N, which means every Nth layer from the first on."""
    if text.isdecimal() and int(text) > 0:
        return tuple(layer % int(text) == 0 for layer in range(num_layers))
    return parse_layer_pattern(text, num_layers)


GATED_ACTIVATIONS = ("swiglu", "geglu", "quick_geglu")
_PLAIN_ACTIVATIONS = ("squared_relu", "xielu")
"""Activations with a flag of the same name; without any of these flags the activation is GELU."""
_ACTIVATION_SWITCHES = (*GATED_ACTIVATIONS, *_PLAIN_ACTIVATIONS, "openai_gelu")
_FLAG_OF_ACTIVATION = {
    **{name: (name, True) for name in (*GATED_ACTIVATIONS, *_PLAIN_ACTIVATIONS)},
    "gelu": ("bias_gelu_fusion", False),
    "gelu_tanh": ("openai_gelu", True),
}
"""Field and value that --activation-func sets for each built-in activation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ParallelConfig, in_args=True):
    """Configuration of a transformer layer and of a stack of such layers.

    The fields of muP, MLA, rotary positions, MTP, MoE, FP8 and hybrid models are in nested groups. ``ffn_hidden_size``,
    ``kv_channels`` and ``num_query_groups`` default to 0. ``__post_init__`` then derives their real values.
    """

    softmax_type: str = flag("vanilla", choices=("vanilla", "off-by-one", "learnable"), role="shape", listed_first=True)
    """Denominator of the attention softmax: the sum of exponentials, plus 1 (off-by-one), or plus the exponential of a
    learned sink per head (learnable)."""
    no_rope_freq: str | None = flag(
        None, metavar="N", role="meaning", seen_as="layers_without_rotary", in_args=False, listed_first=True
    )
    """Layers without rotary embedding: every Nth, or a list with 1 for such layers, else 0: ([0]*3+[1])*4."""

    mup: MupConfig = group(MupConfig)
    mla: MLAConfig = group(MLAConfig)
    rope: RotaryConfig = group(RotaryConfig)
    mtp: MTPConfig = group(MTPConfig)
    moe: MoEConfig = group(MoEConfig)
    fp8: Fp8Config = group(Fp8Config)
    hybrid: HybridConfig = group(HybridConfig)

    num_layers: int = flag(role="weights", bounds=POSITIVE, most=100_000)
    """Number of transformer layers."""
    hidden_size: int = flag(role="shape", bounds=POSITIVE)
    """Hidden size of the model."""
    num_attention_heads: int = flag(role="shape", bounds=POSITIVE)
    """Number of attention heads."""
    ffn_hidden_size: int = flag(0, aliases=("--intermediate-size",), role="shape", bounds=NOT_NEGATIVE)
    """Feed-forward hidden size; by default 4 x hidden size, or 2/3 of that, in steps of 64, with SwiGLU."""
    kv_channels: int = flag(0, role="shape", bounds=NOT_NEGATIVE)
    """Dimension of an attention head; by default hidden size / number of heads."""
    group_query_attention: bool = flag(False, role="meaning", seen_as="num_query_groups")
    """Use grouped-query attention (GQA)."""
    num_query_groups: int = flag(0, role="shape", bounds=POSITIVE)
    """Number of key/value heads with GQA (1 if only --group-query-attention is given)."""
    global_kv_channels: int | None = flag(
        None,
        role="shape",
        bounds=POSITIVE,
        needs="window_size",
        excludes=("multi_latent_attention", "qk_clip"),
        in_args=False,
    )
    """Dimension of an attention head in layers without a window; by default --kv-channels."""
    global_num_query_groups: int | None = flag(
        None,
        role="shape",
        bounds=POSITIVE,
        needs="window_size",
        excludes=("multi_latent_attention", "qk_clip"),
        in_args=False,
    )
    """Number of key/value heads in layers without a window; by default --num-query-groups."""
    attention_k_eq_v: bool = flag(
        False,
        role="shape",
        excludes=("multi_latent_attention", "qk_clip", "attention_output_gate", "attention"),
        in_args=False,
    )
    """Use keys, before their norm and rotary embedding, as values too, in layers without a window."""
    attention_head_type: str = flag(
        "multihead", choices=("multihead", "multiquery"), role="meaning", in_args=False, seen_as="num_query_groups"
    )
    """Separate keys and values per head, or shared (same as --group-query-attention alone)."""

    attention: str = flag(
        "self_attention", choices=("self_attention",), registry="attention", role="shape", in_args=False
    )
    """Attention module: multi-head self-attention (MLA too), or one that a script registered."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"), registry="normalization", role="shape")
    """Type of normalization; a script can register others."""
    norm_epsilon: float = flag(
        1e-5,
        aliases=("--layernorm-epsilon",),
        role="meaning",
        bounds=POSITIVE,
        in_args=("layernorm_epsilon", "norm_epsilon"),
    )
    """Epsilon added to the variance in normalization."""
    apply_layernorm_1p: bool = flag(
        False, role="shape", in_args=("layernorm_zero_centered_gamma", "apply_layernorm_1p")
    )
    """Store the normalization weight minus one (zero-centered gamma)."""
    norm_parameters: str = flag(
        "all", choices=("all", "weight", "none"), role="weights", in_args=False, seen_as="norm_parameter_names"
    )
    """Learned parameters of norms: weight, and bias with LayerNorm (all), weight only, or none."""
    qk_layernorm: bool = flag(False, role="weights")
    """Normalize queries and keys, per head."""
    v_layernorm: bool = flag(
        False,
        role="meaning",
        excludes=("multi_latent_attention", "attention_output_gate", "attention"),
        in_args=False,
    )
    """Normalize values, per head, without learned parameters."""
    qk_layernorm_after_rope: bool = flag(
        False,
        role="meaning",
        needs="qk_layernorm",
        excludes=("multi_latent_attention", "attention_output_gate"),
        in_args=False,
    )
    """Normalize queries and keys after their rotary embedding, instead of before."""
    qk_layernorm_across_heads: bool = flag(False, role="shape", needs="qk_layernorm", in_args=False)
    """Normalize all query heads together, and all key heads."""
    qk_layernorm_per_head: bool = flag(
        False,
        role="shape",
        needs="qk_layernorm",
        excludes=("qk_layernorm_across_heads", "multi_latent_attention"),
        in_args=False,
    )
    """Normalize queries and keys with weights of their own per head, without biases."""
    attention_output_gate: bool = flag(
        False, role="shape", excludes=("multi_latent_attention", "lora_rank", "attention")
    )
    """Gate the attention output by the sigmoid of a projection of the input, before the output projection."""
    norm_placement: str = flag(
        "pre",
        deprecated_values=(("before", "pre"), ("after", "post"), ("both", "sandwich")),
        choices=("pre", "post", "sandwich"),
        role="shape",
        in_args=False,
    )
    """Norms before attention and feed-forward (pre), after them, before the residual sum (post), or both (sandwich)."""

    apply_residual_connection_post_layernorm: bool = flag(False, role="meaning", excludes=("use_parallel_residual",))
    """Use the norms' output as the residual, instead of their input."""
    use_parallel_residual: bool = flag(False, role="meaning", in_args=False)
    """Add attention and feed-forward to the same hidden states, in parallel."""
    shared_parallel_norm: bool = flag(False, role="weights", needs="use_parallel_residual", in_args=False)
    """Use one norm for attention and feed-forward, instead of one each."""
    residual_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, in_args=False)
    """Multiplier of the outputs of attention and feed-forward before the residual sum."""
    layer_scalar: bool = flag(False, role="weights", excludes=("hybrid_override_pattern",), in_args=False)
    """Multiply the output of each layer by a learned number, initially 1."""
    attn_logit_softcapping: float | None = flag(None, role="meaning", bounds=POSITIVE, in_args=False)
    """Soft-cap attention scores at this value with tanh; fused kernels: only flash-attn and FlexAttention on CUDA."""
    query_pre_attn_scalar: int | None = flag(
        None, role="meaning", bounds=POSITIVE, seen_as="score_scale", in_args=False, excludes=("softmax_scale",)
    )
    """Divide attention scores by the square root of this number; by default of the head dimension."""
    num_kv_shared_layers: int = flag(
        0,
        role="shape",
        bounds=NOT_NEGATIVE,
        excludes=(
            *("multi_latent_attention", "attention_output_gate", "attention", "qk_clip", "lora_rank"),
            *("experimental_attention_variant", "hybrid_override_pattern", "mtp_num_layers"),
        ),
        in_args=False,
    )
    """Last layers without keys and values of their own: each uses the keys and values of the last other layer with the
    same window and rotary embedding."""
    use_double_wide_mlp: bool = flag(False, role="shape", needs="num_kv_shared_layers", in_args=False)
    """Double --ffn-hidden-size in the layers of --num-kv-shared-layers."""
    hidden_size_per_layer_input: int = flag(
        0,
        role="shape",
        bounds=NOT_NEGATIVE,
        excludes=(
            *("experimental_attention_variant", "hybrid_override_pattern", "mtp_num_layers"),
            *("lora_rank", "fp8_format", "fp4_format", "use_mup"),
        ),
        in_args=False,
    )
    """Width of per-layer input embeddings: each layer adds a branch that multiplies a separate embedding of the input
    token; 0 for none. Its gate has the activation of the gated feed-forward."""
    softmax_scale: float | None = flag(None, role="meaning", bounds=POSITIVE, seen_as="score_scale", in_args=False)
    """Multiply attention scores by this number; by default by 1 / square root of the head dimension."""
    clip_qkv: float | None = flag(
        None, role="meaning", bounds=POSITIVE, in_args=False, excludes=("attention_output_gate",)
    )
    """Clip queries, keys and values to this absolute value after their projection."""
    qk_clip: bool = flag(False, role="recipe", excludes=("clip_qkv", "lora_rank", "attention"))
    """QK-clip (MuonClip): scale query and key weights after an update if a head's logits exceeded a threshold."""
    qk_clip_alpha: float = flag(0.5, role="recipe", bounds=FRACTION, needs="qk_clip")
    """Exponent of the factor of query weights; the exponent of the key weights is 1 minus it."""
    qk_clip_threshold: float = flag(100.0, role="recipe", bounds=POSITIVE, needs="qk_clip")
    """Largest attention logit that is not clipped."""
    window_size: str | None = flag(None, metavar="N,0", role="meaning", seen_as="layer_windows", in_args=False)
    """Sliding window: a query attends to its own position and the N before it only."""
    window_attn_skip_freq: str | None = flag(
        None, role="meaning", needs="window_size", seen_as="layer_windows", in_args=False
    )
    """Layers with the window: N excludes every Nth, a list has 1 or 0 per layer: ([1]*5+[0])*4; by default all."""

    activation_func: str | None = flag(
        None,
        choices=(*_FLAG_OF_ACTIVATION, "relu"),
        registry="activation",
        role="shape",
        excludes=_ACTIVATION_SWITCHES,
        in_args=False,
        seen_as="activation",
    )
    """Activation by name: one that a script registered, relu, or another built-in one, for which this is the same as
    its flag."""
    swiglu: bool = flag(False, role="shape", excludes=("squared_relu", "openai_gelu"), seen_as="activation")
    """Use the SwiGLU activation."""
    geglu: bool = flag(False, role="shape", excludes=("swiglu", "squared_relu"), seen_as="activation", in_args=False)
    """Use the GEGLU activation (tanh form of GELU)."""
    quick_geglu: bool = flag(
        False, role="shape", excludes=("swiglu", "geglu", "squared_relu", "openai_gelu"), seen_as="activation"
    )
    """Use the gated activation with x * sigmoid(1.702 x)."""
    glu_linear_offset: float = flag(0.0, role="meaning")
    """Offset added to the linear part of a gated activation."""
    activation_func_clamp_value: float | None = flag(None, role="meaning", bounds=POSITIVE)
    """Clamp a gated activation's gate input from above, and its linear part on both sides, at this value."""
    mlp_gate_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, excludes=("num_experts",), in_args=False)
    """Multiplier of the gate of a gated FFN layer before its activation."""
    mlp_output_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, excludes=("num_experts",), in_args=False)
    """Multiplier of the output of FFN layers."""
    squared_relu: bool = flag(False, role="meaning", excludes=("openai_gelu",), seen_as="activation")
    """Use the squared ReLU activation."""
    openai_gelu: bool = flag(False, role="meaning", seen_as="activation")
    """Use the tanh form of GELU."""
    xielu: bool = flag(
        False,
        role="weights",
        excludes=(*GATED_ACTIVATIONS, "squared_relu", "openai_gelu", "num_experts"),
        seen_as="activation",
        in_args=False,
    )
    """Use the xIELU activation, whose two slopes are learned per layer."""
    bias_gelu_fusion: bool = flag(True, negative="--no-bias-gelu-fusion", role="meaning", seen_as="activation")
    """Use the tanh form of GELU, as the fused kernel does. Off: use the exact GELU, not the tanh form, unless
    --openai-gelu is given."""
    gemm_activation_fusion: bool = flag(
        False,
        role="run",
        excludes=("num_experts", "lora_rank", "fp8_format", "fp4_format", "tp_comm_overlap"),
        in_args=False,
    )
    """Compute GELU or squared ReLU, and its derivative, in the Triton GEMMs of the feed-forward's linear layers; needs
    CUDA and Triton. Transformer Engine: NVTE_GEMM_GELU_FUSION."""
    add_bias_linear: bool = flag(True, negative="--disable-bias-linear", role="weights")
    """Add biases to the linear layers. Off: use linear layers without biases."""
    add_qkv_bias: bool = flag(False, role="weights", seen_as="has_qkv_bias")
    """Add a bias to the QKV projection even if the other linear layers have none."""
    disable_qkv_bias: bool = flag(
        False, role="weights", excludes=("add_qkv_bias",), seen_as="has_qkv_bias", in_args=False
    )
    """Use no bias in the QKV projection even if the other linear layers have one."""
    disable_proj_bias: bool = flag(
        False, role="weights", idle=idle_with("add_bias_linear", False), seen_as="has_proj_bias", in_args=False
    )
    """Use no bias in attention's output projection even if the other linear layers have one."""
    add_proj_bias: bool = flag(
        False,
        role="weights",
        excludes=("disable_proj_bias",),
        idle=idle_without("add_bias_linear", value=False),
        seen_as="has_proj_bias",
        in_args=False,
    )
    """Add a bias to attention's output projection even if the other linear layers have none."""

    hidden_dropout: float = flag(0.1, role="recipe", bounds=BELOW_ONE)
    """Dropout of the hidden states."""
    embedding_dropout: float | None = flag(None, role="recipe", bounds=BELOW_ONE, in_args=False)
    """Dropout of the embeddings; by default --hidden-dropout."""
    attention_dropout: float = flag(0.1, role="recipe", bounds=BELOW_ONE)
    """Dropout of the attention weights."""
    attention_backend: str = flag(
        "auto", choices=("auto", "flash", "fa3", "fa4", "fused", "unfused", "local"), role="run", in_args=False
    )
    """Attention kernel: auto uses the fastest available, flash-attn first; flash also FlashAttention 3 and 4 through
    torch, which fa3 and fa4 require; fused only torch's; unfused and local the reference (logged)."""
    use_flash_attn: bool = flag(False, role="run", in_args=False)
    """Same as --attention-backend flash: auto, but logs if flash-attn is not used."""

    transformer_impl: str = flag(
        "local",
        choices=("transformer_engine", "local"),
        not_built=("inference_optimized",),
        role="run",
        in_args=False,
    )
    """Kernels: local is this project's choice; transformer_engine takes that package's attention (with
    --attention-backend auto) and norms, with --bf16 or --fp16 on CUDA, and logs if it cannot. Linear layers, FP8 too,
    are this project's."""

    init_method_std: float = flag(0.02, role="run", bounds=NOT_NEGATIVE)
    """Standard deviation of initial weights; / sqrt(2 x layers) at the end of residual branches."""

    recompute_activations: bool = flag(False, role="run", in_args=False)
    """Recompute attention (same as --recompute-granularity selective)."""
    recompute_granularity: str | None = flag(None, choices=("selective", "full"), role="run")
    """Activation recomputation (gradient checkpointing): modules of a layer (selective) or whole layers (full)."""
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        nargs="+",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"),
        role="run",
        in_args=False,
    )
    """Modules of selective recomputation: core_attn (the default), layernorm (norms before attention and feed-forward),
    mlp (dense), moe (expert feed-forward), moe_act (expert activation), shared_experts, mla_up_proj (MLA queries, keys,
    values)."""
    moe_layer_recompute: bool = flag(False, role="run", needs="num_experts", in_args=False)
    """Add moe to --recompute-modules, with --recompute-granularity selective."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"), role="run")
    """Full recomputation: layers in groups (uniform), or the first layers of a stage (block)."""
    recompute_num_layers: int | None = flag(None, role="run", bounds=POSITIVE, most=100_000)
    """Full recomputation: layers per group (uniform), or per stage (block)."""
    distribute_saved_activations: bool = flag(False, role="run", in_args=False)
    """Full recomputation: shard saved activations over tensor-parallel ranks."""
    cpu_offloading: bool = flag(False, role="run", in_args=False)
    """Offload saved activations of each stage's first layers to host memory."""
    cpu_offloading_num_layers: int = flag(0, role="run", bounds=NOT_NEGATIVE, in_args=False)
    """Layers to offload per stage, the first ones."""
    cpu_offloading_activations: bool = flag(True, negative="--no-cpu-offloading-activations", role="run", in_args=False)
    """Offload activations with --cpu-offloading. Off: keep activations on the device."""
    cpu_offloading_weights: bool = flag(False, role="run", needs="cpu_offloading", in_args=False)
    """Offload the weights of these layers too, while unused."""

    lora_rank: int = flag(0, role="recipe", bounds=NOT_NEGATIVE, most=2**24, in_args=False)
    """Train only low-rank adapters of this rank (LoRA); 0 trains the model."""
    lora_alpha: float = flag(16.0, role="recipe", bounds=POSITIVE, needs="lora_rank", in_args=False)
    """Multiply the LoRA adapters' output by this number / rank."""
    lora_target_modules: tuple[str, ...] = flag(
        (), nargs="+", metavar="NAME", role="recipe", needs="lora_rank", in_args=False, seen_as="adapted_parts"
    )
    """Layers with LoRA adapters: linear_qkv linear_proj linear_fc1 linear_fc2 (the default), or Hugging Face's q_proj
    k_proj v_proj o_proj gate_proj up_proj down_proj, c_attn c_proj c_fc."""
    lora_dropout: float = flag(0.0, role="recipe", bounds=BELOW_ONE, needs="lora_rank", in_args=False)
    """Dropout of the LoRA adapters' inputs."""
    lora_base_quantization: str | None = flag(
        None, choices=("nf4", "fp4"), role="recipe", needs="lora_rank", in_args=False
    )
    """Keep the frozen weights of linear layers in 4 bits with LoRA (QLoRA): NormalFloat (nf4) or floating point (fp4)
    levels, in blocks of 64."""
    lora_double_quantization: bool = flag(
        True, negative="--no-lora-double-quantization", role="recipe", needs="lora_base_quantization", in_args=False
    )
    """Quantize the scales of 4-bit blocks to 8 bits. Off: keep the scales of 4-bit blocks in float32."""

    def __post_init__(self) -> None:
        """Derive the fields that depend on others."""
        super().__post_init__()
        if self.activation_func in _FLAG_OF_ACTIVATION and not any(map(self.__getattribute__, _ACTIVATION_SWITCHES)):
            object.__setattr__(self, *_FLAG_OF_ACTIVATION[self.activation_func])
            object.__setattr__(self, "activation_func", None)
        if self.ffn_hidden_size == 0:
            is_narrow = self.swiglu or self.geglu or (self.is_gated and self.activation_func is not None)
            object.__setattr__(self, "ffn_hidden_size", default_ffn_hidden_size(self.hidden_size, is_narrow))
        if self.moe.moe_ffn_hidden_size == 0 and self.moe.num_experts is not None:
            object.__setattr__(self, "moe", dataclasses.replace(self.moe, moe_ffn_hidden_size=self.ffn_hidden_size))
        if self.kv_channels == 0:
            object.__setattr__(self, "kv_channels", self.hidden_size // max(self.num_attention_heads, 1))
        if self.attention_head_type == "multiquery":
            object.__setattr__(self, "group_query_attention", True)
        if self.num_query_groups == 0:
            groups = 1 if self.group_query_attention else self.num_attention_heads
            object.__setattr__(self, "num_query_groups", groups)
        for name, own in (("global_kv_channels", "kv_channels"), ("global_num_query_groups", "num_query_groups")):
            if getattr(self, name) == getattr(self, own):
                object.__setattr__(self, name, None)
        if (self.recompute_activations or self.moe_layer_recompute) and self.recompute_granularity is None:
            object.__setattr__(self, "recompute_granularity", "selective")
        has_experts = self.moe.num_experts is not None
        adds_moe = self.moe_layer_recompute and has_experts and self.recompute_granularity != "full"
        if adds_moe and "moe" not in self.recompute_modules:
            object.__setattr__(self, "recompute_modules", (*self.recompute_modules, "moe"))
        if self.use_flash_attn and self.attention_backend == "auto":
            object.__setattr__(self, "attention_backend", "flash")

    def of_layer(self, layer_number: int) -> Self:
        """Return the configuration with the shape of one layer's attention: of its heads, query groups and values.

        Raises:
            ValueError: --window-size or --window-attn-skip-freq is invalid; the message gives the reason.
        """
        return self.of_global_layers if self.is_global(layer_number) else self.of_windowed_layers

    def is_global(self, layer_number: int) -> bool:
        """Return whether a layer has no window, if layers without a window have another shape of attention.

        Raises:
            ValueError: --window-size or --window-attn-skip-freq is invalid; the message gives the reason.
        """
        return self.has_global_shape and self.layer_windows[self.kind_of(layer_number)] is None

    @property
    def has_global_shape(self) -> bool:
        """Return whether the attention of layers without a window has a shape of its own."""
        return (self.global_kv_channels, self.global_num_query_groups, self.attention_k_eq_v) != (None, None, False)

    @functools.cached_property
    def of_windowed_layers(self) -> Self:
        """Return the configuration with the shape of attention in layers with a window."""
        if not self.has_global_shape:
            return self
        return dataclasses.replace(self, global_kv_channels=None, global_num_query_groups=None, attention_k_eq_v=False)

    @functools.cached_property
    def of_global_layers(self) -> Self:
        """Return the configuration with the shape of attention in layers without a window."""
        if self.global_kv_channels is None and self.global_num_query_groups is None:
            return self
        return dataclasses.replace(
            self,
            kv_channels=self.global_kv_channels or self.kv_channels,
            num_query_groups=self.global_num_query_groups or self.num_query_groups,
            global_kv_channels=None,
            global_num_query_groups=None,
        )

    @property
    def attention_shapes(self) -> tuple[Self, ...]:
        """Return the configuration with each shape of attention that layers have.

        Raises:
            ValueError: --window-size or --window-attn-skip-freq is invalid; the message gives the reason.
        """
        if not self.has_global_shape:
            return (self,)
        kinds = {window is not None for window in self.layer_windows}
        return tuple(self.of_windowed_layers if has_window else self.of_global_layers for has_window in sorted(kinds))

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Return the parts of a layer that selective recomputation recomputes; empty for full recomputation."""
        return self.recompute_modules if self.recompute_granularity == "selective" else ()

    @property
    def num_offloaded_layers(self) -> int:
        """Return the number of first layers of each model chunk whose saved activations are offloaded."""
        return self.cpu_offloading_num_layers if self.cpu_offloading else 0

    def may_keep_quantized_weights(self, *, shards_weights: bool, uses_cuda_graphs: bool) -> bool:
        """Return whether FP8 and NVFP4 weights may be kept: weights stay in memory, and no CUDA graph casts them."""
        return not (shards_weights or uses_cuda_graphs or self.cpu_offloading_weights)

    @property
    def activation(self) -> str:
        """Return the activation: a registered name, the name of its flag, or gelu_tanh or gelu (the exact form)."""
        if self.activation_func is not None:
            return self.activation_func
        chosen = next((name for name in (*GATED_ACTIVATIONS, *_PLAIN_ACTIVATIONS) if getattr(self, name)), None)
        return chosen or ("gelu_tanh" if self.bias_gelu_fusion or self.openai_gelu else "gelu")

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether its feed-forward layer has experts.

        Raises:
            ValueError: --moe-layer-freq or --hybrid-override-pattern is invalid; the message gives the reason.
        """
        if self.hybrid.hybrid_override_pattern is not None:
            return tuple(parts.feed_forward == MOE for parts in self.layer_parts)
        return moe_layers(self.moe, self.num_layers)

    @property
    def expert_input_size(self) -> int:
        """Return the width of the routed experts' inputs and outputs."""
        return self.moe.moe_latent_size or self.hidden_size

    @property
    def experts_that_rank_a_group(self) -> int | None:
        """Return the number of best experts whose scores rank a group; None without group-limited routing."""
        return self.moe.group_score_topk

    @property
    def epsilon_of_latent_norms(self) -> float:
        return self.norm_epsilon if self.mla.latent_norm_epsilon is None else self.mla.latent_norm_epsilon

    @property
    def layer_parts(self) -> tuple[LayerParts, ...]:
        """Return for each layer the kinds of its sequence mixer and of its feed-forward.

        Raises:
            ValueError: --hybrid-override-pattern or another pattern is invalid; the message gives the reason.
        """
        has_pattern = self.hybrid.hybrid_override_pattern is not None
        return layer_parts(self.hybrid, self.num_layers, () if has_pattern else self.moe_layers)

    @property
    def hybrid_layers(self) -> str:
        """Return the symbols of the parts of every layer of a hybrid model, empty if every layer has attention.

        Raises:
            ValueError: --hybrid-override-pattern or another pattern is invalid; the message gives the reason.
        """
        return format_layers(self.layer_parts) if self.hybrid.is_hybrid else ""

    @property
    def has_sparse_attention(self) -> bool:
        """Return whether every layer has DeepSeek sparse attention (DSA)."""
        return self.hybrid.experimental_attention_variant == SPARSE_ATTENTION

    @property
    def layers_with_indexer(self) -> tuple[bool, ...]:
        """Return for each layer whether it has an indexer of DSA; MTP modules always have their own.

        Raises:
            ValueError: --dsa-indexer-layer-freq is invalid; the message gives the reason.
        """
        if not self.has_sparse_attention:
            return (False,) * self.num_layers
        return _chosen_layers(self.mla.dsa_indexer_layer_freq.strip(), self.num_layers)

    def has_indexer(self, layer_number: int) -> bool:
        """Return whether a layer has an indexer; layers from ``num_layers`` on belong to the MTP modules."""
        return self.has_sparse_attention and (layer_number >= self.num_layers or self.layers_with_indexer[layer_number])

    @property
    def layers_without_rotary(self) -> tuple[bool, ...]:
        """Return for each layer whether it has no rotary position embedding (NoPE).

        Raises:
            ValueError: --no-rope-freq is invalid; the message gives the reason.
        """
        return without_rotary(self.no_rope_freq, self.num_layers)

    @property
    def has_sinks(self) -> bool:
        return self.softmax_type != "vanilla"

    @property
    def is_gated(self) -> bool:
        if self.activation_func is not None and is_registered("activation", self.activation_func):
            return bool(find_registered("activation", self.activation_func).properties["gated"])
        return self.activation in GATED_ACTIVATIONS

    @property
    def has_dropout(self) -> bool:
        """Return whether training uses any dropout."""
        of_layers = self.hidden_dropout > 0.0 or self.attention_dropout > 0.0 or self.lora_dropout > 0.0
        return of_layers or self.dropout_of_embeddings > 0.0

    @property
    def dropout_of_embeddings(self) -> float:
        return self.hidden_dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def draws_by_sample(self) -> bool:
        """Return whether training draws random numbers per sample: for dropout, routing or stochastic rounding."""
        return self.has_dropout or self.routes_at_random or self.fp8.fp4_format is not None

    @property
    def routes_at_random(self) -> bool:
        return self.moe.num_experts is not None and self.moe.moe_router_force_load_balancing

    @property
    def adapted_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts of each linear layer that have a low-rank adapter; empty without LoRA.

        Raises:
            ValueError: --lora-target-modules does not fit the model; the message gives the reason.
        """
        if not self.lora_rank:
            return {}
        return adapted_parts(self.lora_target_modules, self.is_gated, self.linear_layers)

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Return the names of the linear layers of the model, without MLA's layers.

        Raises:
            ValueError: a pattern of layers is invalid; the message gives the reason.
        """
        return linear_layers_of(self.layer_parts)

    @property
    def width_multiplier(self) -> float:
        """Return the ratio of the model's width to --mup-base-hidden-size; 1 without --use-mup."""
        return self.mup.width_multiplier_of(self.hidden_size)

    @property
    def stretches_positions(self) -> bool:
        """Return whether YaRN scales the rotary frequencies."""
        kind = self.rope.rope_type or ("yarn" if self.mla.multi_latent_attention else "rope")
        return kind == "yarn" and self.rope.rotary_scaling_factor != 1.0

    @property
    def attention_temperature(self) -> tuple[float, int] | None:
        """Return the growth of queries with the position, and the length at which it starts; None without growth."""
        beta = self.rope.attention_temperature_beta
        return (beta, self.rope.original_max_position_embeddings) if beta else None

    @property
    def rotary_amplitude(self) -> float:
        """Return YaRN's factor for the rotary part of queries and keys."""
        if not self.stretches_positions:
            return 1.0
        return self.rope.yarn_mscale(self.rope.mscale) / self.rope.yarn_mscale(self.rope.mscale_all_dim)

    @property
    def latent_score_factor(self) -> float:
        """Return the factor of MLA scores, relative to division by the square root of the padded head width."""
        growth = self.rope.yarn_mscale(self.rope.mscale_all_dim)
        return growth * growth * math.sqrt(self.mla.latent_head_width / self.mla.latent_query_width)

    @property
    def scales_latent_scores(self) -> bool:
        """Return whether MLA scores grow with the scaling factor; this applies with ``rope_type`` rope too."""
        return self.mla.multi_latent_attention and self.rope.yarn_mscale(self.rope.mscale_all_dim) != 1.0

    @property
    def score_scalar(self) -> int:
        """Return the number whose square root divides the attention scores."""
        return self.kv_channels if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar

    @property
    def score_scale(self) -> float:
        """Return the number by which attention scores are multiplied."""
        return float(self.score_scalar**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def norm_parameter_names(self) -> tuple[str, ...]:
        """Return the names of the parameters of each norm of hidden states."""
        names = {"all": ("weight", "bias"), "weight": ("weight",), "none": ()}[self.norm_parameters]
        return names if self.normalization == "LayerNorm" else names[:1]

    @property
    def has_qkv_bias(self) -> bool:
        return (self.add_bias_linear and not self.disable_qkv_bias) or self.add_qkv_bias

    @property
    def has_proj_bias(self) -> bool:
        return (self.add_bias_linear and not self.disable_proj_bias) or self.add_proj_bias

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return for each layer how many keys a query attends to, its own position included; None is unlimited.

        Raises:
            ValueError: --window-size or --window-attn-skip-freq is invalid; the message gives the reason.
        """
        if self.window_size is None:
            return (None,) * self.num_layers
        window = parse_window(self.window_size)
        if self.window_attn_skip_freq is None:
            return (window,) * self.num_layers
        has_window = parse_layer_pattern(self.window_attn_skip_freq, self.num_layers)
        return tuple(window if has else None for has in has_window)

    @property
    def key_value_sources(self) -> tuple[int | None, ...]:
        """Return for each layer the layer whose keys and values it uses, or None if it has its own.

        Raises:
            ValueError: a pattern of layers is invalid, or a layer has no source; the message gives the reason.
        """
        if not self.num_kv_shared_layers:
            return (None,) * self.num_layers
        kinds = tuple(zip(self.layer_windows, self.layers_without_rotary, strict=True))
        return key_value_sources(kinds, self.num_kv_shared_layers)

    @property
    def shares_tensors(self) -> bool:
        """Return whether layers read more than hidden states: inputs of their own, or keys and values of others."""
        return bool(self.num_kv_shared_layers or self.hidden_size_per_layer_input)

    @property
    def shared_key_values(self) -> tuple[int, ...]:
        """Return the layers whose keys and values later layers use, too."""
        return tuple(sorted({source for source in self.key_value_sources if source is not None}))

    def ffn_size_of(self, layer_number: int) -> int:
        """Return the hidden size of a layer's dense feed-forward."""
        is_wide = self.use_double_wide_mlp and self.key_value_sources[self.kind_of(layer_number)] is not None
        return self.ffn_hidden_size * (2 if is_wide else 1)

    @property
    def query_projection_size(self) -> int:
        return self.kv_channels * self.num_attention_heads

    @property
    def gate_projection_size(self) -> int:
        """Return the width of the attention's output gates of all heads together, 0 without them."""
        return self.query_projection_size if self.attention_output_gate else 0

    @property
    def head_width(self) -> int:
        """Return the head width of queries, keys and values that attention kernels see."""
        if self.alibi_slopes is not None:
            return extended_head_width(self.kv_channels, self.params_dtype)
        return self.mla.latent_head_width if self.mla.multi_latent_attention else self.kv_channels

    @property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """Return the slope of each head's linear bias (ALiBi), or None without such biases."""
        return None

    @property
    def value_width(self) -> int:
        """Return the width of a head's value without padding."""
        return self.mla.v_head_dim if self.mla.multi_latent_attention else self.kv_channels

    @property
    def context_size(self) -> int:
        """Return the width of the attention output of all heads together."""
        return self.value_width * self.num_attention_heads

    @property
    def kv_projection_size(self) -> int:
        """Return the width of all key heads together, which is also the width of all value heads."""
        return self.kv_channels * self.num_query_groups

    @property
    def output_init_method_std(self) -> float:
        """Return the initial standard deviation of the layers that end a residual branch."""
        branches = 1.0 if self.hybrid.hybrid_override_pattern is not None else 2.0
        return float(self.init_method_std / (branches * self.num_layers) ** 0.5)

    @property
    def value_projection_size(self) -> int:
        """Return the width of the projection of all value heads together, 0 if keys are the values."""
        return 0 if self.attention_k_eq_v else self.kv_projection_size

    @property
    def attention_exchanges(self) -> frozenset[str]:
        """Return the context-parallel communication types of the layers with attention.

        Raises:
            ValueError: a pattern of layers is invalid; the message gives the reason.
        """
        types = self.cp_comm_type
        if len(types) != len(self.layer_parts):
            return frozenset(types)
        return frozenset(each for parts, each in zip(self.layer_parts, types, strict=True) if parts.has_attention)

    def kind_of(self, layer_number: int) -> int:
        """Return the layer whose per-layer settings apply.

        For an MTP layer it is the last layer of the model, or with --hybrid-override-pattern the last one with
        attention.
        """
        if layer_number >= self.num_layers and self.hybrid.hybrid_override_pattern is not None:
            attention = [number for number, parts in enumerate(self.layer_parts) if parts.has_attention]
            return attention[-1] if attention else self.num_layers - 1
        return min(layer_number, self.num_layers - 1)

    def parts_of(self, layer_number: int) -> LayerParts:
        """Return the kinds of a layer's sequence mixer and of its feed-forward.

        The layer of an MTP module has both: those of the last layer of the model, or with --hybrid-override-pattern
        attention and experts, or an MLP in a model without experts.

        Raises:
            ValueError: a pattern of layers is invalid; the message gives the reason.
        """
        if layer_number >= self.num_layers and self.hybrid.hybrid_override_pattern is not None:
            return LayerParts(ATTENTION, MLP if self.moe.num_experts is None else MOE)
        return self.layer_parts[self.kind_of(layer_number)]

    def has_experts(self, layer_number: int) -> bool:
        """Return whether a layer's feed-forward has experts; layers from ``num_layers`` on belong to MTP modules."""
        return self.parts_of(layer_number).feed_forward == MOE

    @property
    def float8_places(self) -> Fp8TensorIndex:
        """Return the index of the tensors for which delayed scaling keeps an amax history."""
        maps, further = self.mla.num_attention_maps, self.mtp.mtp_depth
        for kind in recurrent_kinds_of(self.layer_parts):
            maps = max(maps, kind.num_linear_layers)
        of_feed_forward = 2 if self.moe.moe_latent_size is None else 4
        return Fp8TensorIndex(
            self.num_layers + further, maps + of_feed_forward, self.moe.num_experts or 0, has_join=further > 0
        )

    def hidden_shape(self, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
        """Return the shape of the hidden states of one micro-batch on a rank."""
        tp = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return seq_length // self.context_parallel_size // tp, micro_batch_size, self.hidden_size

    def message_shape(self, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
        """Return the shape of the message of one micro-batch on a rank, which pipeline stages exchange."""
        return *self.hidden_shape(seq_length, micro_batch_size)[:2], sum(self.message_widths)

    @property
    def message_widths(self) -> tuple[int, ...]:
        """Return the widths of the parts of a message between pipeline stages.

        They are hidden states, the inputs of all layers by --hidden-size-per-layer-input, and the keys and values of
        each layer of `shared_key_values`.

        Raises:
            ValueError: a pattern of layers is invalid, or a layer has no source of keys and values.
        """
        tp, positions = self.tensor_model_parallel_size, self.positions_per_message_row
        sources = [self.of_layer(number) for number in self.shared_key_values]
        return (
            self.hidden_size,
            self.num_layers * self.hidden_size_per_layer_input,
            *(2 * own.kv_channels * max(own.num_query_groups // tp, 1) * positions for own in sources),
        )

    @property
    def positions_per_message_row(self) -> int:
        """Return the number of positions whose keys and values are in one row of a message.

        Under sequence parallelism a rank has the hidden states of a part of the positions, but all keys and values of
        its heads.
        """
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    def forward_flops_per_sequence(self, seq_length: int) -> float:
        """Return the FLOPs of one forward pass over one sequence; a multiply-add counts as two.

        Only matmuls are counted: norms, activations and embedding lookups together are far below one percent. Narayanan
        et al. 2021, https://arxiv.org/abs/2104.04473.
        """
        layers = range(self.num_layers + self.mtp.mtp_depth)
        return sum(sum(self.layer_forward_flops(number, seq_length)) for number in layers)

    def layer_forward_flops(self, layer_number: int, seq_length: int) -> tuple[float, float]:
        """Return the forward FLOPs of one layer for one sequence: of its GEMMs, and of core attention.

        Layers from ``num_layers`` on belong to the MTP modules. For causal attention only the used half of the score
        matrix counts, and only the part inside the window if there is a window.
        """
        own, hidden = self.of_layer(layer_number), self.hidden_size
        queries, keys_and_values = own.query_projection_size, own.kv_projection_size + own.value_projection_size
        if self.key_value_sources[self.kind_of(layer_number)] is not None:
            keys_and_values = 0
        gemms, of_scores = hidden * (2 * queries + own.gate_projection_size + keys_and_values), 2 * queries
        if self.mla.multi_latent_attention:
            gemms = self.mla.latent_projections(hidden, self.num_attention_heads)
            of_scores = self.num_attention_heads * (self.mla.latent_query_width + self.mla.v_head_dim)
        kind = self.kind_of(layer_number)
        parts = self.parts_of(layer_number)
        window = min(self.layer_windows[kind] or seq_length, seq_length)
        if self.has_sparse_attention:
            window = min(window, self.mla.dsa_indexer_topk or seq_length)
        core = of_scores * window * (1 - window / seq_length / 2)
        if is_registered("attention", self.attention):
            gemms += find_registered("attention", self.attention).properties["multiply_adds"](own)
        if self.has_indexer(layer_number):
            of_indexer = self.mla.indexer_multiply_adds(hidden, seq_length)
            gemms, core = gemms + of_indexer[0], core + of_indexer[1]
        if not parts.has_attention:
            gemms, core = 0, 0.0
        if parts.recurrence is not None:
            gemms += parts.recurrence.gemm_multiply_adds(self.hybrid, hidden)
            core += parts.recurrence.recurrence_multiply_adds(self.hybrid, hidden)
        num_matrices = 3 if self.is_gated else 2
        if parts.feed_forward == MOE:
            # Routed experts (top-k), the shared expert, the router and the latent projections.
            routed = self.moe.moe_router_topk * self.moe.moe_ffn_hidden_size * self.expert_input_size
            shared = (self.moe.moe_shared_expert_intermediate_size or 0) * hidden
            gemms += (routed + shared) * num_matrices + hidden * (self.moe.num_experts or 0)
            gemms += 2 * hidden * (self.moe.moe_latent_size or 0)
        elif parts.feed_forward is not None:
            gemms += hidden * self.ffn_size_of(layer_number) * num_matrices
        # The layer's columns of the projection of the first hidden states, the gate, and the projection back.
        gemms += 3 * hidden * self.hidden_size_per_layer_input
        if layer_number >= self.num_layers:
            gemms += 2 * hidden * hidden
        return 2.0 * seq_length * gemms, 2.0 * seq_length * core


# Cached because a search for the fastest layout evaluates the same layers thousands of times.
@functools.lru_cache(maxsize=64)
def key_value_sources(kinds: tuple[Hashable, ...], num_shared: int) -> tuple[int | None, ...]:
    """Return for each layer the layer whose keys and values it uses, or None if it has its own.

    ``kinds`` has the properties of each layer that its source must share. The last ``num_shared`` layers have sources,
    which are the last layers before them of the same kinds.

    Raises:
        ValueError: a layer has no source; the message gives the reason.
    """
    first = len(kinds) - num_shared
    if first <= 0:
        raise ValueError(f"all of the {len(kinds)} layers would share keys and values; use at most {len(kinds) - 1}")
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    for number, kind in enumerate(kinds[first:], first):
        if kind not in last:
            raise ValueError(
                f"none of the first {first} layers has the window and rotary embedding of layer {number + 1}, so that "
                "it could use its keys and values; use a smaller number, or change --window-attn-skip-freq"
            )
    return (*(None,) * first, *(last[kind] for kind in kinds[first:]))


def default_ffn_hidden_size(hidden_size: int, is_narrow: bool) -> int:
    """Return Megatron's default width of the feed-forward layer."""
    if is_narrow:
        return int((4 * hidden_size * 2 / 3) / 64) * 64
    return 4 * hidden_size
