"""Key-value heads per tensor-parallel rank, and how often context-parallel ranks repeat them.

Importing this module imports no torch.
"""

from __future__ import annotations

import math


def key_value_heads_of_rank(num_query_groups: int, tp_size: int) -> int:
    """Return the key-value heads of a tensor-parallel rank; where there are fewer than ranks, several share one."""
    return max(num_query_groups // tp_size, 1)


def copies_of_key_value_heads(num_heads: int, num_groups: int, cp_size: int) -> int | None:
    """Return how often each key-value head is repeated so that the ranks can share the heads, or None if they cannot.

    The repeated heads are the least common multiple of groups and ranks; each serves a whole number of queries' heads.
    """
    repeated = math.lcm(num_groups, cp_size)
    return None if num_heads % repeated else repeated // num_groups
