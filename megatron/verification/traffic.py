"""Communication volume: numbers of communications and bytes by operation and axes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Volume:
    """Number of communications and their total bytes."""

    num_calls: int
    num_bytes: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)

    def __mul__(self, count: int) -> Volume:
        return Volume(self.num_calls * count, self.num_bytes * count)


Traffic = dict[tuple[str, tuple[str, ...]], Volume]
"""Volumes by operation and axes."""


class TrafficSum:
    """Sum of communications; groups of one rank do not communicate."""

    def __init__(self, sizes: dict[tuple[str, ...], int]) -> None:
        self.sizes = sizes
        self.traffic: Traffic = {}

    def add(self, operation: str, axes: tuple[str, ...], num_bytes: int, count: int = 1) -> None:
        """Add ``count`` communications of ``num_bytes`` each."""
        if self.sizes[axes] > 1 and count:
            key = (operation, axes)
            self.traffic[key] = self.traffic.get(key, Volume(0, 0)) + Volume(1, num_bytes) * count
