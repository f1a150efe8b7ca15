"""LinearBiases: ALiBi for any attention kernel, as further channels of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import positions_of
from megatron.core.ops import AttentionInputs
from megatron.core.precision import name_of_dtype
from megatron.core.process_group import Group
from megatron.core.transformer.alibi import SIGNIFICANT_BITS, extended_head_width, num_digits, num_parts


class LinearBiases:
    """Add channels to queries and keys whose dot product is slope x position of the key.

    Only the key's position matters: a bias of slope x distance differs from it by a constant per query, which the
    softmax ignores. Sinks and softcapping would not ignore it. In low precision a position is split into digits and a
    slope into summands, so that all products are exact, and kernels add them in float32. Since the biases are part of
    queries and keys, every kernel, KV cache and context-parallel exchange supports them, with memory linear in the
    sequence.
    """

    def __init__(self, slopes: Sequence[float], cp: Group) -> None:
        self.slopes = torch.tensor(slopes, dtype=torch.float64, device="cpu")
        self.cp = cp
        self._last: tuple[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] | None = None

    def extend(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs with wider queries, keys and values, whose dot products include the biases.

        Queries are scaled for kernels that divide scores by the square root of the new width. With context parallelism
        values are padded with zeros, because keys and values are exchanged in one tensor.

        Shapes: ``query: [s, b, n, d]``, ``key, value: [sk, b, g, d]``; their ``d`` grows.
        """
        query, key = inputs.query, inputs.key
        old, num_keys = query.shape[3], key.shape[0]
        new = extended_head_width(old, name_of_dtype(query.dtype), num_keys * self.cp.size)
        of_queries, of_keys = self._channels(num_keys, new, old, query)
        query = query * (new / old) ** 0.5
        return replace(
            inputs,
            query=torch.cat((query, of_queries.expand(*query.shape[:3], -1)), dim=3),
            key=torch.cat((key, of_keys.expand(*key.shape[:3], -1)), dim=3),
            value=F.pad(inputs.value, (0, new - old)) if self.cp.size > 1 else inputs.value,
        )

    def _channels(self, num_keys: int, new: int, old: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the further channels of queries and keys, cached for the last number of keys in training.

        Shapes: ``-> [1, 1, n, new - old], [sk, 1, 1, new - old]``.
        """
        # An inference tensor cannot be saved for a backward pass.
        if torch.is_inference_mode_enabled():
            return self._compute(num_keys, new, old, like)
        arguments = (num_keys, new, old, like.dtype, like.device)
        if self._last is None or self._last[0] != arguments:
            self._last = arguments, self._compute(num_keys, new, old, like)
        return self._last[1]

    def _compute(self, num_keys: int, new: int, old: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device, size = like.dtype, like.device, self.cp.size
        name, length = name_of_dtype(dtype), num_keys * size
        bits, digits = SIGNIFICANT_BITS[name], num_digits(name, length)
        positions = torch.arange(num_keys, device=device)
        if size > 1:
            positions = positions_of(self.cp.rank, size, length, device)
        if self.slopes.device != device:
            # Only once, because a copy from the host synchronizes with the device.
            self.slopes = self.slopes.to(device)
        left = self.slopes * new**0.5
        parts = []
        for _ in range(num_parts(name)):
            parts.append(left.to(dtype))
            left = left - parts[-1].double()
        of_queries = [part * 2.0 ** (bits * digit) for digit in range(digits) for part in parts]
        of_keys = [(positions >> bits * digit) % 2**bits for digit in range(digits) for _ in parts]
        missing = (0, new - old - len(of_keys))
        return (
            F.pad(torch.stack(of_queries, dim=-1), missing)[None, None],
            F.pad(torch.stack(of_keys, dim=-1).to(dtype), missing)[:, None, None],
        )
