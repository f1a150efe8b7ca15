"""A training timed as a user runs it, with a trace, and what the dry run predicts of it; then its memory history."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.planner.gpu import GPUS
from tests.harness.training_run import REPOSITORY, run_command, run_training

_COMMON = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--lr-decay-style", "constant"),
    *("--eval-iters", "0", "--hidden-dropout", "0", "--attention-dropout", "0"),
)
GPT2_345M = (
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--vocab-size", "50256", "--micro-batch-size", "8", "--bf16", *_COMMON),
)
SHAPE_8B = (
    *("--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"),
    *(
        "--group-query-attention",
        "--num-query-groups",
        "8",
        "--seq-length",
        "8192",
        "--max-position-embeddings",
        "8192",
    ),
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-base", "500000"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--vocab-size", "128255"),
    *("--micro-batch-size", "1", "--bf16", "--recompute-granularity", "selective", *_COMMON),
)
LAYERS_8B = 32
NUM_STEPS = 20
_NUM_WARMUP = 4
_NUM_PROFILED = 2
_MEMORY_SHARE = 0.85
"""Part of a GPU's memory that live tensors may fill: libraries, NCCL and fragmentation take the rest."""
_MEMORY_LINE = re.compile(r"max allocated: ([0-9.]+)")


LAYOUTS = ("data parallel", "tensor parallel")
"""Layouts of GPT-2 345M over all GPUs of a node."""
_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def layout_flags(layout: str, num_gpus: int) -> tuple[str, ...] | None:
    """Return the flags of a layout of ``LAYOUTS``; None if another one has the same command."""
    if num_gpus == 1:
        return (*GPT2_345M, "--global-batch-size", "16") if layout == LAYOUTS[0] else None
    if layout == LAYOUTS[0]:
        return (*GPT2_345M, "--global-batch-size", str(16 * num_gpus), *_SHARDED)
    tensor = ("--tensor-model-parallel-size", str(num_gpus), "--sequence-parallel")
    return (*GPT2_345M, "--global-batch-size", "16", *tensor)


@dataclass(frozen=True)
class Timing:
    """Name a training: its flags, its ranks, the GPU type that it is predicted for, and what to say of it."""

    name: str
    flags: tuple[str, ...]
    num_ranks: int
    gpu: str | None = None
    note: str = ""
    num_steps: int = NUM_STEPS


def time_training(timing: Timing, folder: Path, timeout_s: float = 1800.0) -> dict[str, Any]:
    """Run a training and return its row: figures after the warm-up and before the profiled iterations.

    Raises:
        AssertionError: the training failed.
    """
    place = folder / re.sub(r"\W+", "-", timing.name)
    first_profiled = timing.num_steps - _NUM_PROFILED
    flags: tuple[str | Path, ...] = (
        *(*timing.flags, "--train-iters", str(timing.num_steps), "--log-interval", str(first_profiled)),
        *(
            "--profile",
            "--use-pytorch-profiler",
            "--tensorboard-dir",
            place,
            "--metrics-jsonl",
            place / "metrics.jsonl",
        ),
        *("--profile-step-start", str(first_profiled), "--profile-step-end", str(timing.num_steps)),
    )
    result = run_training(flags, timing.num_ranks, timeout_s=timeout_s).check()
    steps = result.iterations()[_NUM_WARMUP:first_profiled]
    peak = _MEMORY_LINE.search(result.stdout)
    assert peak is not None, "the run logs its memory"
    assert steps, "the warm-up and the profile leave iterations to time"
    # Recording costs time at every allocation, and the file can take minutes to write: never while a step is timed.
    without_history = _record_memory_history(timing, place, timeout_s)
    return {
        "name": timing.name,
        "ranks": timing.num_ranks,
        "flags": [str(flag) for flag in timing.flags],
        "note": timing.note,
        "step_ms": 1e3 * statistics.median(step["step_time_s"] for step in steps),
        "steps_ms": [1e3 * step["step_time_s"] for step in steps],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "tflops": statistics.median(step["tflops_per_device"] for step in steps),
        "mfu": None if steps[0]["mfu"] is None else statistics.median(step["mfu"] for step in steps),
        "max_allocated_mib": float(peak[1]),
        "last_loss": result.losses()[-1],
        "predicted": _predicted(timing, place),
        "without_memory_history": without_history,
        "files": sorted(path.relative_to(folder).as_posix() for path in place.iterdir()),
    }


def _record_memory_history(timing: Timing, place: Path, timeout_s: float) -> str:
    """Train two more iterations with the memory's history on; return why there is none, "" if there is."""
    flags = (*timing.flags, "--train-iters", "2", "--record-memory-history")
    try:
        run_training(
            (*flags, "--memory-snapshot-path", place / "memory.pickle"), timing.num_ranks, timeout_s=timeout_s
        ).check()
    except AssertionError as error:
        return str(error).splitlines()[-1]
    return ""


def dry_run(flags: Sequence[str], num_ranks: int, gpu: str, path: Path) -> dict[str, Any]:
    """Return what the dry run says of the first rank.

    Raises:
        AssertionError: it failed; the message has its reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [sys.executable, REPOSITORY / "tools" / "gpu_dry_run.py", *flags, "--train-iters", "1"]
    command += ["--world-size", str(num_ranks), "--gpu", gpu, "--json", path]
    run_command(command, timeout_s=600.0).check()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def gpu_type(device_name: str) -> str | None:
    """Return the dry run's name of a device, or None where it has no figures of it."""
    return next((name for name in GPUS if name.partition("-")[0].upper() in device_name.upper()), None)


def layers_that_fit(
    flags: Sequence[str], num_layers: int, num_ranks: int, gpu: str, memory_bytes: int, folder: Path
) -> tuple[int, str]:
    """Return how many layers of a model fit into the memory of a rank, by two dry runs, and a note where not all do.

    What a layer takes is the difference of a dry run of two layers and one of four.
    """
    peaks = [
        dry_run((*flags, "--num-layers", str(count)), num_ranks, gpu, folder / f"layers-{count}.json")["peak_bytes"]
        for count in (2, 4)
    ]
    of_a_layer = (peaks[1] - peaks[0]) / 2
    room = memory_bytes * _MEMORY_SHARE - peaks[0]
    count = min(num_layers, max(1, 2 + int(room // of_a_layer)))
    if count == num_layers:
        return count, ""
    return count, f"{count} of {num_layers} layers: more do not fit into {memory_bytes / 2**30:.1f} GiB by the dry run."


def _predicted(timing: Timing, place: Path) -> dict[str, Any]:
    if timing.gpu is None:
        return {"reason": "no figures are known of this device"}
    try:
        found = dry_run(timing.flags, timing.num_ranks, timing.gpu, place / "dry_run.json")
    except AssertionError as error:
        return {"reason": str(error).splitlines()[-1]}
    return {
        "gpu": timing.gpu,
        "step_ms": found["predicted_ms"],
        "tflops": found["tflops"],
        "mfu": found["mfu"],
        "mib": found["peak_bytes"] / 2**20,
    }
