"""Which keys a query may look at: one value, handed from the model down to the attention core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Say which keys each query may look at: by default those up to its own position.

    Without ``is_causal`` a query looks in both directions. ``document_ids`` number the documents that are packed into a
    sequence, and a query then looks at its own document only; under context parallelism too they are those of the whole
    sequence in its own order. A ``mask`` replaces both rules: it is True where a query may look. With a ``window`` a
    query looks back at so many keys only, its own among them, whatever the other rules are.

    The queries are the last positions of the keys.

    Shapes: ``document_ids: [b, s]``; ``mask: [b or 1, 1, sq, sk]`` of bool.
    """

    is_causal: bool = True
    document_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    window: int | None = None

    @property
    def is_plain(self) -> bool:
        """Tell whether the direction is the only rule."""
        return self.document_ids is None and self.mask is None and self.window is None

    @property
    def is_plain_causal(self) -> bool:
        """Tell whether causality is the only rule, which kernels know by themselves."""
        return self.is_causal and self.is_plain

    def within(self, window: int) -> AttentionPattern:
        """Return this pattern narrowed to a window; layers with the same one share what documents give."""
        if window not in self._narrowed:
            narrowed = replace(self, window=window)
            if self.document_ids is None:
                return narrowed
            self._narrowed[window] = narrowed
        return self._narrowed[window]

    @cached_property
    def _narrowed(self) -> dict[int, AttentionPattern]:
        return {}

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return which keys the queries at some positions of the sequence may look at; None is all of them.

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

    def matrix(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """Return which of ``num_keys`` positions the last ``num_queries`` of them may look at; None is all of them.

        Shapes: ``-> [b or 1, 1, sq, sk]`` of bool.
        """
        positions = torch.arange(num_keys, device=device)
        queries = positions[num_keys - num_queries :]
        if self.mask is not None:
            return self.mask if self.window is None else self.mask & self._near(queries, positions)
        if self.document_ids is not None:
            assert num_queries == num_keys == self.document_ids.shape[1], "documents are of whole sequences"
            return self._matrix_of_documents
        return self.visible(queries, positions)

    def _near(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        assert self.window is not None
        return (keys[None, :] > queries[:, None] - self.window)[None, None]

    @cached_property
    def _matrix_of_documents(self) -> torch.Tensor | None:
        """Return the matrix of the whole sequence, which all layers share."""
        assert self.document_ids is not None
        positions = torch.arange(self.document_ids.shape[1], device=self.document_ids.device)
        return self.visible(positions, positions)


CAUSAL = AttentionPattern()
"""Plain causal attention to a whole sequence."""
