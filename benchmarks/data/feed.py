"""Measure how micro-batches are best read ahead: in the training thread, in threads beside it, or in processes.

All read the same samples of one token file with the same code. Processes are those of PyTorch's `DataLoader`, as
Megatron's --num-workers has them. Contestants run alternately: A B C A B C ... Each is measured

- alone: as many micro-batches a second as it gives;
- beside a step: how long a step of many small operations takes (as launching kernels does, it needs the interpreter),
  of which "no reading" is the least;
- from slow storage: the same, with 2 ms of waiting for every sample.

    python benchmarks/data/feed.py
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

from megatron.core.datasets.batch import BatchContents, BatchLayout  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import ExternalSamples, GPTSample, SampleDataset  # noqa: E402
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from megatron.core.datasets.micro_batch_reader import MicroBatchReader, ReadAhead  # noqa: E402

VOCABULARY, SLOW_S = 50257, 0.002
SCENES = {"alone": "micro-batches/s", "beside a step": "ms per step", "slow storage": "ms per step"}


@dataclass(frozen=True)
class SlowDataset:
    """Wait before each sample, as for a disk far away."""

    dataset: SampleDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> GPTSample:
        time.sleep(SLOW_S)
        return self.dataset[index]

    def source_of(self, index: int) -> str:
        """Name the data set."""
        return self.dataset.source_of(index)


@dataclass(frozen=True)
class PackedBatches:
    """Give packed micro-batches by their sample numbers: what a `DataLoader` reads from."""

    reader: MicroBatchReader

    def __getitem__(self, sample_ids: list[int]) -> torch.Tensor:
        memory = torch.empty(self.reader.layout.num_bytes, dtype=torch.uint8)
        self.reader.read(sample_ids, memory.numpy())
        return memory


@dataclass(frozen=True)
class Contestant:
    """Name a way of reading; None reads nothing."""

    kind: str | None
    number: int = 0

    @property
    def name(self) -> str:
        """Return the name in the table."""
        return "no reading" if self.kind is None else f"{self.number} {self.kind}"

    @contextmanager
    def batches(self, reader: MicroBatchReader, order: Sequence[list[int]]) -> Iterator[Iterator[Any]]:
        """Give the micro-batches, and end what reads them."""
        batches = PackedBatches(reader)
        if self.kind is None:
            yield itertools.repeat(batches[order[0]])
        elif self.kind == "threads":
            ahead = ReadAhead(batches.__getitem__, iter(order), self.number)
            yield ahead
            ahead.close()
        else:
            loader: DataLoader[torch.Tensor] = DataLoader(
                batches,  # type: ignore[arg-type]
                batch_size=None,
                sampler=order,
                num_workers=self.number,
                collate_fn=_same,
                multiprocessing_context="fork",
            )
            iterator = iter(loader)
            yield iterator
            del iterator


CONTESTANTS = (Contestant(None), *(Contestant("threads", n) for n in (0, 1, 2, 4)), Contestant("processes", 1))
CONTESTANTS += (Contestant("processes", 2),)


def _same(batch: Any) -> Any:
    return batch


def write_text(folder: Path, num_tokens: int) -> str:
    """Write documents of 700 tokens and return their prefix."""
    generator = np.random.default_rng(1234)
    with IndexedDatasetBuilder(folder / "text", np.uint16) as builder:
        for _ in range(num_tokens // 700):
            builder.add_document(generator.integers(0, VOCABULARY, 700))
        builder.finalize()
    return str(folder / "text")


def open_dataset(prefix: str, seq_length: int, num_samples: int) -> SampleDataset:
    """Return the samples."""
    config = GPTDatasetConfig(sequence_length=seq_length, blend=Blend((prefix,)), split="1")
    train = BlendedDatasetBuilder(config, (num_samples, 0, 0), lambda line: None).build().train
    assert train is not None
    assert not isinstance(train, ExternalSamples)
    return train


def step_of(num_operations: int) -> Callable[[], None]:
    """Return a step: small operations, one after the other."""
    tensor = torch.ones(8)

    def step() -> None:
        for _ in range(num_operations):
            tensor.add_(1.0)

    return step


def measure(contestant: Contestant, scene: str, dataset: SampleDataset, options: argparse.Namespace) -> float:
    """Return the scene's figure for one contestant."""
    shown = SlowDataset(dataset) if scene == "slow storage" else dataset
    size = options.micro_batch_size
    layout = BatchLayout(BatchContents(), size, options.seq_length, VOCABULARY)
    count: int = options.num_batches if scene == "alone" else options.num_steps
    order = [list(range(first * size, (first + 1) * size)) for first in range(count + 1)]
    step = step_of(0 if scene == "alone" else options.operations)
    with contestant.batches(MicroBatchReader(shown, layout, VOCABULARY), order) as batches:
        next(batches)
        start = time.perf_counter()
        for _ in range(count):
            next(batches)
            step()
        seconds = time.perf_counter() - start
    return count / seconds if scene == "alone" else 1e3 * seconds / count


def markdown(results: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> str:
    """Return the table: medians, with quartiles in brackets."""
    lines = [
        "# Reading micro-batches ahead",
        "",
        f"Micro-batches of {options.micro_batch_size} x {options.seq_length} tokens; medians of {options.num_rounds} "
        "alternating rounds, quartiles in brackets.",
        "",
        "| | " + " | ".join(f"{scene}, {unit}" for scene, unit in SCENES.items()) + " |",
        "|---" * (len(SCENES) + 1) + "|",
    ]
    for name, scenes in results.items():
        cells = []
        for scene in SCENES:
            values = scenes.get(scene)
            if values is None:
                cells.append("-")
                continue
            low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
            cells.append(f"{median:.4g} ({low:.4g}-{high:.4g})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--num-tokens", type=int, default=50_000_000)
    parser.add_argument("--num-batches", type=int, default=1000, help="read in the first scene")
    parser.add_argument("--num-steps", type=int, default=100, help="in each of the others")
    parser.add_argument("--operations", type=int, default=20_000, help="of a step")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_text(Path(folder), options.num_tokens)
        most = max(options.num_batches, options.num_steps) + 1
        dataset = open_dataset(prefix, options.seq_length, most * options.micro_batch_size)
        for number, scene in itertools.product(range(options.num_rounds), SCENES):
            for contestant in CONTESTANTS:
                if contestant.kind is None and scene == "alone":
                    continue
                figure = measure(contestant, scene, dataset, options)
                results[contestant.name].setdefault(scene, []).append(figure)
                print(f"round {number + 1}, {scene}, {contestant.name}: {figure:.4g} {SCENES[scene]}", flush=True)
    table = markdown(results, options)
    print(table)
    options.results.mkdir(parents=True, exist_ok=True)
    stem = f"feed_cpu_{datetime.date.today()}"
    settings = {name: value for name, value in vars(options).items() if name != "results"}
    described = {"settings": settings, "cpus": os.cpu_count(), "torch": torch.__version__, "units": SCENES}
    (options.results / f"{stem}.json").write_text(json.dumps({**described, "figures": results}, indent=1) + "\n")
    (options.results / f"{stem}.md").write_text(table)


if __name__ == "__main__":
    main()
