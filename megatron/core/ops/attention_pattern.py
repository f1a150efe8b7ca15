"""AttentionPattern: which keys a query attends to, passed from the model to the attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


@dataclass(eq=False)
class SelectedKeys:
    """Keys that an indexer selected for each query, which later layers of the same forward pass attend to, too.

    ``is_known`` is False before the first indexer. Model chunks that run one after the other may share one object.

    Shapes: ``mask: [b, 1, sq, sk]`` of bool, or None if all keys are selected.
    """

    mask: torch.Tensor | None = None
    is_known: bool = False


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Which keys each query attends to: by default those up to its own position (causal).

    Without ``is_causal`` attention is bidirectional. ``document_ids`` number the documents that are packed into a
    sequence, and a query then attends only within its own document. Under context parallelism they still cover the
    whole sequence, in its original order. A ``mask`` replaces both rules: it is True where a query may attend. With a
    sliding ``window`` a query attends back to only this number of positions, including its own, in addition to the
    other rules.

    The queries are the last positions of the keys, or the positions from ``first_query`` on. The output of ``blind``
    queries is 0, whatever they attend to; it must be some key, since kernels differ in what no key gives. Layers with
    an indexer leave the keys that they select in ``selected``, for layers without.

    Shapes: ``document_ids: [b, sk]``; ``mask: [b or 1, 1, sq, sk]`` and ``blind: [b, sq]`` of bool.
    """

    is_causal: bool = True
    document_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    window: int | None = None
    first_query: int | None = None
    blind: torch.Tensor | None = None
    selected: SelectedKeys | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether causality or its absence is the only rule, and the queries are the last positions."""
        rules = (self.document_ids, self.mask, self.window, self.first_query)
        return all(rule is None for rule in rules)

    @property
    def is_plain_causal(self) -> bool:
        """Return whether causality is the only rule, which all kernels support."""
        return self.is_causal and self.is_plain

    def within(self, window: int) -> AttentionPattern:
        """Return this pattern with a window; layers with the same window share the tensors derived from documents."""
        return self.shared(("window", window), lambda: replace(self, window=window))

    def part(self, queries: range, keys: range) -> AttentionPattern:
        """Return the pattern of a range of queries and a range of keys, which ends no earlier than the queries.

        Layers share the tensors derived from documents.
        """
        assert self.mask is None, "a mask knows no positions"
        assert self.first_query is None, "a part has no parts"
        first_query = None if queries.stop == keys.stop else queries.start - keys.start
        if self.document_ids is None:
            is_anywhere = first_query is None or not (self.is_causal or self.window)
            return self if is_anywhere else replace(self, first_query=first_query)
        ids = self.document_ids[:, keys.start : keys.stop]
        return self.shared(("part", queries, keys), lambda: replace(self, document_ids=ids, first_query=first_query))

    def shared(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return ``make()``, cached for all layers if there are documents."""
        if self.document_ids is None:
            return make()
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return which keys the queries at these positions attend to; None is all of them.

        Shapes: positions ``[sq]``, ``[sk]`` ``-> [b or 1, 1, sq, sk]`` of bool.
        """
        assert self.mask is None, "a mask knows no positions"
        causal = (keys[None, :] <= queries[:, None])[None, None] if self.is_causal else None
        if self.window is not None:
            near = self._near(queries, keys)
            causal = near if causal is None else near & causal
        if self.document_ids is None:
            return causal
        same = self.document_ids[:, queries, None] == self.document_ids[:, None, keys]
        return same[:, None] if causal is None else same[:, None] & causal

    def position_of_first_query(self, num_queries: int, num_keys: int) -> int:
        """Return the first query's position among the keys."""
        return num_keys - num_queries if self.first_query is None else self.first_query

    def matrix(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """Return which of ``num_keys`` keys each of ``num_queries`` queries attends to; None is all of them.

        Shapes: ``-> [b or 1, 1, sq, sk]`` of bool.
        """
        positions = torch.arange(num_keys, device=device)
        first = self.position_of_first_query(num_queries, num_keys)
        queries = positions[first : first + num_queries]
        if self.mask is not None:
            return self.mask if self.window is None else self.mask & self._near(queries, positions)
        if self.document_ids is not None:
            assert num_keys == self.document_ids.shape[1], "every key has a document"
        return self.shared(("matrix", num_queries), lambda: self.visible(queries, positions))

    def _near(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        assert self.window is not None
        return (keys[None, :] > queries[:, None] - self.window)[None, None]


CAUSAL = AttentionPattern()
"""Plain causal attention to a whole sequence."""
