"""One transformer layer: attention and feed-forward, each on a residual branch."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys, Nvfp4Quantizers, RowKeys
from megatron.core.parallel_state import ExpertGroups
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.registry import find_registered
from megatron.core.tensor_parallel import LowRankAdapter, make_parameter, replicated_spec, saved_as_inputs
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.attention_and_mamba import AttentionAndMamba
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.dropout import HiddenDropout, require_keys
from megatron.core.transformer.gated_attention import GatedAttention
from megatron.core.transformer.hybrid_config import ATTENTION_AND_MAMBA, RECURRENT_KINDS
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.mamba_mixer import MambaMixer
from megatron.core.transformer.mlp import FeedForward
from megatron.core.transformer.moe import ExpertLayer
from megatron.core.transformer.multi_latent_attention import LatentAttention
from megatron.core.transformer.norm import (
    NormAhead,
    PostNormResidual,
    ResidualNorm,
    ResidualSum,
    add_branch,
    make_norm,
)
from megatron.core.transformer.per_layer_input import PerLayerBranch
from megatron.core.transformer.recurrent_mixer import RecurrentMixer
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.shared_attention import BorrowingAttention, SourceAttention
from megatron.core.transformer.shared_tensors import SharedTensors
from megatron.core.transformer.sparse_attention import SparseLatentAttention


def make_stream_norm(config: DecoderConfig, tp: Group, device: torch.device | str) -> ResidualNorm | ResidualSum:
    """Return the norm through which attention and feed-forward read the residual stream."""
    if config.norm_placement == "post":
        return ResidualSum()
    carries_norm = config.apply_residual_connection_post_layernorm
    norm = make_norm(config, tp, device, PostNormResidual if carries_norm else ResidualNorm)
    assert isinstance(norm, ResidualNorm)
    ends_with_bias = config.add_bias_linear and config.residual_multiplier == 1.0
    norm.sums_branch_grad = ends_with_bias and config.norm_placement == "pre"
    return norm


def make_attention(
    config: DecoderConfig,
    layer_number: int,
    tp: Group,
    device: torch.device | str,
    cp: Group | None,
) -> nn.Module:
    """Return the layer's attention or recurrence, called like `SelfAttention`; it returns a `LayerOutput`.

    Raises:
        ConfigurationError: --attention names a class that does not fit MLA, or has parameters without `ParamSpec`.
    """
    mixer, _ = config.parts_of(layer_number)
    if mixer in RECURRENT_KINDS:
        recurrent: type[RecurrentMixer] = pkgutil.resolve_name(RECURRENT_KINDS[mixer].layer)
        return recurrent(config, layer_number, tp, device, cp)
    attention = _make_self_attention(config, layer_number, tp, device, cp)
    if mixer == ATTENTION_AND_MAMBA:
        return AttentionAndMamba(config.hybrid, attention, MambaMixer(config, layer_number, tp, device, cp))
    return attention


def _make_self_attention(
    config: DecoderConfig, layer_number: int, tp: Group, device: torch.device | str, cp: Group | None
) -> nn.Module:
    latent, name = config.mla.multi_latent_attention, config.attention
    kind: Callable[..., nn.Module] = LatentAttention if latent else SelfAttention
    if config.has_sparse_attention:
        kind = SparseLatentAttention
    if config.attention_output_gate:
        kind = GatedAttention
    if config.key_value_sources[config.kind_of(layer_number)] is not None:
        kind = BorrowingAttention
    elif layer_number in config.shared_key_values:
        kind = SourceAttention
    if name == "self_attention":
        return kind(config, layer_number, tp, device, cp)
    module: nn.Module = find_registered("attention", name).value(config, layer_number, tp, device, cp)
    if isinstance(module, SelfAttention) and isinstance(module, LatentAttention) != latent:
        base = "LatentAttention" if latent else "SelfAttention"
        flag = "with" if latent else "without"
        raise ConfigurationError(f"--attention {name} must be a subclass of {base} {flag} --multi-latent-attention")
    for parameter_name, parameter in module.named_parameters():
        if not hasattr(parameter, "spec"):
            raise ConfigurationError(
                f"--attention {name}: parameter {parameter_name} has no ParamSpec; create it with a layer of "
                "megatron.core.tensor_parallel, or with make_parameter"
            )
    return module


def make_feed_forward(
    config: DecoderConfig,
    layer_number: int,
    tp: Group,
    device: torch.device | str,
    experts: ExpertGroups | None = None,
) -> nn.Module:
    """Return the configured feed-forward module, called like `FeedForward`; it returns a `LayerOutput`."""
    if config.has_experts(layer_number):
        return ExpertLayer(config, experts or ExpertGroups.like_dense(tp, None), device)
    width = config.ffn_size_of(layer_number)
    own = config if width == config.ffn_hidden_size else replace(config, ffn_hidden_size=width)
    return FeedForward(own, tp, device)


class TransformerLayer(nn.Module):
    """Compute ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; with parallel residuals both read the same ``x``,
    through one norm or one each.

    With ``apply_residual_connection_post_layernorm`` the norm's output is the residual stream. ``norm_placement`` puts
    norms before, after, or both before and after attention and feed-forward. Norms before them and the feed-forward
    layer are recomputed in the backward pass if configured. With ``layer_scalar`` the output of the layer is multiplied
    by a learned number.

    ``layer_number`` counts from 0 over the whole model.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    add_branch = staticmethod(add_branch)

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
        experts: ExpertGroups | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self._add_parts(config, tp, device, cp, experts)
        self.layer_scalar: nn.Parameter | None = None
        if config.layer_scalar:
            spec = replicated_spec("layer_scalar", (1,), tp, config.sequence_parallel, mean=1.0)
            self.layer_scalar = make_parameter((1,), spec, dtype_from_name(config.params_dtype), device)
        self.is_parallel = config.use_parallel_residual
        self.residual_multiplier = config.residual_multiplier
        self.hidden_dropout = HiddenDropout(config.hidden_dropout)
        self.recomputes_norms = "layernorm" in config.recomputed_modules
        self.recomputes_mlp = (
            "moe" if isinstance(getattr(self, "mlp", None), ExpertLayer) else "mlp"
        ) in config.recomputed_modules
        self.adapters: tuple[LowRankAdapter, ...] = ()
        self.keyed_quantizers: tuple[Nvfp4Quantizers, ...] = ()
        """Quantizers of this layer that round stochastically, and of the MTP module whose layer this is."""

    def _add_parts(
        self,
        config: DecoderConfig,
        tp: Group,
        device: torch.device | str,
        cp: Group | None,
        experts: ExpertGroups | None,
    ) -> None:
        """Create the norms, the attention and the feed-forward, in the order of Megatron's files."""
        has_after = config.norm_placement != "pre"
        self.input_layernorm = make_stream_norm(config, tp, device)
        self.self_attention = make_attention(config, self.layer_number, tp, device, cp)
        self.post_self_attn_layernorm = make_norm(config, tp, device) if has_after else nn.Identity()
        self.shares_norm = config.shared_parallel_norm
        self.pre_mlp_layernorm = ResidualSum() if self.shares_norm else make_stream_norm(config, tp, device)
        self.mlp = make_feed_forward(config, self.layer_number, tp, device, experts)
        self.post_mlp_layernorm = make_norm(config, tp, device) if has_after else nn.Identity()
        self.per_layer_input = PerLayerBranch(config, tp, device) if config.hidden_size_per_layer_input else None

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
        ahead: NormAhead | None = None,
        padding_mask: torch.Tensor | None = None,
        shared: SharedTensors | None = None,
    ) -> LayerOutput:
        """Return the layer's output; ``ahead`` may contain its first norm, and receives the next layer's first norm.

        The layer reads from ``shared`` what it does not compute, and adds keys and values that later layers use. MoE
        layers ignore the positions of the whole sequences at which ``padding_mask: [b, s]`` is True.

        Raises:
            ConfigurationError: the layer uses dropout in training, and ``dropout`` is None.
        """
        attended_keys = fed_keys = None
        if self.hidden_dropout.is_active:
            keys = require_keys(dropout)
            attended_keys = keys.after_attention(self.layer_number)
            fed_keys = keys.after_feed_forward(self.layer_number)
        probability = self.hidden_dropout.probability
        self.hand_keys(dropout)
        x, normalized = self._first_norm(x, ahead)
        with self._recomputed(self.input_layernorm, x, normalized):
            more = (shared,) if isinstance(self.self_attention, SourceAttention) else ()
            attended, losses = self.self_attention(normalized, pattern, angles, cache, dropout, *more)
        branch = self._scaled(self.post_self_attn_layernorm(attended))
        if self.is_parallel:
            stream, normalized = (x, normalized) if self.shares_norm else self.pre_mlp_layernorm(x)
            x = self.add_branch(stream, branch, attended_keys, probability)
        else:
            x, normalized = self.pre_mlp_layernorm(x, branch, attended_keys, probability)
            stream = x
        norm = self.input_layernorm if self.shares_norm else self.pre_mlp_layernorm
        with self._recomputed(norm, stream, normalized):
            feed = partial(recompute, self._feed) if self.recomputes_mlp and self.training else self._feed
            fed, more_losses = feed(normalized, dropout, padding_mask, stream)
        branch = self._scaled(self.post_mlp_layernorm(fed))
        if self.per_layer_input is not None:
            assert shared is not None, "the model passes the inputs of all layers"
            x, fed_keys = self.add_branch(x, branch, fed_keys, probability), None
            branch = self.per_layer_input(x, shared.per_layer[self.layer_number])
        if self.layer_scalar is not None:
            x = self.add_branch(x, branch, fed_keys, probability) * self.layer_scalar
        else:
            x = self._add_last(x, branch, fed_keys, ahead)
        return LayerOutput(x, losses + more_losses)

    def _scaled(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier

    def _first_norm(self, x: torch.Tensor, ahead: NormAhead | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream and its first norm, which the previous layer may have computed."""
        if ahead is None or ahead.normalized is None:
            x, normalized = self.input_layernorm(x)
        else:
            normalized, ahead.normalized = ahead.normalized, None
        return x, normalized

    def _add_last(
        self, x: torch.Tensor, branch: torch.Tensor, keys: RowKeys | None, ahead: NormAhead | None
    ) -> torch.Tensor:
        """Add the layer's last branch, and give the next layer its first norm."""
        if ahead is None or ahead.following is None:
            return self.add_branch(x, branch, keys, self.hidden_dropout.probability)
        x, ahead.normalized = ahead.following(x, branch, keys, self.hidden_dropout.probability)
        return x

    def _feed(
        self,
        normalized: torch.Tensor,
        dropout: DropoutKeys | None,
        padding_mask: torch.Tensor | None,
        stream: torch.Tensor,
    ) -> LayerOutput:
        """Run the feed-forward layer; recomputation uses the same dropout keys."""
        self.hand_keys(dropout)
        output: LayerOutput
        if isinstance(self.mlp, ExpertLayer):
            output = self.mlp(normalized, padding_mask, stream if self.mlp.has_norms else None)
        else:
            output = self.mlp(normalized)
        return output

    def hand_keys(self, dropout: DropoutKeys | None) -> None:
        """Set the keys of the next forward pass in the modules that draw random numbers."""
        for adapter in self.adapters:
            adapter.keys = dropout
        for quantizers in self.keyed_quantizers:
            quantizers.keys = dropout
        feed_forward = getattr(self, "mlp", None)
        if isinstance(feed_forward, ExpertLayer) and feed_forward.config.routes_at_random:
            feed_forward.router.keys, feed_forward.router.layer_number = dropout, self.layer_number

    def _recomputed(
        self, norm: nn.Module, stream: torch.Tensor, normalized: torch.Tensor
    ) -> AbstractContextManager[None]:
        """Return a context in which a norm's output is recomputed instead of saved, if configured."""
        if not (self.recomputes_norms and self.training and isinstance(norm, ResidualNorm)):
            return nullcontext()
        return saved_as_inputs(normalized, norm.of_stream, stream)
