"""How much is sent: communications counted by operation and axes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Volume:
    """Hold how many communications there are and how many bytes they are about."""

    num_calls: int
    num_bytes: int

    def __add__(self, other: Volume) -> Volume:
        """Return both together."""
        return Volume(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)

    def __mul__(self, count: int) -> Volume:
        """Return ``count`` times this."""
        return Volume(self.num_calls * count, self.num_bytes * count)


Traffic = dict[tuple[str, tuple[str, ...]], Volume]
"""Volumes by operation and axes."""


class TrafficSum:
    """Add up communications; those over one rank are none."""

    def __init__(self, sizes: dict[tuple[str, ...], int]) -> None:
        self.sizes = sizes
        self.traffic: Traffic = {}

    def add(self, operation: str, axes: tuple[str, ...], num_bytes: int, count: int = 1) -> None:
        """Add so many communications of a number of bytes each."""
        if self.sizes[axes] > 1 and count:
            key = (operation, axes)
            self.traffic[key] = self.traffic.get(key, Volume(0, 0)) + Volume(1, num_bytes) * count
