"""Counter-based dropout: the mask is a function of two keys per row and of the column.

There is no generator state and no stored mask: the backward pass recomputes the mask from the keys. The mask of a
column ``c`` is computed with 32-bit words, wrapping arithmetic and logical shifts::

    x = k0 + (c + 1) * 0x9E3779B1
    x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;  x ^= k1;  x *= 0x735A2D97;  x ^= x >> 15

The element is kept if ``x >> 8`` is at least ``round(p * 2**24)``, and is then divided by ``1 - p``.

The keys are a function of the seed, the iteration, the sample, its position, the layer and the site. All these numbers
are global: the sample's index in the global batch, the position in the whole sequence, the layer in the whole model,
and the head among all heads. Ranks that compute the same element therefore drop the same elements in any layout, and no
state is saved between steps. Random routing and stochastic rounding use keys in the same way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron.core.ops.triton_support import is_on_triton_device, runs_on_triton

_COLUMN_STEP = 0x9E3779B1
_FIRST_FACTOR = 0x21F0AAAD
_SECOND_FACTOR = 0x735A2D97
_MASK_BITS = 24

# Elements in a block of rows. On CPU the words of a block stay in the cache; elsewhere this bounds memory use.
_CPU_BLOCK = 1 << 15
_BLOCK = 1 << 26


class RowKeys(NamedTuple):
    """Two int32 tensors with keys for each row, with the shape of the dropout's input without its last dim."""

    k0: torch.Tensor
    k1: torch.Tensor


