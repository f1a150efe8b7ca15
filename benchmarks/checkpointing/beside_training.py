"""Measure how much an asynchronous save lengthens the training steps beside it, and what a synchronous one costs.

Blocks of steps alternate: without a save, and with one that begins after the first step of the block. The steps of a
block go on until the save is published. A step's time includes what saving takes of the training thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from trained_state import build_state, parse_arguments

from megatron.training.checkpointing import CheckpointSaver


def timed_step(step: Callable[[], None], after: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of a step and of what follows it on the training thread."""
    start = time.perf_counter()
    step()
    after()
    return time.perf_counter() - start


def block_with_save(step: Callable[[], None], saver: CheckpointSaver, save: Callable[[], None]) -> list[float]:
    """Return the seconds of every step from the one that ends with a save to the one that ends with its publication."""
    times = [timed_step(step, save)]
    while saver.is_saving:
        times.append(timed_step(step, saver.poll))
    return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=4, help="steps without a save in each round")
    options, workload = parse_arguments(parser)
    state = build_state(workload, 10_000)
    step = state.steps(10_000)
    saver = state.saver(options.folder / "async", async_save=True, keep_last=1)
    at_once = state.saver(options.folder / "at-once", keep_last=1)
    plain: list[float] = []
    beside: list[list[float]] = []
    staged_s: list[float] = []
    synchronous_s: list[float] = []

    def begin_save() -> None:
        start = time.perf_counter()
        state.save(saver, len(beside) + 1)
        staged_s.append(time.perf_counter() - start)

    step()
    block_with_save(step, saver, begin_save)  # takes the memory for the staged copy
    staged_s.clear()
    for number in range(options.num_rounds):
        plain += [timed_step(step) for _ in range(options.num_steps)]
        beside.append(block_with_save(step, saver, begin_save))
        start = time.perf_counter()
        state.save(at_once, number + 1)
        synchronous_s.append(time.perf_counter() - start)
        print(f"without {plain[-1]:.2f} s, beside {' '.join(f'{t:.2f}' for t in beside[-1])} s", flush=True)
    figures = {
        "num_bytes": sum(tensor.nbytes for tensor in state.flat().values()),
        "plain_step_s": plain,
        "beside_step_s": beside,
        "staging_s": staged_s,
        "synchronous_save_s": synchronous_s,
    }
    options.output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
