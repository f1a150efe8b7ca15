"""Compare training steps with weights sharded over two ranks with those of the distributed optimizer.

    torchrun --nproc-per-node 2 benchmarks/step/sharded_weights.py [--rounds 20] [--microbatches 1]

Both train one model from the same values on the same tokens, in turn, in the same processes, and reduce gradients while
the backward pass runs. A round is a step of each; each is first in every other round. What is printed are medians of
wall time and of processor time, the median of the rounds' ratios, and the last losses. Where other work shares the
processors, their time says more than the clock's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import describe_machine
from benchmarks.small_model import LENGTH, SHAPE, VOCABULARY
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.model import wrap_model
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import single_rank_group
from tests.harness.toy_model import make_model

_BATCH = 4
_SHAPE = {**SHAPE, "num_layers": 4, "ffn_hidden_size": 1024}


class Trained:
    """Hold a model that is sharded in one way and its optimizer, and train them step by step."""

    def __init__(self, strategy: str, state: ParallelState) -> None:
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
        self.chunk = wrap_model(make_model(single_rank_group(), **_SHAPE), config, state)
        self.optimizer = make_optimizer(OptimizerConfig(lr=1e-3, min_lr=1e-4), [self.chunk], state)
        self.times: list[float] = []
        self.processor_times: list[float] = []
        self.loss = 0.0

    def step(self, microbatches: list[torch.Tensor]) -> None:
        """Train one step, and note its loss and its time."""
        dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        self.chunk.zero_grad_buffer()
        positions = torch.arange(LENGTH).expand(_BATCH, -1)
        for number, tokens in enumerate(microbatches, start=1):
            loss = self.chunk.module(tokens[:, :-1], positions, labels=tokens[:, 1:]).mean() / len(microbatches)
            if number == len(microbatches):
                loss.backward()
            else:
                with self.chunk.no_sync():
                    loss.backward()
        self.chunk.finish_grad_sync()
        self.optimizer.step()
        dist.barrier()
        self.times.append(time.perf_counter() - start)
        self.processor_times.append(time.process_time() - processor_start)
        self.loss = loss.item() * len(microbatches)


def main() -> None:
    """Measure, and let the first rank print a line for each way and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds that count (20)")
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="of a step, 4 x 512 tokens each (1)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = create_parallel_state()
    ways = {name: Trained(name, state) for name in ("optim", "optim_grads_params")}
    generator = torch.Generator().manual_seed(1 + state.rank)
    for number in range(arguments.rounds + 2):
        shape = (_BATCH, LENGTH + 1)
        tokens = [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(arguments.microbatches)]
        order = list(ways.values())
        for way in order if number % 2 else reversed(order):
            way.step(tokens)
    if state.rank == 0:
        print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {_SHAPE}")
        for name, way in ways.items():
            times = sorted(way.times[2:])  # The first steps allocate.
            print(
                f"{name}: median {statistics.median(times):.3f} s a step (quickest {times[0]:.3f}, slowest "
                f"{times[-1]:.3f}), of processor {statistics.median(way.processor_times[2:]):.3f} s, "
                f"last loss {way.loss:.6f}"
            )
        base, sharded = ways.values()
        for kind, pairs in (
            ("wall", zip(base.times, sharded.times)),
            ("processor", zip(base.processor_times, sharded.processor_times)),
        ):
            ratios = [b / a for a, b in list(pairs)[2:]]
            print(f"sharded weights / distributed optimizer, {kind} time: median {statistics.median(ratios):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