def keyed_dropout(
    x: torch.Tensor, keys: RowKeys, probability: float, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Set elements of ``x`` to 0 and divide the others by ``1 - probability``.

    ``columns`` are the indices of the last dim. None is 0, 1, ….

    Shapes: ``x: […, c]``; keys ``[…]``; ``columns: [c]`` of any integers ``-> […, c]``.
    """
    if torch.compiler.is_compiling():
        return _drop_in_one_kernel(x, keys, probability, columns)
    output: torch.Tensor = _KeyedDropout.apply(x, *keys, columns, probability)  # type: ignore[no-untyped-call]
    return output


def drop_hidden(
    x: torch.Tensor, keys: RowKeys, probability: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply keyed dropout to hidden states, and add the result to the ``residual`` stream if given.

    Shapes: ``x, residual: […, h]``; keys ``[…]`` ``-> […, h]``.
    """
    tensors = (x,) if residual is None else (x, residual)
    if tensors[-1].dtype == x.dtype and runs_on_triton(*tensors):
        from megatron.core.ops.triton import drop_hidden as on_triton

        return on_triton(x, keys, probability, residual)
    dropped = keyed_dropout(x, keys, probability)
    return dropped if residual is None else residual + dropped


def drop_elements(
    x: torch.Tensor, keys: RowKeys, probability: float, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `keyed_dropout` without autograd."""
    rows = x.reshape(-1, x.shape[-1])
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    k0, k1 = (key.reshape(-1, 1) for key in keys)
    steps = _column_steps(x, columns)
    smallest_kept = _smallest_kept(probability)
    factor = 1.0 / (1.0 - probability)
    limit = _CPU_BLOCK if x.device.type == "cpu" else _BLOCK
    length = max(1, min(limit // rows.shape[1], rows.shape[0]))
    words = torch.empty((length, rows.shape[1]), dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(words)
    kept = torch.empty_like(words, dtype=x.dtype)
    for start in range(0, rows.shape[0], length):
        block = slice(start, min(start + length, rows.shape[0]))
        size = block.stop - start
        word, other, mask = words[:size], shifted[:size], kept[:size]
        _fill_words(word, k0[block], k1[block], steps, other)
        # Multiply by 0 and 1 in x's own dtype, because torch's masked fill is slow on CPU.
        torch.ge(word.bitwise_xor_(-(1 << 31)), smallest_kept, out=mask)
        torch.mul(rows[block], factor, out=output[block]).mul_(mask)
    return output.view(x.shape)


def _drop_in_one_kernel(
    x: torch.Tensor, keys: RowKeys, probability: float, columns: torch.Tensor | None
) -> torch.Tensor:
    """Compute `keyed_dropout`, bitwise, by operations that torch.compile fuses; the backward pass does so again."""

    def shifted(word: torch.Tensor, shift: int) -> torch.Tensor:
        return (word >> shift) & ((1 << (32 - shift)) - 1)

    word = keys.k0.unsqueeze(-1) + _column_steps(x, columns)
    word = (word ^ shifted(word, 16)) * _FIRST_FACTOR
    word = (word ^ shifted(word, 15) ^ keys.k1.unsqueeze(-1)) * _SECOND_FACTOR
    word = word ^ shifted(word, 15) ^ -(1 << 31)
    return x * (1.0 / (1.0 - probability)) * (word >= _smallest_kept(probability)).to(x.dtype)


def _smallest_kept(probability: float) -> int:
    """Return the smallest word that is kept, as a signed number: 2**31 is subtracted from words before comparing."""
    return (round(probability * (1 << _MASK_BITS)) << (32 - _MASK_BITS)) - (1 << 31)


def keyed_words(keys: RowKeys, columns: torch.Tensor) -> torch.Tensor:
    """Return the random 32-bit word of each row and column, from which dropout computes its mask.

    Shapes: keys ``[n]``; ``columns: [c]`` of any integers ``-> [n, c]`` int32.
    """
    k0, k1 = (key.reshape(-1, 1) for key in keys)
    words = torch.empty((len(k0), len(columns)), dtype=torch.int32, device=columns.device)
    _fill_words(words, k0, k1, _column_steps(words, columns), torch.empty_like(words))
    return words


def _fill_words(
    word: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor, steps: torch.Tensor, other: torch.Tensor
) -> None:
    torch.add(k0, steps, out=word)
    _xor_shifted(word, 16, other)
    word.mul_(_FIRST_FACTOR)
    _xor_shifted(word, 15, other)
    word.bitwise_xor_(k1).mul_(_SECOND_FACTOR)
    _xor_shifted(word, 15, other)


def _column_steps(x: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    if columns is None:
        columns = torch.arange(x.shape[-1], device=x.device)
    # An int64 multiplication whose lowest 32 bits equal the 32-bit product.
    return ((columns.to(torch.int64) + 1) * _COLUMN_STEP).to(torch.int32)


def _xor_shifted(word: torch.Tensor, shift: int, other: torch.Tensor) -> None:
    """Compute ``word ^= word >> shift`` in place with a logical shift; ``other`` is a scratch tensor."""
    torch.bitwise_right_shift(word, shift, out=other)
    word.bitwise_xor_(other.bitwise_and_((1 << (32 - shift)) - 1))


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        k0: torch.Tensor,
        k1: torch.Tensor,
        columns: torch.Tensor | None,
        probability: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(k0, k1, columns)
        ctx.probability = probability
        return drop_elements(x, RowKeys(k0, k1), probability, columns)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        k0, k1, columns = ctx.saved_tensors
        return drop_elements(grad, RowKeys(k0, k1), ctx.probability, columns), None, None, None, None


_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xD6E8FEB86659FD93, 0xA5A3564E27F8865B)
_EMBEDDING_SITE = -1
_ADAPTER_SITES = 1 << 40
_ROUTER_SITES = 1 << 41
_ROUNDING_SITES = 1 << 42
_LARGEST_DRAWN = (1 << 23) - 1
_ADAPTERS_OF_A_LAYER = 8


@dataclass(frozen=True, eq=False)
class DropoutSamples:
    """The samples of one micro-batch as dropout identifies them; created once per micro-batch and passed to the model.

    ``number`` identifies the micro-batch on this data-parallel rank, for kernels that take one number as a seed.

    Shapes: ``states: [b]`` int64.
    """

    number: int
    states: torch.Tensor

    @classmethod
    def at(cls, seed: int, iteration: int, first_sample: int, count: int, device: torch.device | str) -> DropoutSamples:
        """Return ``count`` consecutive samples, numbered from ``first_sample`` in the iteration's global batch."""
        base, number = hash_numbers(seed, iteration), hash_numbers(seed, iteration, first_sample)
        states = torch.empty(count, dtype=torch.int64, device=device)
        if count and is_on_triton_device(states):
            from megatron.core.ops.triton import write_states

            write_states(states, base, first_sample, _STEP, _FACTORS)
            return cls(number, states)
        numbers = torch.arange(first_sample, first_sample + count, device=device)
        return cls(number, _mixed(base, numbers))


@dataclass(frozen=True, eq=False)
class DropoutKeys:
    """Dropout keys of a model chunk for one micro-batch, at the positions that a rank holds.

    ``positions`` are the positions of this rank's attention queries. ``hidden`` selects the positions of the hidden
    states: all of them, or a part under sequence parallelism. ``layers`` are layer numbers over the whole model, up to
    the end of the range. ``rank`` numbers the ranks that share a sample. Together with the layer it determines the seed
    of library kernels.

    Shapes: ``positions: [s]`` int64.
    """

    samples: DropoutSamples
    positions: torch.Tensor
    hidden: slice
    layers: range
    rank: int = 0

    @property
    def of_embedding(self) -> RowKeys:
        """Return the keys of the embedding's output. Shapes: ``[s, b]``, ``[s/tp, b]`` under sequence parallelism."""
        return self._of_site(_EMBEDDING_SITE)

    def after_attention(self, layer_number: int) -> RowKeys:
        """Return the keys of a layer's attention output. Shapes: as for the embedding."""
        return self._of_site(2 * layer_number)

    def after_feed_forward(self, layer_number: int) -> RowKeys:
        """Return the keys of a layer's feed-forward output. Shapes: as for the embedding."""
        return self._of_site(2 * layer_number + 1)

    def of_attention(self, layer_number: int, probability: float, heads: range) -> AttentionDropout:
        """Return the dropout of the attention weights of this rank's heads, numbered over all ranks."""
        return AttentionDropout(
            probability,
            self.samples.states,
            self.positions,
            heads,
            site=_EMBEDDING_SITE - 1 - layer_number,
            seed=hash_numbers(self.samples.number, layer_number, self.rank),
        )

    def of_adapter(self, layer_number: int, number: int, is_whole: bool) -> RowKeys:
        """Return the keys of an adapter's input; a layer has up to 8 adapters.

        ``is_whole`` selects all of this rank's positions, independent of sequence parallelism.

        Shapes: ``[s, b]``; ``[s/tp, b]`` under sequence parallelism without ``is_whole``.
        """
        positions = self.positions if is_whole else self.positions[self.hidden]
        states = _mixed(self.samples.states, positions[:, None])
        return _row_keys(_mixed(states, _ADAPTER_SITES + _ADAPTERS_OF_A_LAYER * layer_number + number))

    def of_router(self, layer_number: int, num_experts: int, tokens: slice) -> torch.Tensor:
        """Return a standard normal random number for each token and expert.

        ``tokens`` selects tokens at this rank's positions, in the order of ``[s, b]``.

        Shapes: ``-> [n, experts]`` float32.
        """
        states = _mixed(self.samples.states, self.positions[:, None]).flatten()[tokens]
        states = _mixed(states, _ROUTER_SITES + layer_number)
        drawn = _mixed(states[:, None], torch.arange(num_experts, device=states.device)) & _LARGEST_DRAWN
        # Adding one half keeps the values away from 0 and 1; all of them are exact in float32.
        normal: torch.Tensor = torch.special.ndtri((drawn.float() + 0.5) / (_LARGEST_DRAWN + 1))
        return normal

    def of_rounding(self, sites: range, num_rows: int) -> RowKeys:
        """Return the keys of stochastic rounding of matrices with a row per token; each matrix has its own site.

        The rows are all of this rank's positions, or its part of them under sequence parallelism.

        Shapes: ``-> [sites, num_rows]``.
        """
        positions = self.positions
        if num_rows != len(positions) * len(self.samples.states):
            positions = positions[self.hidden]
        assert num_rows == len(positions) * len(self.samples.states), "one key per row"
        first, count = _ROUNDING_SITES + sites.start, len(sites)
        return RowKeys(*(key.flatten(1) for key in self._keys_of_sites(positions, first, count)))

    def static_copy(self) -> DropoutKeys:
        """Return keys in static memory, which `overwrite` fills for each micro-batch, for CUDA graphs.

        Dropout of library kernels cannot use them, because its seed is a number on the host.
        """
        copy = replace(self, samples=DropoutSamples(0, self.samples.states.clone()))
        copy.__dict__["_of_sites"] = RowKeys(*(keys.clone() for keys in self._of_sites))
        return copy

    def overwrite(self, keys: DropoutKeys) -> None:
        """Copy the keys of another micro-batch with the same layout into this object's memory."""
        self.samples.states.copy_(keys.samples.states)
        for own, new in zip(self._of_sites, keys._of_sites):
            own.copy_(new)

    def _of_site(self, site: int) -> RowKeys:
        k0, k1 = self._of_sites
        index = site - self._first_site
        return RowKeys(k0[index], k1[index])

    @property
    def _first_site(self) -> int:
        return 2 * self.layers.start if self.layers.start else _EMBEDDING_SITE

    @cached_property
    def _of_sites(self) -> RowKeys:
        """Return the keys of all hidden-state sites, computed together. Shapes: ``[sites, s, b]``."""
        first = self._first_site
        return self._keys_of_sites(self.positions[self.hidden], first, 2 * self.layers.stop - first)

    def _keys_of_sites(self, positions: torch.Tensor, first: int, count: int) -> RowKeys:
        """Return the keys of consecutive sites at some positions. Shapes: ``positions: [s] -> [count, s, b]``."""
        if is_on_triton_device(positions):
            from megatron.core.ops.triton import keys_of_sites

            return RowKeys(*keys_of_sites(self.samples.states, positions, first, count, _STEP, _FACTORS))
        sites = torch.arange(first, first + count, device=positions.device)
        states = _mixed(self.samples.states, positions[:, None])
        return _row_keys(_mixed(states, sites[:, None, None]))


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of one layer's attention weights, for any queries, keys and heads.

    ``queries`` and ``keys`` are positions in the whole sequence, and ``heads`` are numbers among all heads. Without
    ``keys`` the key positions are 0, 1, …. ``site`` distinguishes layers. A kernel with its own dropout takes ``seed``
    instead of the keys, and drops other weights.

    Shapes: ``states: [b]``; ``queries: [sq]``; ``keys: [sk]``, all int64.
    """

    probability: float
    states: torch.Tensor
    queries: torch.Tensor
    heads: range
    keys: torch.Tensor | None = None
    site: int = 0
    seed: int = 0

    @cached_property
    def row_keys(self) -> RowKeys:
        """Return the keys of the rows of attention weights. Shapes: ``[b, n, sq]``."""
        heads = torch.arange(self.heads.start, self.heads.stop, device=self.queries.device)
        by_head = _mixed(_mixed(self.states, self.site)[:, None], heads)
        return _row_keys(_mixed(by_head[..., None], self.queries))

    def of_chunk(self, number: int, queries: torch.Tensor, keys: torch.Tensor) -> AttentionDropout:
        """Return the dropout of a chunk of queries and keys, with its own seed."""
        return replace(self, queries=queries, keys=keys, seed=hash_numbers(self.seed, number))

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights after dropout. Shapes: ``[b, n, sq, sk]``."""
        return keyed_dropout(weights, self.row_keys, self.probability, self.keys)


def hash_numbers(*numbers: int) -> int:
    """Hash the numbers to a 63-bit number."""
    text = ",".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _mixed(states: torch.Tensor | int, numbers: torch.Tensor | int) -> torch.Tensor:
    """Mix numbers into states, with broadcasting; at least one of the arguments is a tensor."""
    steps = _signed((numbers + 1) * _STEP) if isinstance(numbers, int) else (numbers + 1) * _signed(_STEP)
    mixed = torch.as_tensor(states + steps)
    for factor in _FACTORS:
        mixed = (mixed ^ _shifted(mixed)) * _signed(factor)
    return mixed ^ _shifted(mixed)


def _shifted(states: torch.Tensor) -> torch.Tensor:
    """Logical shift right by 32 bits."""
    return (states >> 32) & 0xFFFFFFFF


def _row_keys(states: torch.Tensor) -> RowKeys:
    return RowKeys(states.to(torch.int32), (states >> 32).to(torch.int32))


def _signed(number: int) -> int:
    """Convert the lowest 64 bits to int64."""
    lowest = number % (1 << 64)
    return lowest - (1 << 64) if lowest >> 63 else lowest
