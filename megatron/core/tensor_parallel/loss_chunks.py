"""Number of tokens whose logits exist at once with ``--cross-entropy-fusion-impl linear``."""

from __future__ import annotations

_CHUNK_ELEMENTS = 1 << 28
"""Maximum number of logits of a chunk: 512 MiB in 16 bits."""
_ROW_MULTIPLE = 128


def chunk_rows(num_rows: int, num_columns: int) -> int:
    """Return the number of tokens of a chunk, for ``num_columns`` logits of each token on this rank.

    All chunks but the last have as many, and the last one has no more.
    """
    num_chunks = max(1, -(-num_rows * num_columns // _CHUNK_ELEMENTS))
    return -(-num_rows // (num_chunks * _ROW_MULTIPLE)) * _ROW_MULTIPLE
