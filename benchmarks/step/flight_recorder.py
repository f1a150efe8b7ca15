"""Measure what the flight recorder and the watchdog cost: an entry, a beat, and their share of the smallest step.

    python benchmarks/step/flight_recorder.py

An entry is the start and the end of one recorded communication, a beat what the watchdog does each second. The step is
that of `run.py` beside this file in bfloat16 on two ranks with tensor parallelism, the quickest one there that
communicates; its communications are counted by the recorder. A and B, with and without a recorder, alternate in one
process, in processor time of the thread, of which the least counts: a machine that does other things only adds to it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import record_flight
from megatron.core.process_group import Group

NUM_ENTRIES = 20_000
NUM_ROUNDS = 15
NUM_STEPS = 6
BEAT_S = 1.0


def seconds_each(group: Group, tensor: torch.Tensor) -> float:
    """Return the processor seconds of one pair of `Group.begin` and `Group.end`."""
    begin = time.thread_time()
    for _ in range(NUM_ENTRIES):
        group.end(group.begin("all_reduce", tensor, 1024))
    return (time.thread_time() - begin) / NUM_ENTRIES


def entry_seconds() -> float:
    """Return what an entry costs."""
    bare = Group(("tp",), (0, 1), 0)
    recorded = record_flight(bare, FlightRecorder())
    tensor = torch.empty(16, 16)
    pairs = [(seconds_each(bare, tensor), seconds_each(recorded, tensor)) for _ in range(NUM_ROUNDS)]
    return min(cost for _, cost in pairs) - min(cost for cost, _ in pairs)


def run_steps(output: Path) -> None:
    """Train some steps as one of two ranks, and write how many communications and how long a step has."""
    from ours import WorkloadDataset, configure
    from workload import Workload

    from megatron.checkpoint.train_state import TrainState
    from megatron.core.timers import Timers
    from megatron.training.batch_source import BatchSource
    from megatron.training.fault_tolerance.watchdog import watching
    from megatron.training.initialize import initialize_runtime, read_launch_environment, shut_down
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.training.training_step import TrainingStep
    from pretrain_gpt import forward_step, provide_model

    launch = read_launch_environment()
    workload = Workload(dtype="bfloat16", tensor_model_parallel_size=2)
    config = configure(workload, NUM_STEPS, launch.world_size, launch.rank)
    runtime = initialize_runtime(config, launch)
    flight = runtime.flight
    parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
    dataset = WorkloadDataset(workload, NUM_STEPS * workload.micro_batch_size)
    source = BatchSource(dataset, config, runtime, workload.vocab_size, 0)
    step, state = TrainingStep(config, runtime, parts, forward_step, Timers()), TrainState()
    seconds, entries = [], []
    for _ in range(NUM_STEPS):
        count = flight.num_begun
        report, _ = step.run(state, source, workload.micro_batch_size, None)
        seconds.append(report.step_time_s)
        entries.append(flight.num_begun - count)
    # Nothing else runs now: what the process computes is the watchdog.
    with watching(flight, runtime.state, runtime.device, seconds=None):
        begin, now = time.process_time(), time.monotonic()
        time.sleep(8 * BEAT_S)
        share = (time.process_time() - begin) / (time.monotonic() - now)
    if launch.rank == 0:
        figures = {"step_s": statistics.median(seconds[2:]), "entries": entries[-1], "beat_s": share * BEAT_S}
        output.write_text(json.dumps(figures))
    shut_down()


def main() -> int:
    """Measure and print."""
    if "RANK" in os.environ:
        run_steps(Path(sys.argv[1]))
        return 0
    entry_s = entry_seconds()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu"}
        subprocess.run([*launcher, __file__, str(output)], env=environment, check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(output.read_text())
    step_s, entries, beat_s = figures["step_s"], figures["entries"], figures["beat_s"]
    recorder, watchdog = 100 * entries * entry_s / step_s, 100 * beat_s / BEAT_S
    print(f"an entry: {1e9 * entry_s:.0f} ns; a step of {1000 * step_s:.0f} ms has {entries}: {recorder:.4f} % of it")
    print(f"a beat: {1e6 * beat_s:.0f} us a second on rank 0, which reads all: {watchdog:.3f} % of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
