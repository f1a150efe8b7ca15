"""Compare how long two replicas draw initial values: each draws all, or each draws a half and sends it to the other.

    OMP_NUM_THREADS=1 python benchmarks/initial_values.py [--rounds 7] [--layers 6] [--out FILE]

Both ways are taken in turn by the same two processes, over gloo on one machine, and give the same bits. What is printed
are medians, the quickest and the slowest round, of elapsed time and of rank 0's processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from megatron.core.collectives import barrier
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import single_rank_group
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import SEED, make_model

_SHAPE: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "kv_channels": 64, "ffn_hidden_size": 4096}
_TABLES: dict[str, Any] = {"vocab_size": 16384, "max_position_embeddings": 1024}


def draw_in_turn(rounds: int, num_layers: int) -> tuple[int, dict[str, list[float]], dict[str, list[float]]]:
    """Return the number of parameters and the times of each way, round by round."""
    state = create_parallel_state()
    model = make_model(single_rank_group(), bf16=True, num_layers=num_layers, **_SHAPE, **_TABLES)
    times: dict[bool, dict[str, list[float]]] = {way: {"elapsed": [], "processor": []} for way in (False, True)}
    drawn: dict[bool, bytes] = {}
    # The first round touches memory for the first time.
    for number in range(rounds + 1):
        for divides in (False, True):
            model.parallel_state = state if divides else None
            barrier(state.world)
            start, start_processor = time.perf_counter(), time.process_time()
            model.initialize_parameters(SEED)
            barrier(state.world)
            if number:
                times[divides]["elapsed"].append(time.perf_counter() - start)
                times[divides]["processor"].append(time.process_time() - start_processor)
            values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            drawn[divides] = values.view(torch.uint8).numpy().tobytes()
    assert drawn[False] == drawn[True], "both ways give the same bits"
    return values.numel(), times[False], times[True]


def main() -> int:
    """Print the medians and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # Ranks find a function by its file: this one runs as a script.
    from benchmarks import initial_values

    job = (initial_values.draw_in_turn, options.rounds, options.layers)
    num_parameters, alone, divided = run_distributed(2, *job, timeout_s=3600)[0]
    arms = {"each rank draws all": alone, "each rank draws a half": divided}
    print(f"{num_parameters:,} bf16 parameters, DP 2, CPU: {describe_machine()}")
    for name, times in arms.items():
        for kind, seconds in times.items():
            middle = statistics.median(seconds)
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(
                f"{name}: {kind} time {middle:.2f} s ({spread}), {middle / num_parameters * 1e9:.1f} ns per parameter"
            )
    if options.out is not None:
        options.out.write_text(json.dumps({"parameters": num_parameters, "seconds": arms}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
