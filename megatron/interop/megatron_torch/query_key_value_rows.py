"""The rows of the fused query, key and value weight in files of every age, found in the native order.

The native order is per head ``[q, k, v]`` (per key-value group ``[q ... q, k, v]``). Files without a
``checkpoint_version`` stack all queries, all keys and all values; version 1.0 interleaves the three row by row; later
ones have the native order. Only models without grouped queries are that old.
"""

from __future__ import annotations

from megatron.interop.megatron_torch.stored_values import LazyTensor


def native_row_blocks(tensor: LazyTensor, head_dim: int, version: float) -> list[tuple[int, LazyTensor]]:
    """Return (first row in the native order, the rows' values) of everything in one rank's weight or bias.

    Shapes: ``tensor: [rows]`` or ``[rows, h]``.
    """
    rows = tensor.shape[0]
    if version >= 2.0:
        return [(0, tensor)]
    num_heads = rows // (3 * head_dim)
    blocks = []
    for head in range(num_heads):
        for part in range(3):
            if version >= 1.0:
                block = tensor.every_nth_row(head * 3 * head_dim + part, 3, head_dim)
            else:
                block = tensor.every_nth_row((part * num_heads + head) * head_dim, 1, head_dim)
            blocks.append(((head * 3 + part) * head_dim, block))
    return blocks
