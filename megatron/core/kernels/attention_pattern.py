"""Which keys a query may look at: one value, handed from the model down to the attention core."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Say which keys each query may look at: by default those up to its own position.

    Without ``is_causal`` a query looks in both directions. ``document_ids`` number the documents that are packed into a
    sequence, and a query then looks at its own document only; under context parallelism too they are those of the whole
    sequence in its own order. A ``mask`` replaces both rules: it is True where a query may look.

    The queries are the last positions of the keys.

    Shapes: ``document_ids: [b, s]``; ``mask: [b or 1, 1, sq, sk]`` of bool.
    """

    is_causal: bool = True
    document_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def is_plain_causal(self) -> bool:
        """Tell whether causality is the only rule, which kernels know by themselves."""
        return self.is_causal and self.document_ids is None and self.mask is None

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return which keys the queries at some positions of the sequence may look at; None is all of them.

        Shapes: positions ``[sq]``, ``[sk]`` ``-> [b or 1, 1, sq, sk]`` of bool.
        """
        assert self.mask is None, "a mask knows no positions"
        causal = (keys[None, :] <= queries[:, None])[None, None] if self.is_causal else None
        if self.document_ids is None:
            return causal
        same = self.document_ids[:, queries, None] == self.document_ids[:, None, keys]
        return same[:, None] if causal is None else same[:, None] & causal

    def matrix(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """Return which of ``num_keys`` positions the last ``num_queries`` of them may look at; None is all of them.

        Shapes: ``-> [b or 1, 1, sq, sk]`` of bool.
        """
        if self.mask is not None:
            return self.mask
        if self.document_ids is not None:
            assert num_queries == num_keys == self.document_ids.shape[1], "documents are of whole sequences"
            return self._matrix_of_documents
        positions = torch.arange(num_keys, device=device)
        return self.visible(positions[num_keys - num_queries :], positions)

    @cached_property
    def _matrix_of_documents(self) -> torch.Tensor | None:
        """Return the matrix of the whole sequence, which all layers share."""
        assert self.document_ids is not None
        positions = torch.arange(self.document_ids.shape[1], device=self.document_ids.device)
        return self.visible(positions, positions)


CAUSAL = AttentionPattern()
"""Plain causal attention to a whole sequence."""
