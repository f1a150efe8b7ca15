"""Measure what a micro-batch costs the host: the layers of GPT-2 345M one operation after the other, and as graphs.

    python benchmarks/launch_cost/run.py --output benchmarks/results/launch_cost_cpu_DATE
    python benchmarks/launch_cost/run.py --against OTHER_TREE

The model has the 24 layers and all operations of GPT-2 345M, on tensors of so few elements that computing them costs
next to nothing: what is left is the host's work, which does not depend on sizes. Meta tensors do not serve: torch
computes many of their shapes in Python, which costs several times as much. A graph is a call that does nothing: its
launch on a GPU, a few microseconds at best, is left out. Time is that of the processor in this thread: other work on
the machine does not count. Variants alternate. On a CPU: a CUDA build takes some operations together and launches
others.

With ``--against`` the same measurement alternates with that of another checkout, without graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
LAYERS, LENGTH, BATCH, VOCABULARY = 24, 4, 2, 128
MICROBATCHES, REPEATS = 4, 9


class LaunchedGraph:
    """Stand for a graph whose launch costs nothing; its work is done when it is recorded, and never again."""

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        """Do nothing."""


class LaunchBackend:
    """Record work as what does nothing."""

    def capture(self, work: Callable[[], tuple[torch.Tensor, ...]]) -> LaunchedGraph:
        """Do the work once, so that its results have a place."""
        return LaunchedGraph(work())


def measure(dropout: float, with_graphs: bool) -> list[float]:
    """Return the milliseconds of several micro-batches, forward and backward."""
    import torch

    from megatron.core.device import Device
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_config import GPTConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.ops.dropout import DropoutSamples
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.tensor_parallel.random import RngStreams

    torch.set_num_threads(1)
    config = GPTConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_dropout=dropout,
        attention_dropout=0.0,
    )
    state = create_parallel_state()
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 1, state.place), seed=1)
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    if with_graphs:
        from megatron.training.model_setup import record_layers

        (graphs,) = record_layers([model], LaunchBackend(), 0)
        graphs.begin_step()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).expand(BATCH, -1)

    def step() -> float:
        wrapped.zero_grad_buffer()
        start = time.thread_time()
        for number in range(MICROBATCHES):
            samples = DropoutSamples.at(1, 0, number * BATCH, BATCH, "cpu") if dropout else None
            wrapped(tokens, positions, labels=tokens, dropout_samples=samples).sum().backward()
        return (time.thread_time() - start) / MICROBATCHES * 1e3

    step()
    return [step() for _ in range(REPEATS)]


def measure_in(tree: Path, dropout: float, with_graphs: bool) -> list[float]:
    """Return what a process of its own measures on a checkout."""
    command = [sys.executable, __file__, "--measure", str(dropout), str(int(with_graphs)), str(tree)]
    return cast("list[float]", json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def compare(variants: dict[str, tuple[Path, bool]], dropout: float) -> dict[str, dict[str, float]]:
    """Return median, smallest and largest time of each variant over three alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, (tree, with_graphs) in variants.items():
            times[name] += measure_in(tree, dropout, with_graphs)
    return {
        name: {"median_ms": statistics.median(values), "min_ms": min(values), "max_ms": max(values)}
        for name, values in times.items()
    }


def main() -> None:
    """Measure without dropout and with, and write the figures to OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, help="another checkout to alternate with")
    parser.add_argument("--output", type=Path, help="path without its ending")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        dropout, with_graphs, tree = arguments.measure
        sys.path.insert(0, tree)
        print(json.dumps(measure(float(dropout), with_graphs == "1")))
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.machine import describe_machine

    variants = {"without graphs": (ROOT, False), "with graphs": (ROOT, True)}
    if arguments.against:
        variants["without graphs, the other tree"] = (arguments.against.resolve(), False)
    results = {f"hidden dropout {dropout}": compare(variants, dropout) for dropout in (0.0, 0.1)}
    lines = ["# What a micro-batch of GPT-2 345M costs the host", "", f"{describe_machine()}, processor time in ms", ""]
    lines += ["| dropout | variant | median | smallest | largest |", "|---|---|---|---|---|"]
    for case, by_name in results.items():
        for name, row in by_name.items():
            lines.append(f"| {case} | {name} | " + " | ".join(f"{value:.1f}" for value in row.values()) + " |")
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
