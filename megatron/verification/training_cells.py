"""Parity test cases of training features: FSDP, optimizers, losses, adapters, and uneven sizes on three ranks.

Lion's update is the sign of a moment. Its test cases have no key bias: the gradient of a key bias is only rounding
error, so its sign would be random.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from megatron.verification.cells import (
    DROPOUT,
    EXCHANGES,
    IN_PARTS,
    MODULES,
    RECOMPUTE,
    SHARDING,
    Cell,
    Layout,
    make_cell,
)
from megatron.verification.model_cells import ExpertLayout, make_expert_cell, make_latent_cell, make_prediction_cell

WEIGHTS = "optim_grads_params"
AnyLayout = TypeVar("AnyLayout", bound=Layout)


def fully_sharded(layout: AnyLayout, *, overlap: bool = False) -> AnyLayout:
    """Return a layout with weights, gradients and state sharded over its data-parallel ranks."""
    return replace(layout, sharding=WEIGHTS, overlap=overlap)


_SHARDING_LAYOUTS = (
    Layout(dp=2),
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=2, sequence_parallel=True, dp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, virtual_stages=2, dp=2),
    Layout(pp=2, schedule="zero-bubble", dp=2),
    Layout(pp=2, dp=2, pp_overlap=("--delay-wgrad-compute",)),
    Layout(cp=2, dp=2),
    Layout(cp=4, cp_comm_type="a2a"),
    Layout(tp=2, sequence_parallel=True, pp=2, cp=2),
    Layout(tp=2, sequence_parallel=True, pp=2, dp=2),
    Layout(pp=4, dp=2),
)
_EXPERT_LAYOUTS = (
    ExpertLayout(dp=4, ep=2),
    ExpertLayout(dp=4, ep=4),
    ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(pp=2, virtual_stages=2, dp=4, ep=2),
    ExpertLayout(cp=2, dp=2, ep=2),
)


def hybrid(cell: Cell, instances: int = 2) -> Cell:
    """Return the test case with several instances of the distributed optimizer."""
    flags = ("--num-distributed-optimizer-instances", str(instances))
    return replace(cell, name=f"{cell.name} in {instances} copies", layout_flags=(*cell.layout_flags, *flags))


def sharding_matrix() -> list[Cell]:
    return list(_sharding_cells())


def _sharding_cells() -> Iterator[Cell]:
    for shape, layout in itertools.product(("gpt2", "llama"), _SHARDING_LAYOUTS):
        yield make_cell(shape, fully_sharded(layout))
        yield make_cell(shape, fully_sharded(layout, overlap=True), "uneven")
    for recompute in (*RECOMPUTE[1:], MODULES, ("full", "uniform", "2")):
        for layout in (Layout(dp=2), Layout(tp=2, sequence_parallel=True, pp=2, dp=2)):
            yield make_cell("qwen", fully_sharded(replace(layout, recompute=recompute), overlap=True), extra=DROPOUT)
    yield make_cell("llama", fully_sharded(Layout(tp=2, dp=2, recompute=IN_PARTS)))
    for shape in ("gemma2", "gemma4-e2b", "olmo2", "neox"):
        yield make_cell(shape, fully_sharded(Layout(tp=2, pp=2, dp=2), overlap=True), "packed")
    for expert_shape, expert_layout in itertools.product(("mixtral", "deepseek-experts"), _EXPERT_LAYOUTS):
        yield make_expert_cell(expert_shape, fully_sharded(expert_layout, overlap=True))
    for layout in (Layout(dp=4), Layout(tp=2, cp=2, dp=2), Layout(pp=2, dp=4)):
        for sharding in (*SHARDING[1:], WEIGHTS):
            yield hybrid(make_cell("gpt2", replace(layout, sharding=sharding)))
            yield hybrid(make_cell("llama", replace(layout, sharding=sharding, overlap=True), "uneven"))
    yield hybrid(make_cell("gpt2", fully_sharded(Layout(dp=8), overlap=True)), 4)
    yield hybrid(make_expert_cell("mixtral", fully_sharded(ExpertLayout(dp=8, ep=2), overlap=True)))
    yield hybrid(make_expert_cell("deepseek-experts", replace(ExpertLayout(dp=4, ep=2), sharding="optim")))
    yield make_latent_cell("latent", fully_sharded(Layout(tp=2, pp=2, dp=2)))
    yield make_latent_cell("latent-yarn", fully_sharded(Layout(pp=2, dp=2), overlap=True))


MUON = ("--optimizer", "muon", "--muon-nesterov", "--muon-extra-scale-factor", "0.2")
UNSPLIT_MUON = (*MUON, "--muon-no-split-qkv", "--muon-coefficient-type", "simple", "--muon-scale-mode", "shape_scaling")
LION = ("--optimizer", "lion")
MUON_WITH_LION = ("--optimizer", "muon", "--muon-scalar-optimizer", "lion")

LORA = ("--lora-rank", "3", "--lora-alpha", "6")
FUSED_LORA = (*LORA, "--lora-dropout", "0.2")
SPLIT_LORA = (
    *(*FUSED_LORA, "--lora-target-modules"),
    *("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
ATTENTION_LORA = (*LORA, "--lora-target-modules", "q_proj", "v_proj", "linear_proj")
GATE_LORA = (*LORA, "--lora-target-modules", "linear_qkv", "gate_proj", "linear_fc2")
EXPERT_LORA = (*LORA, "--lora-target-modules", "linear_fc1", "linear_fc2")
SECOND_PRODUCT_LORA = (*LORA, "--lora-target-modules", "linear_fc2")
DENSE_QUANTIZED = (
    *("--lora-base-quantization", "nf4", "--hidden-size", "128", "--kv-channels", "64", "--ffn-hidden-size", "256"),
)
QUANTIZED = (*DENSE_QUANTIZED, "--moe-ffn-hidden-size", "128")
STILL = ("--moe-router-bias-update-rate", "0")

Z_LOSS = ("--z-loss-coeff", "0.05")
GROUPS = ("--param-group-overrides", "*.mlp.*:lr_mult=0.25,wd_mult=0", "*norm*:wd_mult=3", "--weight-decay", "0.1")
CLIPPING = ("--clip-grad-matrices", "0.3", "--clip-grad-embeddings", "0.1", "--clip-grad-vectors", "0.02")
MUP = ("--use-mup", "--mup-width-mult", "3", "--mup-embedding-mult", "2", "--mup-output-mult", "1.5")
HEAD_MUP = ("--mup-base-head-dim", "5", "--mup-attn-scale-power", "0.8")
DECOUPLED = ("--decoupled-lr", "3e-2")
QK_CLIP = ("--qk-clip", "--qk-clip-threshold", "0.3", "--qk-clip-alpha", "0.4")
OFFLOAD = ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.6", "--overlap-cpu-optimizer-d2h-h2d")

_FULL = ("full", "uniform", "1")
_SHARDED = Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True)


def with_optimizer_on_host(cell: Cell) -> Cell:
    """Return the test case with the optimizer state on the host; the reference keeps it with its weights."""
    return replace(
        cell, name=f"{cell.name} {OFFLOAD[0].removeprefix('--')}", layout_flags=(*cell.layout_flags, *OFFLOAD)
    )


def recipe_matrix() -> list[Cell]:
    """Return the test cases of training recipes that every release must pass."""
    return [*optimizer_matrix(), *adapter_matrix(), *_recipes()]


def optimizer_matrix() -> list[Cell]:
    return list(_optimizers())


def adapter_matrix() -> list[Cell]:
    """Return the test cases of low-rank adapters."""
    return [*_adapters(), *_expert_adapters()]


def _optimizers() -> Iterator[Cell]:
    # Tensor-parallel ranks that share a key-value group.
    yield make_cell("llama-one-group", Layout(tp=4), extra=MUON)
    for shape in ("gpt2", "llama", "qwen"):
        yield make_cell(shape, Layout(tp=2), extra=MUON)
    for layout in (Layout(tp=4), _SHARDED):
        yield make_cell("llama", layout, extra=UNSPLIT_MUON)
    for layout in (
        _SHARDED,
        Layout(dp=4, sharding="optim"),
        Layout(dp=4),
        Layout(cp=2, dp=2, sharding="optim", overlap=True),
    ):
        yield make_cell("llama", layout, extra=MUON)
    yield make_cell("gpt2", Layout(tp=2, pp=2, virtual_stages=2), extra=MUON)
    yield make_cell("gpt2", Layout(pp=2, schedule="zero-bubble", dp=2, sharding="optim"), extra=MUON)
    yield make_cell("gpt2-untied", Layout(pp=2, dp=2, sharding="optim"), extra=MUON)
    yield make_cell("llama", Layout(pp=2, dp=2), extra=MUON_WITH_LION)
    yield make_cell("llama", Layout(dp=2, sharding="optim"), extra=LION)
    for shape, expert_layout in (
        ("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim")),
        ("mixtral", ExpertLayout(dp=2, ep=2)),
        ("mixtral", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True)),
        ("mixtral", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)),
        ("mixtral", ExpertLayout(cp=2, dp=2, etp=2, sharding="optim")),
        ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2)),
        ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, sharding="optim")),
        ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim_grads_params")),
    ):
        yield make_expert_cell(shape, expert_layout, extra=MUON)


def _adapters() -> Iterator[Cell]:
    for layout in (
        Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True),
        Layout(dp=2, sharding="optim_grads", overlap=True),
        Layout(tp=2),
        Layout(dp=2, sharding="optim"),
    ):
        yield make_cell("gpt2", layout, extra=FUSED_LORA)
    yield make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, recompute=MODULES), extra=SPLIT_LORA)
    yield make_cell("llama", Layout(cp=2), "packed", extra=SPLIT_LORA)
    yield make_cell("llama", Layout(tp=2, pp=2, schedule="zero-bubble", recompute=_FULL), extra=SPLIT_LORA)
    # Ranks that share a key-value group, with one adapter for all rows and with one adapter per part.
    yield make_cell("llama-one-group", Layout(tp=4), extra=FUSED_LORA)
    yield make_cell("llama-one-group", Layout(tp=4, sequence_parallel=True), extra=SPLIT_LORA)
    yield make_cell("llama", Layout(tp=2), extra=(*MUON, "--lora-rank", "3"))
    yield from quantized_cells()


def quantized_cells() -> Iterator[Cell]:
    """Yield the test cases of adapters of 4-bit weights, whose codes and scales are compared bitwise too."""
    layout = Layout(tp=2, sequence_parallel=True, pp=2, recompute=MODULES)
    yield make_cell("llama", layout, extra=(*SPLIT_LORA, *DENSE_QUANTIZED))
    full = Layout(dp=2, sharding="optim", overlap=True, recompute=_FULL)
    yield make_cell("gpt2", full, extra=(*LORA, *DENSE_QUANTIZED, "--no-lora-double-quantization"))
    # Ranks that share a key-value group.
    shared = Layout(tp=4, sequence_parallel=True)
    yield make_cell("llama-one-group", shared, extra=(*LORA, *DENSE_QUANTIZED, "--lora-base-quantization", "fp4"))
    experts = ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True)
    yield make_expert_cell("mixtral", experts, extra=(*ATTENTION_LORA, *QUANTIZED))
    apart = ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=("selective", "moe"))
    yield make_expert_cell("mixtral", apart, extra=(*LORA, *QUANTIZED))


def _expert_adapters() -> Iterator[Cell]:
    spread = ExpertLayout(tp=2, dp=2, ep=2)
    apart = ExpertLayout(tp=2, sequence_parallel=True, ep=2, etp=1)
    kept = ("selective", "moe", "moe_act")
    for shape, layout, data, extra in (
        ("mixtral", replace(spread, sequence_parallel=True), "plain", ATTENTION_LORA),
        ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2, sharding="optim", overlap=True), "plain", ATTENTION_LORA),
        ("mixtral", ExpertLayout(cp=2, dp=2, ep=4, recompute=MODULES), "packed", ATTENTION_LORA),
        ("mixtral", spread, "plain", LORA),
        ("mixtral", ExpertLayout(dp=2, ep=2, sharding="optim", overlap=True), "plain", GATE_LORA),
        ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2), "plain", GATE_LORA),
        ("mixtral", apart, "plain", GATE_LORA),
        ("mixtral", replace(spread, dispatcher="allgather", sharding="optim_grads"), "plain", EXPERT_LORA),
        ("deepseek-experts", replace(spread, sequence_parallel=True), "plain", (*LORA, *STILL)),
        ("deepseek-experts", ExpertLayout(tp=2, pp=2, ep=2, etp=1, recompute=_FULL), "plain", (*GATE_LORA, *STILL)),
        ("dropping", spread, "plain", EXPERT_LORA),
        ("dropping", apart, "plain", SECOND_PRODUCT_LORA),
        ("gpt2-experts", ExpertLayout(tp=2, dp=2, ep=4, etp=1), "plain", SECOND_PRODUCT_LORA),
        ("gpt2-experts", ExpertLayout(tp=2, recompute=_FULL), "plain", LORA),
        ("mixtral", ExpertLayout(cp=2, dp=2, ep=4, recompute=kept), "packed", GATE_LORA),
        ("deepseek-experts", replace(spread, recompute=MODULES), "plain", (*LORA, *STILL)),
        ("qwen3-moe", ExpertLayout(pp=2, ep=2, dp=2, schedule="zero-bubble"), "plain", GATE_LORA),
        # Ranks that shard an expert have replicas of one of its adapter's matrices.
        ("mixtral", replace(spread, sequence_parallel=True), "plain", (*MUON, "--lora-rank", "3")),
    ):
        yield make_expert_cell(shape, layout, data, extra)


def _recipes() -> Iterator[Cell]:
    muon = ("--optimizer", "muon")
    yield make_cell("gpt2", Layout(tp=2, cp=2), "packed", extra=(*Z_LOSS, *MUP, *HEAD_MUP))
    yield make_cell("gpt2", Layout(tp=2, pp=2), "uneven", extra=(*Z_LOSS, *GROUPS, *CLIPPING))
    for more in (Z_LOSS, MUP):
        yield make_prediction_cell("qwen-mtp", Layout(tp=2, pp=2, sequence_parallel=True), extra=more)
    yield make_cell("llama", Layout(cp=2, dp=2), "uneven", extra=Z_LOSS)
    yield make_cell("gpt2", Layout(pp=2, schedule="zero-bubble", dp=2, sharding="optim"), extra=Z_LOSS)
    yield make_cell("gemma2", _SHARDED, extra=Z_LOSS)
    for recipe in (CLIPPING, MUP, GROUPS):
        yield make_cell("llama", _SHARDED, extra=(*recipe, *muon))
    yield make_cell("gpt2", Layout(cp=2, dp=2, sharding="optim"), extra=CLIPPING)
    yield make_cell("llama", Layout(pp=2, dp=2, sharding="optim"), extra=(*GROUPS, "--decoupled-lr", "1e-3"))
    yield make_cell("gpt2", Layout(tp=2, pp=2, virtual_stages=2), extra=QK_CLIP)
    yield make_cell("llama", replace(_SHARDED, recompute=_FULL), extra=(*QK_CLIP, *muon))
    yield make_cell("llama", fully_sharded(Layout(tp=2, cp=2)), "packed", extra=QK_CLIP)
    # Tensor-parallel ranks that share a key-value group.
    yield make_cell("llama-one-group", Layout(tp=4), extra=QK_CLIP)
    for exchange in EXCHANGES:
        yield make_cell("mistral", Layout(cp=2, cp_comm_type=exchange, dp=2, sharding="optim"), extra=QK_CLIP)
    yield make_latent_cell("latent", Layout(tp=2, cp=2, sequence_parallel=True), extra=QK_CLIP)
    yield make_latent_cell("sparse", Layout(cp=2, cp_comm_type="all_gather"), extra=QK_CLIP)
    yield make_prediction_cell("llama-mtp", Layout(pp=2, dp=2, sharding="optim_grads"), extra=QK_CLIP)
    yield with_optimizer_on_host(make_cell("gpt2", replace(_SHARDED, pp=2)))
    yield with_optimizer_on_host(
        make_cell("llama", Layout(tp=2, cp=2, dp=2, sharding="optim"), "uneven", extra=DECOUPLED)
    )
    yield with_optimizer_on_host(make_cell("gpt2", Layout(pp=4, dp=2, schedule="zero-bubble"), extra=DECOUPLED))


_ODD_SIZES = (
    *("--num-attention-heads", "6", "--hidden-size", "24", "--ffn-hidden-size", "42", "--global-batch-size", "9"),
    *("--seq-length", "36", "--max-position-embeddings", "36", "--make-vocab-size-divisible-by", "3"),
)
"""Sizes divisible by three."""
_FOR_TWO = ("--global-batch-size", "6")
"""Three micro-batches on each of two data-parallel ranks."""
_THREE_GROUPS = ("--num-query-groups", "3")
_SIX_EXPERTS = ("--num-experts", "6")


def odd_matrix() -> list[Cell]:
    return list(_odd_cells())


def _odd_cells() -> Iterator[Cell]:
    yield from _odd_dense()
    yield from _odd_experts()
    sequence_parallel = Layout(tp=3, sequence_parallel=True)
    yield make_prediction_cell("qwen-mtp", fully_sharded(Layout(cp=3, cp_comm_type="a2a")), "packed", _ODD_SIZES)
    yield make_prediction_cell("llama-mtp", Layout(cp=3, dp=2, sharding="optim"), "uneven", (*_ODD_SIZES, *_FOR_TWO))
    yield make_prediction_cell("gemma3-mtp", Layout(pp=3), extra=(*_ODD_SIZES, "--num-layers", "6"))
    yield make_latent_cell("latent", sequence_parallel, extra=(*_ODD_SIZES, "--num-query-groups", "6"))


def _odd_dense() -> Iterator[Cell]:
    def cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = (), num_layers: int = 4) -> Cell:
        return make_cell(shape, layout, data, (*_ODD_SIZES, *extra), num_layers)

    yield cell("gpt2", Layout(tp=3))
    yield cell("llama", Layout(tp=3, sequence_parallel=True, dp=2, sharding="optim"), extra=(*_THREE_GROUPS, *_FOR_TWO))
    yield cell("llama-one-group", Layout(tp=3, sequence_parallel=True, pp=2, recompute=RECOMPUTE[1]))
    yield cell("gpt2", Layout(pp=3), num_layers=3)
    yield cell("gpt2-untied", Layout(pp=3, virtual_stages=3), num_layers=9)
    yield cell("llama", Layout(pp=3, schedule="zero-bubble", dp=2), extra=("--global-batch-size", "10"), num_layers=3)
    yield cell("qwen", Layout(pp=3, tp=2, sequence_parallel=True, recompute=RECOMPUTE[2]), "packed", num_layers=6)
    yield cell("gpt2", Layout(dp=3), "uneven", ("--micro-batch-size", "3"))
    yield cell("llama", Layout(dp=3, sharding="optim_grads", overlap=True))
    yield cell("qwen", fully_sharded(Layout(dp=3, pp=2), overlap=True), extra=DROPOUT)
    yield cell("gpt2", Layout(dp=3, tp=2, sharding="optim"), extra=MUON)
    yield cell("gpt2", Layout(cp=3), "packed", DROPOUT)
    yield cell("llama", Layout(cp=3, cp_comm_type="all_gather", dp=2, sharding="optim"), extra=(*Z_LOSS, *_FOR_TWO))
    yield cell("llama", Layout(cp=3, cp_comm_type="a2a", pp=2), "uneven", _THREE_GROUPS)
    yield cell("mistral", Layout(cp=3, tp=2, sequence_parallel=True), "packed")


def _odd_experts() -> Iterator[Cell]:
    extra = (*_ODD_SIZES, *_SIX_EXPERTS)
    dropping = ExpertLayout(tp=3, sequence_parallel=True, ep=3, etp=1)
    yield make_expert_cell("mixtral", ExpertLayout(dp=3, ep=3), extra=extra)
    yield make_expert_cell("gpt2-experts", ExpertLayout(dp=3, ep=3, pp=2, dispatcher="allgather"), "packed", extra)
    yield make_expert_cell("gpt2-experts", ExpertLayout(tp=3, sequence_parallel=True, etp=3), extra=extra)
    yield make_expert_cell("dropping", dropping, extra=(*extra, "--moe-shared-expert-intermediate-size", "18"))
    yield make_expert_cell("qwen3-moe", ExpertLayout(cp=3, ep=3, dp=2, sharding="optim"), extra=(*extra, *_FOR_TWO))
