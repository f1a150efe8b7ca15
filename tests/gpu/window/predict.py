"""Predictions of what a GPU window measures: by the roofline and by dry runs, on the CPU."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.flex_attention import BLOCK_SIZE, make_block_mask
from megatron.planner.gpu import Gpu, find_gpu
from megatron.planner.simulation.operators import AttentionCall, choose_attention_kernel
from megatron.planner.simulation.recorder import TO_DEVICE, Gemm, HostCopy, Operation
from megatron.planner.simulation.roofline import operation_seconds, transfer_seconds
from tests.gpu.timing import dry_run
from tests.gpu.window.shapes import (
    AttentionShape,
    GemmShape,
    TimedRun,
    attention_shapes,
    gpt2_runs,
    grouped_layers,
    headline_runs,
    linear_layers,
    shapes_of,
)
from tests.harness.training_run import run_command

LABEL = "predictions of the roofline and of dry runs, none of which is a measurement"
GPU_TYPES = ("h100-80gb", "h200", "a100-80gb", "b200")
_GIB = 2**30
_PARALLEL = 2
Predictions = dict[str, float]


def predict_all(path: Path, gpus: Sequence[str] | None = None, *, small: bool) -> None:
    """Predict a window of each GPU type and put the predictions into a file, whose others stay.

    A file has ``full`` and ``small`` sizes, each with the GPU types, each with values by key.
    """
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    content["label"] = LABEL
    sizes = content.setdefault("small" if small else "full", {})
    for name in gpus or GPU_TYPES:
        begun = time.monotonic()
        gpu = find_gpu(name)
        values = dict(predict_kernels(gpu, small=small))
        values |= predict_trainings(gpu, small=small)
        sizes[gpu.name] = {key: float(f"{value:.5g}") for key, value in sorted(values.items())}
        content["made"] = {**content.get("made", {}), f"{'small' if small else 'full'} {gpu.name}": _made()}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        print(f"{len(values)} predictions for {gpu.name} in {time.monotonic() - begun:.0f} s: {path}", flush=True)


def _made() -> str:
    commit = run_command(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown commit"
    return f"{time.strftime('%Y-%m-%d')}, {commit}, torch {torch.__version__}"


def predict_kernels(gpu: Gpu, *, small: bool) -> Iterator[tuple[str, float]]:
    """Yield the key and the value of each prediction of parts 1, 2 and 4."""
    yield "kernel", 1e6 * operation_seconds(_moving("add_", 16), gpu)
    num_bytes = 2**16 if small else 2**30
    yield "copy", 2 * num_bytes / operation_seconds(_moving("copy_", 2 * num_bytes), gpu) / 1e9
    copied = num_bytes // 4
    yield "host copy", copied / transfer_seconds(HostCopy("forward", "", TO_DEVICE, copied), gpu) / 1e9
    size = 64 if small else 8192
    yield "large matmul", 2.0 * size**3 / operation_seconds(_gemm(1, size, size, size, 2, 6 * size**2), gpu) / 1e12
    shapes = shapes_of(small=small)
    for shape in linear_layers(shapes):
        yield from _linear(shape, gpu)
    for shape in grouped_layers(shapes, (2, 4)) if small else grouped_layers(shapes):
        yield from _grouped(shape, gpu)
    for call in attention_shapes(small=small):
        yield from _attention(call, gpu)


def _moving(name: str, num_bytes: int) -> Operation:
    return Operation("forward", name, "", (), 2, num_bytes)


def _gemm(batch: int, rows: float, inner: float, columns: float, itemsize: int, num_bytes: float) -> Operation:
    gemm = Gemm(batch, rows, inner, columns)
    return Operation("forward", "mm", "", (), itemsize, int(num_bytes), gemm.flops, gemm)


def _linear(shape: GemmShape, gpu: Gpu) -> Iterator[tuple[str, float]]:
    tokens, inner, outer = shape.tokens, shape.inner, shape.outer
    operands = 2.0 * (tokens * inner + inner * outer + tokens * outer)
    sums = 2.0 * (tokens * inner + tokens * outer) + 8.0 * inner * outer
    found = {
        f"{shape.name}, forward, bf16": _gemm(1, tokens, inner, outer, 2, operands),
        f"{shape.name}, input gradient, bf16": _gemm(1, tokens, outer, inner, 2, operands),
        f"{shape.name}, weight gradient, bf16": _gemm(1, outer, tokens, inner, 2, operands),
        f"{shape.name}, weight gradient, fp32 sums": _gemm(1, outer, tokens, inner, 2, sums),
    }
    if gpu.float8_flops:
        moved = tokens * inner + inner * outer + 2.0 * tokens * outer
        found[f"{shape.name}, forward, FP8"] = _gemm(1, tokens, inner, outer, 1, moved)
    for name, operation in found.items():
        yield name, 1e3 * operation_seconds(operation, gpu)


def _grouped(shape: GemmShape, gpu: Gpu) -> Iterator[tuple[str, float]]:
    rows, inner, outer, groups = shape.tokens / shape.groups, shape.inner, shape.outer, shape.groups
    moved = 2.0 * groups * (rows * inner + inner * outer + rows * outer)
    found = {
        "forward": _gemm(groups, rows, inner, outer, 2, moved),
        "input gradient": _gemm(groups, rows, outer, inner, 2, moved),
        "weight gradient": _gemm(groups, outer, rows, inner, 2, moved),
    }
    for name, operation in found.items():
        yield f"{shape.name}, {name}, grouped bf16", 1e3 * operation_seconds(operation, gpu)


def _attention(call: AttentionShape, gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Yield forward and backward times of the kernels whose names are known beforehand, sinks left out."""
    causal = call.length**2 / 2
    second = call.length // 2
    ids = (torch.arange(call.length) >= second).long()[None]
    window = call.length // 4
    in_window = sum(min(window, place + 1) for place in range(call.length))
    flash = "_scaled_dot_product_flash_attention"
    kernels = {
        "attention, cuDNN causal": ("_scaled_dot_product_cudnn_attention", causal),
        "attention, flash causal": (flash, causal),
        "attention, as chosen, causal": (f"_scaled_dot_product_{_chosen(call, gpu)}", causal),
        "attention, as chosen, window of a quarter": ("_flash_attention_forward", float(in_window)),
        "attention block of a context-parallel ring": (f"_scaled_dot_product_{_chosen(call, gpu)}", causal),
    }
    if call.length % BLOCK_SIZE == 0:
        documents = AttentionPattern(document_ids=ids)
        kernels["attention, as chosen, two documents"] = ("_flex_attention", _visible_pairs(documents, call.length))
        kernels["attention, as chosen, capped scores"] = (
            "_flex_attention",
            _visible_pairs(AttentionPattern(), call.length),
        )
    shape = (call.batch, call.heads, call.length, call.head_size)
    moved = 2 * call.batch * call.length * call.head_size * (2 * call.heads + 2 * call.groups)
    for name, (kernel, pairs) in kernels.items():
        product = 2.0 * pairs * call.batch * call.heads * call.head_size
        backward = "_flash_attention_backward" if kernel == "_flash_attention_forward" else f"{kernel}_backward"
        for direction, operator, count in (("forward", kernel, 2), ("backward", backward, 5)):
            operation = Operation("forward", operator, "", (shape,), 2, moved * count // 2, count * product)
            yield f"{name}, {call.name}, {direction}", 1e3 * operation_seconds(operation, gpu)


def _chosen(call: AttentionShape, gpu: Gpu) -> str:
    causal = AttentionCall(
        "bfloat16", call.head_size, call.length, call.length, is_causal=True, has_groups=call.groups != call.heads
    )
    return f"{choose_attention_kernel(causal, gpu.capability)}_attention"


def _visible_pairs(pattern: AttentionPattern, length: int) -> float:
    """Return how many pairs of a query and a key are in the blocks that FlexAttention computes."""
    mask = make_block_mask(pattern, length, length, torch.device("cpu"), BLOCK_SIZE)
    blocks = mask.kv_num_blocks.sum()
    if mask.full_kv_num_blocks is not None:
        blocks = blocks + mask.full_kv_num_blocks.sum()
    return float(int(blocks) * BLOCK_SIZE**2)


def predict_trainings(gpu: Gpu, *, small: bool) -> Predictions:
    """Return what dry runs predict of parts 5, 7 and 8."""
    shapes = shapes_of(small=small)
    runs: dict[str, TimedRun] = {}
    for timed in (*gpt2_runs(shapes, small=small), *headline_runs(shapes, gpu.memory_bytes, small=small)):
        # A run with CUDA graphs has the prediction of the run without: its kernels are the same.
        if gpu.float8_flops or not timed.needs_float8:
            runs.setdefault(timed.key, timed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_PARALLEL) as pool:
        paths = [Path(folder) / f"{number}.json" for number in range(len(runs))]
        reports = pool.map(lambda timed, path: dry_run(timed.flags, 1, gpu.name, path), runs.values(), paths)
        values: Predictions = {}
        for key, report in zip(runs, reports):
            values |= _of_training(key, report)
    return values


def _of_training(key: str, report: dict[str, Any]) -> Predictions:
    kinds = {name: part["ms"] for name, part in report["by_kind"].items()}
    return {
        key: report["predicted_ms"],
        f"{key}/memory": report["peak_bytes"] / _GIB,
        f"{key}/busy": 100.0 * report["kernel_ms"] / report["predicted_ms"],
        f"{key}/GEMMs": kinds.get("products", 0.0),
        f"{key}/attention": kinds.get("attention", 0.0),
        f"{key}/other kernels": kinds.get("memory", 0.0),
    }
