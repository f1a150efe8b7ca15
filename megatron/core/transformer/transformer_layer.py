"""One transformer layer: attention and feed-forward, each on a residual branch."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import DropoutKeys
from megatron.core.layer_output import LayerOutput
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dropout import HiddenDropout, require_keys
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.transformer_config import TransformerConfig


def make_norm(config: TransformerConfig, tp: Group, device: torch.device | str) -> Norm:
    """Return the configured normalisation of hidden states."""
    return Norm(
        config.normalization,
        config.hidden_size,
        config.norm_epsilon,
        tp,
        partial_gradient=config.sequence_parallel,
        centred_weight=config.apply_layernorm_1p,
        dtype=dtype_from_name(config.params_dtype),
        device=device,
    )


def make_attention(
    config: TransformerConfig,
    layer_number: int,
    tp: Group,
    device: torch.device | str,
    cp: Group | None,
) -> nn.Module:
    """Return the attention that a layer is configured with: called as `SelfAttention` is, it gives a `LayerOutput`."""
    return SelfAttention(config, layer_number, tp, device, cp)


def make_feed_forward(config: TransformerConfig, layer_number: int, tp: Group, device: torch.device | str) -> nn.Module:
    """Return the feed-forward that a layer is configured with: called as `MLP` is, it gives a `LayerOutput`."""
    return MLP(config, tp, device)


class TransformerLayer(nn.Module):
    """Apply ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; with parallel residuals both to the same ``x``.

    Norms may also stand behind attention and feed-forward, or there alone.

    ``layer_number`` counts from 0 over the whole model, whatever stage the layer is on.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        has_before, has_after = config.norm_placement != "after", config.norm_placement != "before"
        self.input_layernorm = make_norm(config, tp, device) if has_before else nn.Identity()
        self.self_attention = make_attention(config, layer_number, tp, device, cp)
        self.post_self_attn_layernorm = make_norm(config, tp, device) if has_after else nn.Identity()
        self.pre_mlp_layernorm = make_norm(config, tp, device) if has_before else nn.Identity()
        self.mlp = make_feed_forward(config, layer_number, tp, device)
        self.post_mlp_layernorm = make_norm(config, tp, device) if has_after else nn.Identity()
        self.is_parallel = config.use_parallel_residual
        self.adds_in_norm = has_before and not self.is_parallel
        self.hidden_dropout = HiddenDropout(config.hidden_dropout)

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        """Return the layer's output.

        Raises:
            ConfigurationError: the layer drops something in training, and is given no keys.
        """
        attended, losses = self.self_attention(self.input_layernorm(x), pattern, angles, cache, dropout)
        attended_keys = fed_keys = None
        if self.hidden_dropout.is_active:
            keys = require_keys(dropout)
            attended_keys = keys.after_attention(self.layer_number)
            fed_keys = keys.after_feed_forward(self.layer_number)
        branch = self.hidden_dropout(self.post_self_attn_layernorm(attended), attended_keys)
        if self.adds_in_norm:
            after, normalised = self.pre_mlp_layernorm(x, branch)
        else:
            after = x + branch
            normalised = self.pre_mlp_layernorm(x if self.is_parallel else after)
        fed, more_losses = self.mlp(normalised)
        return LayerOutput(after + self.hidden_dropout(self.post_mlp_layernorm(fed), fed_keys), losses + more_losses)
