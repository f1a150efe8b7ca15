"""Part 5: GPT-2 345M without a profiler: time per step with and without CUDA graphs, and whether the losses agree."""

from __future__ import annotations

import statistics

import torch

from tests.gpu.window.shapes import TimedRun, gpt2_runs, shapes_of
from tests.gpu.window.train import largest_difference, training
from tests.gpu.window.window import Window

NUM_WARMUP = 4
"""Steps that are not timed; graphs are recorded in the fourth."""
_TOLERANCE = 1e-3
"""Losses in bf16 that are computed twice by the same kernels, of which some add in any order."""


def run(window: Window) -> None:
    """Train and compare."""
    losses: dict[str, list[float]] = {}
    for timed in gpt2_runs(shapes_of(small=window.small), small=window.small):
        name = f"GPT-2 345M, {timed.name}"
        if not window.is_time_for(name, 1.0):
            continue
        with window.attempt(name):
            losses[timed.name] = time_run(window, name, timed)
    for count in ("2 micro-batches", "1 micro-batch"):
        plain, graphed = losses.get(count), losses.get(f"{count}, CUDA graphs")
        if plain is None or graphed is None:
            continue
        shared = min(len(plain), len(graphed))
        difference = largest_difference(graphed[:shared], plain[:shared])
        window.close_to(
            f"losses with CUDA graphs, {count}", difference, _TOLERANCE, f"the losses without graphs of {shared} steps"
        )


def time_run(window: Window, name: str, timed: TimedRun) -> list[float]:
    """Train a configuration, write its time per step, memory and last loss, and return its losses."""
    torch.cuda.reset_peak_memory_stats()
    with training(timed.flags, window.device, draws_on_device=not window.small) as run:
        # A step and a half are kept for what comes behind this run.
        run.run(timed.steps, lambda: window.time_left() > 0.0 or len(run.losses) <= NUM_WARMUP + 1)
        times = run.step_ms[min(NUM_WARMUP, len(run.step_ms) - 1) :]
        step_ms = statistics.median(times)
        tokens = run.config.training.global_batch_size * run.config.data.seq_length
        if any(loss != loss or abs(loss) == float("inf") for loss in run.losses):
            raise RuntimeError(f"the losses are {run.losses}")
        window.value(
            name,
            step_ms,
            "ms per step",
            key=timed.key,
            fastest_ms=min(times),
            slowest_ms=max(times),
            steps=len(times),
            tokens_per_second=tokens / step_ms * 1e3,
            last_loss=run.losses[-1],
        )
        peak = torch.cuda.max_memory_allocated() / 2**30
        window.value(f"{name}: peak memory", peak, "GiB", key=f"{timed.key}/memory")
        return run.losses
