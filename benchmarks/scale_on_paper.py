"""Measure what a large world costs one rank before and beside its computation: groups, links and schedules.

    python benchmarks/scale_on_paper.py --output benchmarks/scale_on_paper.json

Each rank of the world is one process with torch's fake backend, in which every communication succeeds at once: what is
left is this rank's own work. Schedules of all stages are simulated in this process. Times are the best of the
repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REPETITIONS = 3
TP, PP, DP = 8, 16, 128
SIMULATED_PP, SIMULATED_MICROBATCHES = 64, 1024
SIMULATIONS = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2))


def initialize_rank(rank: int) -> dict[str, Any]:
    """Make the world, groups and links of one rank of TP 8 · PP 16 · DP 128; return how many, and the time."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links

    num_groups = 0
    new_group = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_groups
        num_groups += 1
        return new_group(*args, **kwargs)

    dist.new_group = counting
    start = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=TP * PP * DP)
    state = create_parallel_state(TP, PP)
    create_pipeline_links(state.pp, wraps_around=True)
    seconds = time.perf_counter() - start
    return {"rank": rank, "stage": state.pp.rank, "groups_created": num_groups, "seconds": round(seconds, 3)}


def simulate_schedule(name: str, num_chunks: int) -> dict[str, Any]:
    """Build and simulate a schedule for 64 stages and 1,024 micro-batches."""
    from megatron.core.pipeline_parallel.schedules import build_schedule
    from megatron.core.pipeline_parallel.simulator import simulate

    start = time.perf_counter()
    plans = build_schedule(name, SIMULATED_PP, SIMULATED_MICROBATCHES, num_chunks)
    built = time.perf_counter()
    simulate(plans, num_chunks)
    seconds = time.perf_counter() - built
    return {
        "schedule": name,
        "num_chunks": num_chunks,
        "build_seconds": round(built - start, 3),
        "seconds": round(seconds, 3),
    }


def _best(words: list[str]) -> dict[str, Any]:
    """Run this script in a new process for one measurement, several times, and return the fastest."""
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    results = [
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(REPETITIONS)
    ]
    return min(results, key=lambda result: float(result["seconds"]))


def main() -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the results go, as JSON; without it they are printed only")
    parser.add_argument("--rank", type=int, help="measure only one rank of the world, in this process")
    parser.add_argument("--simulate", choices=[name for name, _ in SIMULATIONS], help="measure only one schedule")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(initialize_rank(options.rank)))
        return 0
    if options.simulate is not None:
        print(json.dumps(simulate_schedule(options.simulate, dict(SIMULATIONS)[options.simulate])))
        return 0
    per_stage = TP * DP
    ranks = (0, per_stage * (PP // 2) + 1, TP * PP * DP - 1)
    results = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "world": {"tp": TP, "pp": PP, "dp": DP, "ranks": TP * PP * DP},
        "initialization": [_best(["--rank", str(rank)]) for rank in ranks],
        "simulation": {
            "pp": SIMULATED_PP,
            "num_microbatches": SIMULATED_MICROBATCHES,
            "schedules": [_best(["--simulate", name]) for name, _ in SIMULATIONS],
        },
    }
    text = json.dumps(results, indent=2) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
