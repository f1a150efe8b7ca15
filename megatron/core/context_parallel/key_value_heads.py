"""Number of key-value heads per tensor-parallel rank, and of their copies under context parallelism.

Importing this module does not import torch.
"""

from __future__ import annotations

import math


def key_value_heads_of_rank(num_query_groups: int, tp_size: int) -> int:
    """Return the number of key-value heads of a tensor-parallel rank, at least one (shared if there are too few)."""
    return max(num_query_groups // tp_size, 1)


def copies_of_key_value_heads(num_heads: int, num_groups: int, cp_size: int) -> int | None:
    """Return the number of copies of each key-value head with which the ranks can shard the heads, or None.

    The number of repeated heads is the least common multiple of groups and ranks. Each serves the same number of query
    heads.
    """
    repeated = math.lcm(num_groups, cp_size)
    return None if num_heads % repeated else repeated // num_groups
