"""Simulate the runs of the table of GPU gains in a checkout, and compare them with those of an earlier checkout.

    python benchmarks/gpu_dry_run/gains.py --checkout TREE --output FIGURES.json [--before EARLIER.json]
        [--runs NAME ...] [-- FLAGS]

Every figure is a prediction of `megatron simulate` (docs/simulation.md). FLAGS are added to the command line of each
run. The split of a difference is that of the rank that determines the step: bytes are the time of memory-bound kernels
by their bytes, launches is what the shortest kernel adds to it, FLOPs is the time of GEMMs and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_dry_run.run import COMMON, GPT2_345M, LLAMA_8B
from megatron.planner.gpu import find_gpu
from megatron.planner.step_time import MEMORY_SHARE

_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_TP_2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_FSDP = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
_LLAMA_70B = (
    *("--model-preset", "llama3.1-70b", "--vocab-size", "128255", "--micro-batch-size", "1"),
    *("--tensor-model-parallel-size", "8", "--sequence-parallel", "--pipeline-model-parallel-size", "4"),
)
_EXPERTS = (
    *("--seq-length", "4096", "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "8"),
)
_MIXTRAL = ("--model-preset", "mixtral-8x7b", "--vocab-size", "31999", *_EXPERTS)
_QWEN3 = ("--model-preset", "qwen3-30b-a3b", "--vocab-size", "151935", *_EXPERTS)
RUNS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "345m": (1, (*GPT2_345M, "--global-batch-size", "16")),
    "8b-tp2": (8, (*LLAMA_8B, *_TP_2, "--global-batch-size", "16")),
    "8b-fsdp": (8, (*LLAMA_8B, *_FSDP, "--global-batch-size", "32")),
    "70b": (64, (*_LLAMA_70B, *_SHARDED, "--global-batch-size", "32")),
    "mixtral": (64, (*_MIXTRAL, *_SHARDED, "--global-batch-size", "128")),
    "qwen3": (16, (*_QWEN3, *_SHARDED, "--global-batch-size", "32")),
}
"""Ranks and flags of each run, all with four micro-batches per step except 345M (2) and 70B (16)."""
_PARTS = ("launches", "bytes", "FLOPs", "exposed communication", "pipeline idle")


def simulate(name: str, checkout: Path, gpu_name: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run `megatron simulate` of a checkout, and return the figures of a run."""
    world_size, own = RUNS[name]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*own, *COMMON, *flags, "--world-size", str(world_size), "--gpu", gpu_name]
        subprocess.run(
            [sys.executable, "-m", "megatron", "simulate", *command, "--json", str(report)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found = json.loads(report.read_text())
    bandwidth = find_gpu(gpu_name).memory_bandwidth * MEMORY_SHARE
    memory = found["by_kind"]["memory"]
    by_bytes = memory["bytes"] / bandwidth * 1e3
    parts = (
        memory["ms"] - by_bytes,
        by_bytes,
        sum(found["by_kind"][kind]["ms"] for kind in ("products", "attention")),
        found["communication_ms"],
        found["bubble_ms"],
    )
    names = ("predicted_ms", "mfu", "slowest_rank", "rank", "kernels", "bytes", "flops", "hidden_communication_ms")
    return {
        **{key: found[key] for key in names},
        "run": name,
        "gpu": gpu_name,
        "flags": list(flags),
        "waits": len(found["waits"]),
        "peak_gib": found["peak_bytes"] / 2**30,
        "parts_ms": dict(zip(_PARTS, parts)),
        "phase_ms": {phase: part["ms"] for phase, part in found["by_phase"].items()},
    }


def to_table(results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as Markdown, with the gain of each part if there are earlier figures of the same runs."""
    earlier = {result["run"]: result for result in before}
    lines = [
        "| run | ms | MFU | kernels | waits | peak GiB | " + " | ".join(_PARTS) + " |",
        "|---|" + "---:|" * (5 + len(_PARTS)),
    ]
    for result in results:
        first = earlier.get(result["run"])
        shown = [_cells(each) for each in ([] if first is None else [first]) + [result]]
        cells = [" → ".join(values) for values in zip(*shown)]
        for part in _PARTS:
            milliseconds = result["parts_ms"][part]
            change = None if first is None else milliseconds - first["parts_ms"][part]
            cells.append(f"{milliseconds:.1f}" if change is None else f"{change:+.1f}")
        lines.append(f"| {result['run']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{result['predicted_ms']:.1f}",
        f"{result['mfu']:.1%}",
        f"{result['kernels']:,}",
        f"{result['waits']}",
        f"{result['peak_gib']:.1f}",
    )


def main() -> None:
    """Simulate the runs, print their table, and write the figures to the output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=tuple(RUNS))
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="the output of an earlier checkout or without FLAGS")
    parser.add_argument("flags", nargs="*", help="flags of each run, after --")
    arguments = parser.parse_args()
    results = [simulate(name, arguments.checkout, arguments.gpu, arguments.flags) for name in arguments.runs]
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    before = [] if arguments.before is None else json.loads(arguments.before.read_text())
    print(to_table(results, before), end="")


if __name__ == "__main__":
    main()
