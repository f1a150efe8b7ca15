"""Clipping of gradients by kind: matrices, embeddings and vectors have a largest norm each, beside that of all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding import ParamSpec

KINDS = ("matrices", "embeddings", "vectors")
ALL_KINDS = ""
"""What stands for all kinds together, where they are not told apart."""
_EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")


def kind_of(spec: ParamSpec) -> str:
    """Return the kind of a parameter; the output layer is one of the embeddings, with which it may be tied."""
    if spec.name.endswith(_EMBEDDINGS):
        return "embeddings"
    return "vectors" if len(spec.global_shape) < 2 or spec.name.endswith("bias") else "matrices"


def grad_multipliers(
    norm: torch.Tensor, of_kinds: torch.Tensor, scale: float, config: OptimizerConfig
) -> Mapping[str, torch.Tensor]:
    """Return what the gradients of each kind are multiplied by: clipped by their kind, and then all together.

    ``norm`` is that of all gradients, ``of_kinds`` are the sums of squares of each kind. ``scale`` is that of the
    loss, and divided out. Where kinds are not told apart there is one number for all; where they are, also one for
    what is of none.

    Shapes: ``norm: []``, ``of_kinds: [3]``, in float64.
    """
    if not config.clips_by_kind:
        return {ALL_KINDS: clip_coefficient(norm / scale, config.clip_grad) / scale}
    norms = of_kinds.sqrt() / scale
    factors = torch.stack([clip_coefficient(norm, limit) for norm, limit in zip(norms, _limits(config), strict=True)])
    left = torch.linalg.vector_norm(norms * factors)
    together = clip_coefficient(left, config.clip_grad) / scale
    return dict(zip(KINDS, (factors * together).unbind())) | {ALL_KINDS: together}


def _limits(config: OptimizerConfig) -> tuple[float, ...]:
    return (config.clip_grad_matrices, config.clip_grad_embeddings, config.clip_grad_vectors)
