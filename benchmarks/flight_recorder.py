"""Measure what the flight recorder costs: the time of an entry, and its share of a small step.

    python benchmarks/flight_recorder.py

An entry is the start and the end of one recorded communication. The smallest step is that of a model of two layers of
width 32 on two ranks with tensor parallelism, whose communications are counted from the recorder itself. A and B, with
and without a recorder, alternate in one process.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.flight.recorder import FlightRecorder
from megatron.core.parallel_state import record_flight
from megatron.core.process_group import Group

NUM_ENTRIES = 20_000
NUM_ROUNDS = 9


def seconds_each(group: Group, tensor: torch.Tensor) -> float:
    """Return the seconds of one pair of `Group.begin` and `Group.end`."""
    begin = time.perf_counter()
    for _ in range(NUM_ENTRIES):
        group.end(group.begin("all_reduce", tensor, 1024))
    return (time.perf_counter() - begin) / NUM_ENTRIES


def main() -> int:
    """Measure and print."""
    bare = Group(("tp",), (0, 1), 0)
    recorded = record_flight(bare, FlightRecorder())
    tensor = torch.empty(16, 16)
    pairs = [(seconds_each(bare, tensor), seconds_each(recorded, tensor)) for _ in range(NUM_ROUNDS)]
    costs = [1e9 * (with_recorder - without) for without, with_recorder in pairs]
    print(f"an entry: {statistics.median(costs):.0f} ns (from {min(costs):.0f} to {max(costs):.0f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
