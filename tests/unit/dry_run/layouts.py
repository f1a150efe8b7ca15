"""Layouts and features that are dry-run on an H100, tiny models all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.verification.cells import (
    EXCHANGES,
    IN_PARTS,
    MODULES,
    PP_OVERLAP,
    RECOMPUTE,
    SHAPES,
    SHARDING,
    Layout,
    make_cell,
)
from tests.harness.dry_runs import DryRunCase

_SIZES = (
    *("--hidden-size", "64", "--ffn-hidden-size", "96", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--query-pre-attn-scalar", "16"),
)
_BLOCKS = ("--bf16", "--seq-length", "512", "--max-position-embeddings", "512")
"""A sequence that FlexAttention takes: under context parallelism each rank has chunks of its blocks' length."""
_FP8 = ("--bf16", "--fp8-format", "hybrid")
SINKS = ("--softmax-type", "learnable")
EXPERTS = (
    *("--bf16", "--num-experts", "8", "--moe-router-topk", "3", "--moe-ffn-hidden-size", "48"),
    *("--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
)
_TO_RANKS = ("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2")
LION = ("--optimizer", "lion")
_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def layouts() -> list[DryRunCase]:
    """Return the cases."""
    return [*_plain(), *_float8(), *_sharded(), *_blocks(), *_features(), *_sinks(), *_experts()]


def _case(
    layout: Layout, shape: str = "gpt2", data: str = "plain", *, rank: int = 0, extra: tuple[str, ...] = ("--bf16",)
) -> DryRunCase:
    num_layers = 2 if layout.pp * layout.virtual_stages <= 2 and shape != "gemma3" else 4
    cell = make_cell(shape, layout, data, num_layers=num_layers)
    sizes = _SIZES if shape == "gemma2" else _SIZES[:-2]
    batch = ("--global-batch-size", str(layout.dp * max(2, layout.pp)))
    name = " ".join([cell.name, *extra, *([f"rank {rank}"] if rank else [])])
    # Rotary frequencies go to the device once, in the first step of a run.
    # So are the products by which kinds of fp8 are tried.
    num_steps = 2 if "rope" in cell.flags or "--fp8-format" in extra else 1
    return DryRunCase(name, (*cell.flags, *sizes, *batch, *extra), layout.world_size, rank, num_steps=num_steps)


def _plain() -> Iterator[DryRunCase]:
    for precision in ((), ("--bf16",), ("--fp16",)):
        yield _case(Layout(), extra=precision)
    for shape in SHAPES:
        if shape != "gpt2":
            yield _case(Layout(), shape)
    for recompute in RECOMPUTE[1:]:
        yield _case(Layout(recompute=recompute))
    yield _case(Layout(recompute=MODULES, offloaded_layers=1), "llama")
    yield _case(Layout(), data="packed")
    yield _case(Layout(), data="uneven")


def _float8() -> Iterator[DryRunCase]:
    for recipe in ("delayed", "tensorwise", "rowwise"):
        yield _case(Layout(), extra=(*_FP8, "--fp8-recipe", recipe))
    yield _case(Layout(tp=2, sequence_parallel=True), extra=_FP8, rank=1)
    yield _case(Layout(pp=2, schedule="zero-bubble"), extra=_FP8)


def _sharded() -> Iterator[DryRunCase]:
    yield _case(Layout(tp=2))
    yield _case(Layout(tp=2, sequence_parallel=True), rank=1)
    yield _case(Layout(tp=2, sequence_parallel=True), "llama", "packed")
    for rank in (0, 1):
        yield _case(Layout(pp=2), rank=rank)
        yield _case(Layout(pp=2, virtual_stages=2), rank=rank)
        yield _case(Layout(pp=2, schedule="zero-bubble"), rank=rank)
    yield _case(Layout(pp=4), rank=2)
    yield _case(Layout(dp=2, offloaded_layers=1, offloads_weights=True))
    yield _case(Layout(tp=2, pp=2, virtual_stages=2, recompute=IN_PARTS, offloaded_layers=1), rank=2)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, schedule="zero-bubble", offloaded_layers=1), rank=1)
    by_copies = ("--tp-comm-overlap", "--tp-comm-overlap-impl", "symmetric-memory")
    yield _case(Layout(tp=2, sequence_parallel=True, tp_overlap=by_copies))
    yield _case(Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)), "llama", "packed", rank=2)
    for flags in PP_OVERLAP[:3]:
        yield _case(Layout(pp=2, pp_overlap=flags), rank=1)
    for exchange in EXCHANGES:
        yield _case(Layout(cp=2, cp_comm_type=exchange))
        yield _case(Layout(cp=2, cp_comm_type=exchange), data="packed", rank=1)
        yield _case(Layout(cp=2, cp_comm_type=exchange), extra=("--bf16", *_DROPOUT))
    yield _case(Layout(cp=2), "mistral")
    yield _case(Layout(cp=2), "gemma2")
    for sharding in SHARDING:
        yield _case(Layout(dp=4, sharding=sharding))
        yield _case(Layout(dp=4, sharding=sharding, overlap=True), rank=3)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding=SHARDING[1], overlap=True), rank=7)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, cp=2), "llama", "packed", rank=5)


