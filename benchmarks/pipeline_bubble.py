"""Measure the bubble of the pipeline schedules: stages that sleep, joined by real gloo messages, run by the executor.

    python benchmarks/pipeline_bubble.py --output benchmarks/results/pipeline_bubble_cpu.json

The bubble is a stage's idle time over its busy time, idle being the rest of the time from the first pass of any rank
to the end of the last. Passes sleep, so that eight ranks need no eight cores; forward pass, input gradient and weight
gradient take one time unit each, divided by the number of model chunks on a rank. Whatever else the machine does can
only make a bubble larger: the smallest of the repetitions is the schedule's own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from megatron.core.collectives import barrier
from megatron.core.main_grad import WeightGradQueue
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.executor import (
    MicrobatchLoss,
    ModelChunk,
    PipelineConnection,
    gather_timeline,
    run_schedule,
)
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from megatron.core.pipeline_parallel.schedule_actions import SCHEDULES, StagePlace
from megatron.core.pipeline_parallel.timeline import Timeline
from tests.harness.distributed import run_distributed

SHAPE = (32, 1, 64)


@dataclass(frozen=True)
class Case:
    """Name one measurement."""

    schedule: str
    pp: int
    num_microbatches: int
    num_chunks: int = 1

    @property
    def formula(self) -> float:
        """Return the bubble that the schedule's paper promises."""
        bubble = (self.pp - 1) / (self.num_chunks * self.num_microbatches)
        return bubble / 3 if self.schedule == "zero-bubble" else bubble


CASES = tuple(
    case
    for pp in (2, 4, 8)
    for case in (
        Case("1f1b", pp, 2 * pp),
        Case("interleaved", pp, 2 * pp, 2),
        Case("interleaved", pp, 2 * pp + 1, 2),
        Case("zero-bubble", pp, 2 * pp),
    )
)


class _Sleep(torch.autograd.Function):
    """Sleep for one unit forward, and for two units backward, the second of which can be put off."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, unit_s: float, queue: WeightGradQueue) -> torch.Tensor:
        ctx.unit_s, ctx.queue = unit_s, queue
        time.sleep(unit_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.unit_s)
        if ctx.queue.is_collecting:
            ctx.queue.put(functools.partial(time.sleep, ctx.unit_s))
        else:
            time.sleep(ctx.unit_s)
        return grad, None, None


def sleeping_chunk(place: StagePlace, chunk: int, unit_s: float) -> ModelChunk:
    """Return a model chunk that computes nothing and takes its time."""
    queue = WeightGradQueue()

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor | MicrobatchLoss:
        x = torch.ones(SHAPE, requires_grad=True) if hidden is None else hidden
        x = _Sleep.apply(x, unit_s, queue)  # type: ignore[no-untyped-call]
        return MicrobatchLoss(x.sum(), torch.ones(())) if place.is_last(chunk) else x

    return ModelChunk(forward_step, weight_grad_queue=queue)


def run_on_rank(case: Case, unit_s: float, repeats: int) -> list[Timeline]:
    """Run the iterations on this rank and return what all ranks recorded; the first one warms up."""
    pp = create_parallel_state(ParallelSizes(pp=dist.get_world_size())).pp
    links = create_pipeline_links(pp, wraps_around=case.num_chunks > 1)
    place = StagePlace(pp.size, pp.rank, case.num_chunks)
    connection = PipelineConnection(place, links, lambda microbatch: SHAPE, torch.float32)
    actions = SCHEDULES[case.schedule](pp.size, pp.rank, case.num_microbatches, case.num_chunks, None)
    timelines = []
    for unit in (0.0, *(unit_s / case.num_chunks for _ in range(repeats))):
        chunks = [sleeping_chunk(place, chunk, unit) for chunk in range(case.num_chunks)]
        barrier(pp)
        result = run_schedule(actions, chunks, device=torch.device("cpu"), connection=connection, clock=time.monotonic)
        assert result.timeline is not None
        timelines.append(gather_timeline(result.timeline, pp))
    return timelines[1:]


def measure(case: Case, unit_s: float, repeats: int) -> list[float]:
    """Return the largest bubble of a stage in each repetition."""
    ranks = run_distributed(case.pp, run_on_rank, case, unit_s, repeats, timeout_s=300.0)
    return [timeline.worst_bubble for timeline in ranks[0]]


def main() -> None:
    """Measure every case and print, and write where asked, one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, default=150.0, help="Time of a forward pass through a rank's chunks.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'schedule':<12} {'pp':>2} {'micro-batches':>13} {'chunks':>6} {'formula':>8} {'smallest':>8} {'median':>8}"
    )
    for case in CASES:
        bubbles = measure(case, arguments.unit_ms / 1e3, arguments.repeats)
        smallest, median = min(bubbles), statistics.median(bubbles)
        summary = {"formula": case.formula, "smallest": smallest, "median": median, "bubbles": bubbles}
        rows.append(asdict(case) | summary)
        shape = f"{case.schedule:<12} {case.pp:>2} {case.num_microbatches:>13} {case.num_chunks:>6}"
        print(f"{shape} {case.formula:>8.4f} {smallest:>8.4f} {median:>8.4f}", flush=True)
    if arguments.output is not None:
        setting = {
            "unit_ms": arguments.unit_ms,
            "message": f"{SHAPE} float32 over gloo",
            "torch": torch.__version__,
            "machine": describe_machine(),
        }
        arguments.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # Ranks find this file's classes by its name, which is not the one that it has as a script.
    from benchmarks import pipeline_bubble

    pipeline_bubble.main()
