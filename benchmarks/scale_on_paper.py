"""Measure what a large world costs one rank before and beside its computation: groups, links, steps, saves, schedules.

    python benchmarks/scale_on_paper.py --output benchmarks/results/scale_on_paper_cpu_DATE.json

Each rank of the world is one process with torch's fake backend, in which every communication succeeds at once: what is
left is this rank's own work. The step is a toy model's, at several data-parallel sizes. A save is measured in what
ranks send each other: its size as a pickle, and the seconds to read it. Schedules of all stages are simulated in this
process. Times are the best of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
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
STEP_DP = (2, 16, DP)
STEP_MICROBATCHES = 16
SAVED_LAYERS = 96
SIMULATIONS = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2))


def initialize_rank(rank: int) -> dict[str, Any]:
    """Make the world, groups and links of one rank of TP 8 · PP 16 · DP 128; return how many, and the time."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core.parallel_config import ParallelSizes
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
    state = create_parallel_state(ParallelSizes(tp=TP, pp=PP))
    create_pipeline_links(state.pp, wraps_around=True)
    seconds = time.perf_counter() - start
    return {"rank": rank, "stage": state.pp.rank, "groups_created": num_groups, "seconds": round(seconds, 3)}


def model_flags(dp: int, num_layers: int) -> list[str]:
    """Return the flags of a toy model at TP 8 · PP 16 · DP ``dp``."""
    return [
        *("--tensor-model-parallel-size", str(TP), "--pipeline-model-parallel-size", str(PP), "--sequence-parallel"),
        *("--num-layers", str(num_layers), "--hidden-size", "128", "--num-attention-heads", "8", "--seq-length", "64"),
        *("--max-position-embeddings", "64", "--micro-batch-size", "1", "--use-distributed-optimizer"),
        *("--global-batch-size", str(STEP_MICROBATCHES * dp), "--train-iters", "5", "--lr", "1e-3"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--mock-data"),
    ]


def time_step(dp: int) -> dict[str, Any]:
    """Train a few steps as one rank in the middle of TP 8 · PP 16 · DP ``dp``, and return the fastest one's time."""
    import pretrain_gpt
    from megatron.checkpoint.train_state import TrainState
    from megatron.core.device import Device
    from megatron.core.timers import Timers
    from megatron.training.initialize import make_runtime
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.training.training_step import TrainingStep
    from megatron.verification.collective_recorder import stand_in
    from megatron.verification.run_cell import make_source, resolve_cell

    world_size = TP * PP * dp
    config = resolve_cell(model_flags(dp, PP), world_size, "float32")
    times = []
    with stand_in(TP * dp * (PP // 2) + 1, world_size):
        runtime = make_runtime(config, Device("cpu"))
        parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
        step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
        source, train_state = make_source(config, runtime, "plain"), TrainState()
        for _ in range(config.training.train_iters):
            start = time.perf_counter()
            step.run(train_state, source, config.training.global_batch_size, None)
            times.append(time.perf_counter() - start)
    return {"dp": dp, "ranks": world_size, "seconds": round(min(times), 4)}


def time_sample_ids() -> dict[str, Any]:
    """Name and hash the samples of a global batch, as the reporting rank does at each step and no other."""
    from megatron.core.device import Device
    from megatron.training.initialize import make_runtime
    from megatron.verification.collective_recorder import stand_in
    from megatron.verification.run_cell import make_source, resolve_cell

    world_size = TP * PP * DP
    config = resolve_cell(model_flags(DP, PP), world_size, "float32")
    batch_size = config.training.global_batch_size
    times = []
    with stand_in(0, world_size):
        source = make_source(config, make_runtime(config, Device("cpu")), "plain")
        for _ in range(5):
            start = time.perf_counter()
            source.sample_ids_hash(source.sample_ids(0, batch_size))
            times.append(time.perf_counter() - start)
    return {"global_batch_size": batch_size, "seconds": round(min(times), 5)}


def measure_save() -> dict[str, Any]:
    """Describe and plan what the 128 data-parallel ranks of one place save; the other 127 places send as much.

    ``everybody's descriptions`` is what every rank was sent at every save before plans were kept.
    """
    import pretrain_gpt
    from megatron.core.device import Device
    from megatron.core.dist_checkpointing.index import StoredFile
    from megatron.core.dist_checkpointing.planner import model_tensors, optimizer_tensors, plan_writes, rng_tensors
    from megatron.core.dist_checkpointing.shard_file import WrittenShare
    from megatron.training.initialize import make_runtime
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.verification.collective_recorder import stand_in
    from megatron.verification.run_cell import resolve_cell

    world_size = TP * PP * DP
    config = resolve_cell(model_flags(DP, SAVED_LAYERS), world_size, "float32")
    ranks = [TP * DP * (PP // 2) + TP * replica + 1 for replica in range(DP)]
    held = []
    for rank in ranks:
        with stand_in(rank, world_size):
            runtime = make_runtime(config, Device("cpu"))
            parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
            tensors = model_tensors(parts.chunks) + optimizer_tensors(parts.optimizer)
            tensors += rng_tensors(runtime.rng.state_dict(), runtime.state)
            held.append(tuple(tensor.describe() for tensor in tensors))
    start = time.perf_counter()
    writes = plan_writes(held, ranks)
    planning_s = time.perf_counter() - start
    file = StoredFile(123456, 1234, "0badf00d")
    written = [WrittenShare(file, ("0badf00d",) * sum(len(tensor.boxes) for tensor in own)) for own in writes]
    places = TP * PP
    return {
        "layers": SAVED_LAYERS,
        "every save before: everybody's descriptions, on every rank": _message(held, places),
        "first save: descriptions of the replicas, on every rank": _message(held, 1),
        "first save: plan of the replicas, on every rank": {"seconds": round(planning_s, 4)},
        "first save: what all ranks write, on the first rank": _message(writes, places),
        "later saves: one flag, reduced over all ranks": {"bytes": 4},
        "later saves: what an average rank sends": {"bytes": sum(len(pickle.dumps(each)) for each in written) // DP},
        "later saves: checksums and sizes, on the first rank": _message(written, places),
        "seconds": planning_s,
    }


def _message(values: list[Any], times: int) -> dict[str, Any]:
    """Return the bytes of the values' pickles, so many times over, and the seconds to read them."""
    pickles = [pickle.dumps(value) for value in values]
    start = time.perf_counter()
    for _ in range(times):
        read = [pickle.loads(data) for data in pickles]
    seconds = time.perf_counter() - start
    assert read == values
    return {"bytes": times * sum(map(len, pickles)), "seconds": round(seconds, 4)}


def simulate_schedule(name: str, num_chunks: int) -> dict[str, Any]:
    """Build and simulate a schedule for 64 stages and 1,024 micro-batches."""
    from megatron.core.pipeline_parallel.schedule_actions import build_schedule
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


def _processor() -> str:
    """Return the processor's name as the system knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the results go, as JSON; without it they are printed only")
    parser.add_argument("--rank", type=int, help="measure only one rank of the world, in this process")
    parser.add_argument("--step-dp", type=int, choices=STEP_DP, help="measure only a step at this data-parallel size")
    parser.add_argument("--sample-ids", action="store_true", help="measure only the names of a global batch's samples")
    parser.add_argument("--save", action="store_true", help="measure only what ranks send each other to save")
    parser.add_argument("--simulate", choices=[name for name, _ in SIMULATIONS], help="measure only one schedule")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(initialize_rank(options.rank)))
        return 0
    if options.step_dp is not None:
        print(json.dumps(time_step(options.step_dp)))
        return 0
    if options.sample_ids:
        print(json.dumps(time_sample_ids()))
        return 0
    if options.save:
        print(json.dumps(measure_save()))
        return 0
    if options.simulate is not None:
        print(json.dumps(simulate_schedule(options.simulate, dict(SIMULATIONS)[options.simulate])))
        return 0
    per_stage = TP * DP
    ranks = (0, per_stage * (PP // 2) + 1, TP * PP * DP - 1)
    results = {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "world": {"tp": TP, "pp": PP, "dp": DP, "ranks": TP * PP * DP},
        "initialization": [_best(["--rank", str(rank)]) for rank in ranks],
        "step": [_best(["--step-dp", str(dp)]) for dp in STEP_DP],
        "sample_ids": _best(["--sample-ids"]),
        "save": _best(["--save"]),
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
