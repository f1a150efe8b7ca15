"""Layers of --hybrid-override-pattern: one norm, and one mixer or feed-forward on a residual branch."""

from __future__ import annotations

from functools import partial

import torch

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.dropout import require_keys
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.norm import NormAhead
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.shared_tensors import SharedTensors
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    make_attention,
    make_feed_forward,
    make_stream_norm,
)


def make_layer(
    config: DecoderConfig,
    layer_number: int,
    tp: Group,
    device: torch.device | str,
    cp: Group | None = None,
    experts: ExpertGroups | None = None,
) -> TransformerLayer:
    """Return the configured layer: with attention and feed-forward, or with one of its parts."""
    parts = config.parts_of(layer_number)
    kind = TransformerLayer if all(parts) else SingleBranchLayer
    return kind(config, layer_number, tp, device, cp, experts)


class SingleBranchLayer(TransformerLayer):
    """Compute ``x + mixer(norm(x))`` or ``x + mlp(norm(x))``. Called like `TransformerLayer`."""

    def _add_parts(
        self,
        config: DecoderConfig,
        tp: Group,
        device: torch.device | str,
        cp: Group | None,
        experts: ExpertGroups | None,
    ) -> None:
        self.input_layernorm = make_stream_norm(config, tp, device)
        parts = config.parts_of(self.layer_number)
        of_mixer = "self_attention" if parts.recurrence is None else parts.recurrence.module_name
        self.has_feed_forward = parts.mixer is None
        self.name_of_branch = "mlp" if self.has_feed_forward else of_mixer
        if self.has_feed_forward:
            self.mlp = make_feed_forward(config, self.layer_number, tp, device, experts)
        else:
            setattr(self, self.name_of_branch, make_attention(config, self.layer_number, tp, device, cp))

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
        keys = None
        if self.hidden_dropout.is_active:
            of_sample = require_keys(dropout)
            after = of_sample.after_feed_forward if self.has_feed_forward else of_sample.after_attention
            keys = after(self.layer_number)
        self.hand_keys(dropout)
        x, normalized = self._first_norm(x, ahead)
        with self._recomputed(self.input_layernorm, x, normalized):
            if not self.has_feed_forward:
                mixer = getattr(self, self.name_of_branch)
                branch, losses = mixer(normalized, pattern, angles, cache, dropout)
            else:
                feed = partial(recompute, self._feed) if self.recomputes_mlp and self.training else self._feed
                branch, losses = feed(normalized, dropout, padding_mask, x)
        return LayerOutput(self._add_last(x, self._scaled(branch), keys, ahead), losses)
