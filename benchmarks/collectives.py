"""Measure collectives of CPU tensors between processes of one node: through shared memory and through gloo.

    python benchmarks/collectives.py --output benchmarks/results/collectives_cpu_DATE

Both transports alternate in the same processes. The first rank measures the time from a barrier to its result. With
more processes than cores it includes waits for a core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from megatron.core import collectives
from megatron.core.process_group import Group
from megatron.core.shared_memory import without_shared_memory

_SIZES = (4, 1 << 12, 1 << 16, 1 << 20, 3 << 20, 1 << 24)
_TRANSPORTS = ("shared memory", "gloo")


def measure(rank: int, world_size: int, num_rounds: int, store: str, output: str) -> None:
    """Measure all collectives and sizes on one rank; the first rank writes the milliseconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = Group(("tp",), tuple(range(world_size)), rank, dist.group.WORLD)
    found: list[dict[str, Any]] = []
    for size in _SIZES:
        tensor, whole = torch.ones(size // 4), torch.empty(world_size * (size // 4))
        runs: dict[str, Callable[[], object]] = {
            "all-reduce": partial(collectives.all_reduce, tensor, group),
            "all-gather": partial(collectives.all_gather_into, whole, tensor, group),
            "reduce-scatter": partial(collectives.reduce_scatter_into, tensor, whole, group),
        }
        for name, run in runs.items():
            times: dict[str, list[float]] = {transport: [] for transport in _TRANSPORTS}
            for number in range(-2, num_rounds):
                for transport in _TRANSPORTS:
                    tensor.fill_(1.0)
                    whole.fill_(1.0)
                    with without_shared_memory() if transport == "gloo" else nullcontext():
                        dist.barrier()
                        start = time.perf_counter()
                        run()
                    if number >= 0:
                        times[transport].append((time.perf_counter() - start) * 1e3)
            found.append({"ranks": world_size, "collective": name, "bytes": size, "ms": times})
    if rank == 0:
        Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


def to_table(found: list[dict[str, Any]]) -> str:
    """Return medians and quartiles as Markdown."""
    lines = [
        "| ranks | collective | tensor of a rank | shared memory, ms | gloo, ms | times as fast |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for each in found:
        ours, gloo = (statistics.quantiles(each["ms"][transport], n=4) for transport in _TRANSPORTS)
        cells = [f"{middle:.2f} [{low:.2f}–{high:.2f}]" for low, middle, high in (ours, gloo)]
        size = f"{each['bytes'] / 1024:,.0f} KiB" if each["bytes"] >= 1024 else f"{each['bytes']} bytes"
        ratio = f"{gloo[1] / ours[1]:.1f}"
        lines.append(" | ".join([f"| {each['ranks']}", each["collective"], size, *cells, ratio]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all numbers of ranks, and write the figures to two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num-rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, required=True, help="the files without their extensions")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "result.json")
            options = (world_size, arguments.num_rounds, os.path.join(folder, "store"), output)
            context = multiprocessing.get_context("spawn")
            processes = [context.Process(target=measure, args=(rank, *options)) for rank in range(world_size)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit("a process failed")
            found += json.loads(Path(output).read_text())
    table = to_table(found)
    arguments.output.with_suffix(".json").write_text(json.dumps(found) + "\n")
    arguments.output.with_suffix(".md").write_text(f"# Collectives on {describe_machine()}\n\n{table}")
    print(table, end="")


if __name__ == "__main__":
    main()
