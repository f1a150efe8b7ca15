"""Trials of the fault examination: a fault drawn by a seed, the run that it befalls, and whether it was named."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.config.run_config import FaultConfig
from megatron.training.fault_tolerance.anomaly_detector import FaultInjection
from tests.e2e.toy_run import toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training

LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
}
KINDS = ("data", "weights", "transient device", "persistent device")
_WEIGHTS = (
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
    "decoder.layers.1.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
)
_RATE = 12
_BATCH = 4
_WATCH = "--spike-policy stop --spike-window 8 --train-iters 14 --save-interval 100 --eval-interval 100"


@dataclass(frozen=True)
class FaultTrial:
    """Hold one fault and where it happens; what is right to say of it is known here alone.

    ``iteration`` counts from 1. Faults of devices are injected by the run itself, by its ``seed``.
    """

    kind: str
    layout: str
    seed: int
    iteration: int
    sample: int
    rank: int
    weight: str
    value: float

    @classmethod
    def drawn(cls, seed: int, kind: str, layout: str) -> FaultTrial:
        """Return the fault of a kind, at a layout, that a seed draws."""
        numbers = random.Random(f"{seed}/{kind}/{layout}")
        num_processes = LAYOUTS[layout][0]
        weight, iteration, rank = numbers.choice(_WEIGHTS), numbers.randrange(5, 11), numbers.randrange(num_processes)
        if layout == "pp2":
            rank = int("layers.1" in weight)
        sample = (iteration - 1) * _BATCH + numbers.randrange(_BATCH)
        value = numbers.choice((float("nan"), float("inf"), 3.0e30))
        run_seed = numbers.randrange(100_000)
        if "device" in kind:
            while (found := _first_injection(run_seed, num_processes)) is None:
                run_seed += 1
            iteration, rank = found
        return cls(kind, layout, run_seed, iteration, sample, rank, weight, value)

    def happen(self, folder: Path) -> str:
        """Train until the fault is found, and return the line that was recorded of it; empty where nothing was."""
        num_processes, layout = LAYOUTS[self.layout]
        record = folder / "examined.txt"
        per_iteration = _BATCH // 2 // (2 if self.layout == "dp2" else 1)
        flags = f"{_WATCH} {layout} --seed {self.seed}"
        faults = Faults()
        if self.kind == "data":
            faults = Faults(poisoned=(self.sample,), poison=numbers_of(self.value))
        elif self.kind == "weights":
            at = (self.iteration - 1) * per_iteration + 1
            faults = Faults(rank=self.rank, bad_weight_at=at, bad_weight=self.value, drifting_parameter=self.weight)
        else:
            flags += f" --error-injection-rate {_RATE} --error-injection-type {self.kind.split()[0]}_error"
        args = toy_args(folder, flags, "--result-rejected-tracker-filename", record)
        fork_training(args, num_processes, faults)
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else [""]
        return lines[0]

    def is_named(self, line: str) -> bool:
        """Return whether a line says what happened: the cause, the iteration, and the sample, weight or rank."""
        found = re.fullmatch(
            r"ts=\S+ node=\S+ iteration=(\d+) cause=(\S+) ranks=(\S+) samples=(\S+) message=(.*)", line
        )
        if found is None:
            return False
        iteration, cause, ranks, samples, message = found.groups()
        if (int(iteration), cause) != (self.iteration, self.kind.replace(" ", "_")):
            return False
        if self.kind == "data":
            return samples == str(self.sample)
        if self.kind == "weights":
            return self.weight in message and f"rank {self.rank}" in message
        return ranks == str(self.rank)


def numbers_of(value: float) -> float:
    """Return how many times as large a bad sample's loss is: itself, or a hundred times in place of what overflows."""
    return 100.0 if value == 3.0e30 else value


def _first_injection(seed: int, num_processes: int) -> tuple[int, int] | None:
    """Return the iteration and the rank of a run's first injected fault, if it is neither too early nor too late."""
    config = FaultConfig(error_injection_rate=_RATE)
    for iteration in range(10):
        places = [FaultInjection(config, seed, rank, num_processes) for rank in range(num_processes)]
        for place in places:
            place.begin(iteration)
        here = [rank for rank, place in enumerate(places) if place.is_here(iteration)]
        if here:
            return (iteration + 1, here[0]) if iteration >= 4 else None
    return None
