"""Put conversations into samples: as many as fit, each whole, or one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_conversations(
    lengths: NDArray[np.int32], room: int, random_state: np.random.RandomState, *, together: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the conversations in the order of their samples, and where each sample begins in that order.

    ``together`` packs by best fit, longest first: each goes to the sample that it leaves the least room in. Those of
    equal length take turns by ``random_state``. Samples that are packed hold nothing of a conversation that holds no
    tokens.

    Shapes: lengths ``[n]``, each ``room`` at most -> ``[m]``, ``[samples + 1]``; without empty ones ``m = n``.
    """
    order = random_state.permutation(len(lengths))
    order = order[lengths[order] > 0]
    if not together:
        return order, np.arange(len(order) + 1)
    longest_first = order[np.argsort(-lengths[order], kind="stable")]
    samples: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    open_rooms = 0  # bit r stands where a sample with room r is
    for conversation, length in zip(longest_first.tolist(), lengths[longest_first].tolist()):
        fitting = open_rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            sample = by_room[left].pop()
            if not by_room[left]:
                open_rooms ^= 1 << left
            samples[sample].append(conversation)
        else:
            left, sample = room, len(samples)
            samples.append([conversation])
        left -= length
        if left:
            if not by_room[left]:
                open_rooms |= 1 << left
            by_room[left].append(sample)
    return _flatten(samples)


def _flatten(samples: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    starts = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return np.array([conversation for sample in samples for conversation in sample], np.int64), starts
