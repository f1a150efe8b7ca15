"""Checks of attention's sinks and of the layers without rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig


def _check_layers_without_rotary(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.no_rope_freq is None:
        return
    given = f"--no-rope-freq {model.no_rope_freq}"
    try:
        _ = model.layers_without_rotary
    except ValueError as error:
        yield f"{given}: {error}"
        return
    if model.position_embedding_type != "rope":
        yield (
            f"{given} has no effect with --position-embedding-type {model.position_embedding_type}; use "
            "--position-embedding-type rope, or leave it out"
        )
    if model.multi_latent_attention:
        yield f"{given} beside --multi-latent-attention is not built; leave --no-rope-freq out"


CHECKS = (
    Check(
        ("no_rope_freq", "num_layers", "position_embedding_type", "multi_latent_attention"),
        _check_layers_without_rotary,
    ),
)
