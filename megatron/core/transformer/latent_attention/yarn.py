"""YaRN: rotary frequencies for more positions than a model was first trained with.

Peng et al. 2023, https://arxiv.org/abs/2309.00071.
"""

from __future__ import annotations

import math

import torch

from megatron.core.transformer.latent_attention.latent_config import LatentConfig


def yarn_frequencies(config: LatentConfig, base: float, width: int) -> torch.Tensor:
    """Return the frequencies of some channels: fast ones as they are, slow ones divided by the factor, blended between.

    Shapes: ``-> [width / 2]`` float64.
    """
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)

    def place(turns: float) -> float:
        """Return the channel whose frequency turns so often over the original positions."""
        return width * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(config.beta_fast), place(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001
    stretched = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0.0, 1.0)
    return plain / config.rotary_scaling_factor * stretched + plain * (1.0 - stretched)
