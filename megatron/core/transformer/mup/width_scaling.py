"""Which parameters scale with the width of a model (muP), and how their initial values do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from megatron.core.sharding import ParamSpec, attach_spec, spec_of
from megatron.core.transformer.adapters.adapter_targets import ADAPTERS

_NOT_HIDDEN = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter maps one width that grows to another: no embedding, output layer, vector, adapter."""
    is_matrix = len(spec.global_shape) >= 2 and not spec.name.endswith(("bias", *_NOT_HIDDEN))
    return is_matrix and ADAPTERS not in spec.name


def scale_with_width(parameters: Iterable[nn.Parameter], width_multiplier: float) -> None:
    """Let the hidden matrices begin smaller by the root of the multiplier, and say it to the optimizer.

    Must be called when the parameters are named, before they are initialised.
    """
    for parameter in parameters:
        spec = spec_of(parameter)
        if is_hidden_matrix(spec):
            std = spec.init_std / width_multiplier**0.5
            attach_spec(parameter, replace(spec, init_std=std, width_multiplier=width_multiplier))
