"""Rotary position embeddings (RoPE), with the frequency scaling of Llama 3.1, YaRN and LongRoPE.

RoPE rotates pairs of channels by angles that grow with the position: Su et al. 2021, https://arxiv.org/abs/2104.09864.
Llama 3.1: https://arxiv.org/abs/2407.21783. YaRN extends the context length: Peng et al. 2023,
https://arxiv.org/abs/2309.00071. LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.ops import runs_on_triton
from megatron.core.precision import arithmetic_dtype
from megatron.core.transformer.decoder_config import RotaryConfig


@dataclass(frozen=True)
class RotaryAngles:
    """Cosine and sine for every position of a batch; ``local`` has those of layers with a window, if they differ.

    Queries are multiplied by ``query_scale``, if it is given.

    Shapes: ``cos, sin: [s, b or 1, 1, rotary_dim]``, ``query_scale: [s, b or 1, 1, 1]``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    local: RotaryAngles | None = None
    query_scale: torch.Tensor | None = None


class RotaryEmbedding:
    """Compute rotary angles for given positions.

    The first ``rotary_dim`` channels of each head are rotated, the others are unchanged. ``interpolation_factor``
    divides the positions. With ``scaling_factor`` the frequencies are scaled as in Llama 3.1: wavelengths longer than
    ``original_length / low_frequency_factor`` are divided by the factor, wavelengths shorter than ``original_length /
    high_frequency_factor`` are kept, and those between are interpolated.

    ``frequencies`` overrides the computed frequencies, and ``long_frequencies`` replaces them in sequences of more than
    ``original_length`` positions. Cosine and sine are multiplied by ``amplitude``. With
    ``temperature``, the pair of a number ``beta`` and of a length, queries at position ``p`` are multiplied by
    ``1 + beta * ln(1 + floor(p / length))``, so that attention to long contexts stays sharp (Nakanishi 2025,
    https://arxiv.org/abs/2501.19399).

    The last angles are cached: all micro-batches of a run share one tensor of positions, unless positions restart at
    each document.
    """

    def __init__(
        self,
        rotary_dim: int,
        base: float,
        *,
        interleaved: bool = False,
        interpolation_factor: float | None = None,
        scaling_factor: float | None = None,
        low_frequency_factor: float = 1.0,
        high_frequency_factor: float = 4.0,
        original_length: int = 8192,
        frequencies: torch.Tensor | None = None,
        long_frequencies: torch.Tensor | None = None,
        amplitude: float = 1.0,
        temperature: tuple[float, int] | None = None,
    ) -> None:
        self.interleaved = interleaved
        self.interpolation_factor = interpolation_factor
        self.amplitude = amplitude
        self.temperature = temperature
        if frequencies is None:
            frequencies = 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        if scaling_factor is not None:
            wavelengths = 2 * math.pi / frequencies
            blend = (original_length / wavelengths - low_frequency_factor) / (
                high_frequency_factor - low_frequency_factor
            )
            blend = blend.clamp(0.0, 1.0)
            frequencies = frequencies * blend + frequencies / scaling_factor * (1 - blend)
        self.frequencies, self.long_frequencies = frequencies, long_frequencies
        self.original_length = original_length
        self._last: _Computed | None = None

    def angles(
        self, position_ids: torch.Tensor, dtype: torch.dtype, lengths: int | torch.Tensor | None = None
    ) -> RotaryAngles:
        """Return the angles of the positions, computed in float64 and stored in at least float32.

        Rows that share their memory (stride 0) share one row of angles. ``lengths`` are those of the sequences, for
        ``long_frequencies``: one number for all, which must be the same for the same ``position_ids``, or in inference
        one per row.

        Shapes: ``position_ids: [b or 1, s]``, ``lengths: [b] -> cos, sin: [s, b or 1, 1, rotary_dim]``.
        """
        # An inference tensor has no version and cannot be saved for a backward pass.
        if torch.is_inference_mode_enabled() or position_ids.is_inference():
            return self._compute(position_ids, dtype, lengths)
        last = self._last
        if last is None or not last.is_of(position_ids, dtype):
            last = _Computed(position_ids, position_ids._version, dtype, self._compute(position_ids, dtype, lengths))
            self._last = last
        return last.angles

    def _compute(
        self, position_ids: torch.Tensor, dtype: torch.dtype, lengths: int | torch.Tensor | None
    ) -> RotaryAngles:
        if position_ids.stride(0) == 0 and not isinstance(lengths, torch.Tensor):
            position_ids = position_ids[:1]
        if self.frequencies.device != position_ids.device:
            # Only once, because a copy from the host synchronizes with the device.
            self.frequencies = self.frequencies.to(position_ids.device)
            if self.long_frequencies is not None:
                self.long_frequencies = self.long_frequencies.to(position_ids.device)
        positions = position_ids.t().to(torch.float64)
        wide = arithmetic_dtype(dtype)
        query_scale = None
        if self.temperature is not None:
            beta, length = self.temperature
            query_scale = (1 + beta * (positions / length).floor().log1p())[..., None, None].to(wide)
        if self.interpolation_factor is not None:
            positions = positions / self.interpolation_factor
        half = positions[..., None] * self._frequencies_of(lengths)
        full = half.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((half, half), dim=-1)
        full = full.unsqueeze(2)
        cos, sin = full.cos(), full.sin()
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return RotaryAngles(cos.to(wide), sin.to(wide), self.interleaved, query_scale=query_scale)

    def _frequencies_of(self, lengths: int | torch.Tensor | None) -> torch.Tensor:
        """Return the frequencies in sequences of these lengths. Shapes: ``[b] -> [b, rotary_dim / 2]``."""
        if self.long_frequencies is None:
            return self.frequencies
        assert lengths is not None, "LongRoPE chooses its frequencies by the length of the sequence"
        if isinstance(lengths, int):
            return self.long_frequencies if lengths > self.original_length else self.frequencies
        return torch.where(lengths[:, None] > self.original_length, self.long_frequencies, self.frequencies)


