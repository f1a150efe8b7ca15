"""Measure what --compile gains: steps with and without it alternate in one process, in processor time.

    python benchmarks/step/compiled.py --is-gated --is-rotary --hidden-size 128 …

Other work on the machine changes both in the same way. The first steps are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ours import WorkloadDataset, configure
from workload import Workload, add_workload_arguments, workload_of

_NUM_WARMUP = 2


def make_step(workload: Workload, num_steps: int) -> Callable[[], float]:
    """Build a model, and return a function that trains one step and returns its loss."""
    from megatron.checkpoint.train_state import TrainState
    from megatron.core.device import Device
    from megatron.core.timers import Timers
    from megatron.training.batch_source import BatchSource
    from megatron.training.initialize import make_runtime
    from megatron.training.model_setup import build_model_and_optimizer
    from megatron.training.training_step import TrainingStep
    from pretrain_gpt import forward_step, provide_model

    config = configure(workload, num_steps, 1, 0)
    runtime = make_runtime(config, Device("cpu"))
    parts = build_model_and_optimizer(
        config, runtime, provide_model, lambda line: print(line) if "--compile" in line else None
    )
    dataset = WorkloadDataset(workload, num_steps * workload.micro_batch_size)
    source = BatchSource(dataset, config, runtime, workload.vocab_size, 0)
    step, state = TrainingStep(config, runtime, parts, forward_step, Timers()), TrainState()
    return lambda: step.run(state, source, workload.micro_batch_size, None)[0].lm_loss


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch

    torch.set_num_threads(options.threads)
    workload = workload_of(options)
    num_steps = _NUM_WARMUP + options.num_steps
    steps = [make_step(replace(workload, is_compiled=is_compiled), num_steps) for is_compiled in (False, True)]
    times: tuple[list[float], list[float]] = ([], [])
    losses = [0.0, 0.0]
    for number in range(num_steps):
        # Each goes first in every second round.
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            losses[which] = steps[which]()
            times[which].append(time.process_time() - start)
    plain, compiled = (each[_NUM_WARMUP:] for each in times)
    ratios = [after / before for before, after in zip(plain, compiled)]
    for name, values, factor in (("without", plain, 1e3), ("--compile", compiled, 1e3), ("ratio", ratios, 1.0)):
        lower, median, upper = (factor * value for value in statistics.quantiles(values, n=4))
        print(f"{name}: {median:.4g} [{lower:.4g}-{upper:.4g}]")
    print(f"losses {losses[0]:.6f} {losses[1]:.6f}")


if __name__ == "__main__":
    main()