def _blocks() -> Iterator[DryRunCase]:
    yield _case(Layout(), data="packed", extra=_BLOCKS)
    yield _case(Layout(), "mistral", "packed", extra=_BLOCKS)
    yield _case(Layout(), "gemma2", extra=_BLOCKS)
    for exchange in EXCHANGES:
        yield _case(Layout(cp=2, cp_comm_type=exchange), data="packed", extra=_BLOCKS)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2), "llama", "packed", rank=2, extra=_BLOCKS)
    for shape, data in (("llama", "plain"), ("llama", "packed")):
        case = _case(Layout(), shape, data, extra=_BLOCKS)
        yield replace(case, name=f"{case.name} without Triton", has_triton=False)


def _features() -> Iterator[DryRunCase]:
    for extra in (
        _DROPOUT,
        ("--attention-backend", "unfused"),
        ("--optimizer", "sgd"),
        LION,
        ("--optimizer", "muon", "--muon-scalar-optimizer", "lion"),
        ("--clip-grad", "0"),
        ("--log-num-zeros-in-grad",),
        ("--log-params-norm",),
        ("--spike-policy", "skip"),
    ):
        yield _case(Layout(), extra=("--bf16", *extra))
    yield _case(Layout(tp=2, sequence_parallel=True), extra=("--bf16", *_DROPOUT))
    yield _case(Layout(), extra=("--fp16", *_DROPOUT, "--recompute-granularity", "selective"))
    yield _case(Layout(), "llama", "packed", extra=(*_BLOCKS, *_DROPOUT))
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2), rank=1, extra=("--fp16", *_DROPOUT))


def _sinks() -> Iterator[DryRunCase]:
    yield _case(Layout(), "mistral", extra=("--bf16", *SINKS))
    yield _case(Layout(), "mistral", "packed", extra=(*_BLOCKS, *SINKS))


def _experts() -> Iterator[DryRunCase]:
    yield _case(Layout(), extra=EXPERTS)
    shared = ("--moe-shared-expert-intermediate-size", "48", "--moe-shared-expert-overlap")
    yield _case(Layout(dp=2), rank=1, extra=(*EXPERTS, *_TO_RANKS, *shared))
    padded = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
    whole = ("--expert-tensor-parallel-size", "1")
    yield _case(Layout(tp=2, sequence_parallel=True), rank=1, extra=(*EXPERTS, *_TO_RANKS, *whole, *padded))
    yield _case(Layout(dp=2), extra=(*EXPERTS, "--expert-model-parallel-size", "2"))