@dataclass(frozen=True, eq=False)
class _Computed:
    """Cached angles with the inputs that they were computed from."""

    position_ids: torch.Tensor
    version: int
    dtype: torch.dtype
    angles: RotaryAngles

    def is_of(self, position_ids: torch.Tensor, dtype: torch.dtype) -> bool:
        return self.position_ids is position_ids and self.version == position_ids._version and self.dtype is dtype


def apply_rotary(x: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` channels of every head.

    Shapes: ``x: [s, b, heads, d] -> [s, b, heads, d]``.
    """
    rotary_dim = angles.cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    wide = rotated.to(angles.cos.dtype)
    if angles.interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    wide = wide * angles.cos + turned * angles.sin
    result = wide.to(x.dtype)
    return torch.cat((result, passed), dim=-1) if passed.shape[-1] else result


def apply_rotary_to_both(
    query: torch.Tensor, key: torch.Tensor, angles: RotaryAngles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys.

    Shapes: ``query: [s, b, heads, d]``, ``key: [s, b, groups, d]``; results have the same shapes.
    """
    if runs_on_triton(query, key, angles.cos, angles.sin):
        from megatron.core.ops.triton import rotate_query_and_key

        return rotate_query_and_key(query, key, angles.cos, angles.sin, angles.interleaved)
    return apply_rotary(query, angles), apply_rotary(key, angles)


def split_projection(
    mixed: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the output of the fused projection, which has the query heads, key and value of each group, in this order.

    ``bias`` is already added to ``mixed``. If it is given, Triton computes its gradient while it joins the gradients of
    queries, keys and values.

    Shapes: ``[s, b, groups, heads/groups + 2, d] -> [s, b, heads, d], [s, b, groups, d], [s, b, groups, d]``.
    """
    if bias is not None:
        from megatron.core.ops.triton import split_with_bias

        return split_with_bias(mixed, bias, split_projection)
    query, key, value = mixed.split_with_sizes((mixed.shape[3] - 2, 1, 1), dim=3)
    return query.reshape(*mixed.shape[:2], -1, mixed.shape[-1]), key.squeeze(3), value.squeeze(3)


def split_and_rotate(mixed: torch.Tensor, angles: RotaryAngles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the output of the fused projection and rotate queries and keys.

    Shapes: as for `split_projection`.
    """
    if runs_on_triton(mixed, angles.cos, angles.sin):
        from megatron.core.ops.triton import split_and_rotate as on_triton

        return on_triton(mixed, angles.cos, angles.sin, angles.interleaved)
    query, key, value = split_projection(mixed)
    return *apply_rotary_to_both(query, key, angles), value


def proportional_frequencies(base: float, width: int, rotary_dim: int) -> torch.Tensor:
    """Return the frequencies of a head of ``width`` channels, 0 after the first ``rotary_dim`` channels.

    Shapes: ``-> [width / 2]`` float64.
    """
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    frequencies[rotary_dim // 2 :] = 0.0
    return frequencies


def factor_frequencies(base: float, factors: Sequence[float]) -> torch.Tensor:
    """Return the frequencies of RoPE divided by LongRoPE's factors, one each.

    Shapes: ``-> [len(factors)]`` float64.
    """
    exponents = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    return 1.0 / (torch.tensor(factors, dtype=torch.float64) * base**exponents)


def yarn_frequencies(config: RotaryConfig, base: float, width: int) -> torch.Tensor:
    """Return YaRN's frequencies: high ones unchanged, low ones divided by the scaling factor, interpolated between.

    Shapes: ``-> [width / 2]`` float64.
    """
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)

    def place(turns: float) -> float:
        """Return the channel whose frequency makes this number of turns over the original context length."""
        return width * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(config.beta_fast), place(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001
    stretched = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0.0, 1.0)
    return plain / config.rotary_scaling_factor * stretched + plain * (1.0 - stretched)
