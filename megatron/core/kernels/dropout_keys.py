"""What dropout's masks are a function of: the seed, the iteration, the sample, its position, the layer and the site.

Every number here is one of the whole run: a sample's place in the global batch, a position of the whole sequence, a
layer of the whole model, a head of all heads. Ranks that compute the same element therefore drop the same, at any
layout, and nothing has to be remembered between two steps. Routers that choose at random are keyed alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron.core.kernels.dropout import RowKeys, keyed_dropout

_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xD6E8FEB86659FD93, 0xA5A3564E27F8865B)
_EMBEDDING_SITE = -1
_ADAPTER_SITES = 1 << 40
_ROUTER_SITES = 1 << 41
_LARGEST_DRAWN = (1 << 23) - 1
_ADAPTERS_OF_A_LAYER = 8


@dataclass(frozen=True, eq=False)
class DropoutSamples:
    """Name the samples of one micro-batch to dropout: made once for each, and handed to the model beside it.

    ``number`` is of the micro-batch as this data-parallel rank sees it, for kernels that take one number as a seed.

    Shapes: ``states: [b]`` int64.
    """

    number: int
    states: torch.Tensor

    @classmethod
    def at(cls, seed: int, iteration: int, first_sample: int, count: int, device: torch.device | str) -> DropoutSamples:
        """Return ``count`` samples in a row, numbered from ``first_sample`` in the iteration's global batch."""
        numbers = torch.arange(first_sample, first_sample + count, device=device)
        return cls(hash_numbers(seed, iteration, first_sample), _mixed(hash_numbers(seed, iteration), numbers))


@dataclass(frozen=True, eq=False)
class DropoutKeys:
    """Hold what dropout in a model's chunk is keyed by: one micro-batch at the positions that a rank holds.

    ``positions`` are those that attention's queries have on this rank, ``hidden`` of them those of the hidden states:
    all, or under sequence parallelism a part. ``layers`` are numbered over the whole model, up to the end of the range.
    ``rank`` numbers the ranks that share a sample, and decides with the layer how libraries seed their own dropout.

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
        """Return the keys of an attention's output. Shapes: as for the embedding."""
        return self._of_site(2 * layer_number)

    def after_feed_forward(self, layer_number: int) -> RowKeys:
        """Return the keys of a feed-forward's output. Shapes: as for the embedding."""
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
        """Return the keys of an adapter's input, of which a layer has up to 8.

        ``is_whole`` asks for those of all of this rank's positions, whatever sequence parallelism leaves it of them.

        Shapes: ``[s, b]``; ``[s/tp, b]`` under sequence parallelism, where not all are asked for.
        """
        positions = self.positions if is_whole else self.positions[self.hidden]
        states = _mixed(self.samples.states, positions[:, None])
        return _row_keys(_mixed(states, _ADAPTER_SITES + _ADAPTERS_OF_A_LAYER * layer_number + number))

    def of_router(self, layer_number: int, num_experts: int, tokens: slice) -> torch.Tensor:
        """Return a random number of each token and expert, from a standard normal distribution.

        ``tokens`` are some of those at this rank's positions, in the order of ``[s, b]``.

        Shapes: ``-> [n, experts]`` float32.
        """
        states = _mixed(self.samples.states, self.positions[:, None]).flatten()[tokens]
        states = _mixed(states, _ROUTER_SITES + layer_number)
        drawn = _mixed(states[:, None], torch.arange(num_experts, device=states.device)) & _LARGEST_DRAWN
        # Halves keep the ends away from 0 and 1; all of these are exact in float32.
        normal: torch.Tensor = torch.special.ndtri((drawn.float() + 0.5) / (_LARGEST_DRAWN + 1))
        return normal

    def static_copy(self) -> DropoutKeys:
        """Return keys in memory of their own, which `overwrite` fills for one micro-batch after the other.

        Libraries' own dropout cannot follow them: its seed is a number of the host.
        """
        copy = replace(self, samples=DropoutSamples(0, self.samples.states.clone()))
        copy.__dict__["_of_sites"] = RowKeys(*(keys.clone() for keys in self._of_sites))
        return copy

    def overwrite(self, keys: DropoutKeys) -> None:
        """Take over the keys of another micro-batch at the same place, in this one's memory."""
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
        """Return the keys of all sites of hidden states, computed together. Shapes: ``[sites, s, b]``."""
        sites = torch.arange(self._first_site, 2 * self.layers.stop, device=self.positions.device)
        states = _mixed(self.samples.states, self.positions[self.hidden, None])
        return _row_keys(_mixed(states, sites[:, None, None]))


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Hold the dropout of one layer's attention weights, for any queries, keys and heads.

    ``queries`` and ``keys`` are positions of the whole sequence, ``heads`` numbers of all heads; without ``keys`` these
    are the positions 0, 1, …. ``site`` tells layers apart. A kernel with dropout of its own is given ``seed`` in place
    of the keys: it drops other weights, and nothing is computed here.

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
        """Return the keys of the weights' rows. Shapes: ``[b, n, sq]``."""
        heads = torch.arange(self.heads.start, self.heads.stop, device=self.queries.device)
        by_head = _mixed(_mixed(self.states, self.site)[:, None], heads)
        return _row_keys(_mixed(by_head[..., None], self.queries))

    def of_chunk(self, number: int, queries: torch.Tensor, keys: torch.Tensor) -> AttentionDropout:
        """Return the dropout of some queries and keys, with a seed of its own."""
        return replace(self, queries=queries, keys=keys, seed=hash_numbers(self.seed, number))

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights after dropout. Shapes: ``[b, n, sq, sk]``."""
        return keyed_dropout(weights, self.row_keys, self.probability, self.keys)


def hash_numbers(*numbers: int) -> int:
    """Return a 63-bit number that depends on all of these."""
    text = ",".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _mixed(states: torch.Tensor | int, numbers: torch.Tensor | int) -> torch.Tensor:
    """Return states that depend on the given ones and on numbers, at least one of which is a tensor; they broadcast."""
    steps = _signed((numbers + 1) * _STEP) if isinstance(numbers, int) else (numbers + 1) * _signed(_STEP)
    mixed = torch.as_tensor(states + steps)
    for factor in _FACTORS:
        mixed = (mixed ^ _shifted(mixed)) * _signed(factor)
    return mixed ^ _shifted(mixed)


def _shifted(states: torch.Tensor) -> torch.Tensor:
    """Shift to the right by 32 bits, with zeros coming in."""
    return (states >> 32) & 0xFFFFFFFF


def _row_keys(states: torch.Tensor) -> RowKeys:
    return RowKeys(states.to(torch.int32), (states >> 32).to(torch.int32))


def _signed(number: int) -> int:
    """Return the int64 of the lowest 64 bits."""
    lowest = number % (1 << 64)
    return lowest - (1 << 64) if lowest >> 63 else lowest
