"""Dropout of hidden states, and the dropout keys of a rank's part of the hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.context_parallel import positions_of
from megatron.core.errors import ConfigurationError
from megatron.core.ops import DropoutKeys, DropoutSamples, RowKeys, drop_hidden
from megatron.core.process_group import Group


class HiddenDropout(nn.Module):
    """Dropout of hidden states in training, with the same mask on every rank that holds the same elements."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0.0

    def forward(self, x: torch.Tensor, keys: RowKeys | None) -> torch.Tensor:
        """Apply dropout to ``x``. Shapes: ``x: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]``."""
        if not self.is_active:
            return x
        assert keys is not None, "active dropout is keyed"
        return drop_hidden(x, keys, self.probability)


def require_keys(dropout: DropoutKeys | None) -> DropoutKeys:
    """Return the dropout keys.

    Raises:
        ConfigurationError: ``dropout`` is None.
    """
    if dropout is None:
        raise ConfigurationError(
            "layers with --hidden-dropout or --attention-dropout above 0, or with --moe-router-force-load-balancing, "
            "were called in training without dropout keys: pass keys_of_rank(batch.dropout_samples, ...) to the "
            "embedding and to the transformer block, or set both probabilities to 0 and omit the flag"
        )
    return dropout


def keys_of_rank(
    samples: DropoutSamples | None,
    layer_numbers: Sequence[int],
    length: int,
    tp: Group,
    cp: Group,
    sequence_parallel: bool,
) -> DropoutKeys | None:
    """Return a model chunk's dropout keys for a micro-batch with ``length`` positions (``s/cp``) on this rank.

    Without ``samples``, as in evaluation, the result is None.
    """
    if samples is None:
        return None
    device = samples.states.device
    if cp.size == 1:
        positions = torch.arange(length, device=device)
    else:
        positions = positions_of(cp.rank, cp.size, length * cp.size, device)
    hidden = slice(None)
    if sequence_parallel:
        part = length // tp.size
        hidden = slice(tp.rank * part, (tp.rank + 1) * part)
    layers = range(min(layer_numbers), max(layer_numbers) + 1) if layer_numbers else range(0)
    return DropoutKeys(samples, positions, hidden, layers, rank=cp.rank * tp.size + tp.rank)
