"""Attention masks written out: the oracle of the document ids that samples carry instead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dense_attention_mask(document_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return what may not be attended to: later tokens and other documents.

    Shapes: ``[s] -> [s, s]`` bool, True where attention is forbidden.
    """
    length = len(document_ids)
    later = np.triu(np.ones((length, length), np.bool_), k=1)
    forbidden: NDArray[np.bool_] = later | (document_ids[:, None] != document_ids[None, :])
    return forbidden
