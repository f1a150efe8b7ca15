"""The memory that a training step really holds on CPU equals the planner's prediction for our own implementation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from megatron.core.errors import ConfigurationError
from megatron.planner.implementations import NATIVE
from megatron.planner.memory import stage_state
from megatron.planner.plan import Plan, megatron_step_flops
from megatron.verification.cells import MODULES, Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout, make_attention_cell, make_expert_cell, make_latent_cell
from megatron.verification.random_cells import fuzz
from megatron.verification.run_cell import resolve_cell
from tests.harness.held_memory import assert_memory_matches_the_plan, counted_flops, held_by_step
from tests.harness.sized_cells import (
    CORE_AND_UP_PROJECTIONS,
    EXPERT_SIZES,
    LATENT_CELLS,
    NARROW_LATENT,
    ONE_MTP_MODULE,
    SIZES,
    TWO_MTP_MODULES,
    UNCHECKED,
    UP_PROJECTIONS,
    WIDE_LATENT,
    fp8_flags,
    mtp_cell,
    mtp_expert_cell,
    mtp_latent_cell,
    short_name,
)

FULL, BLOCK = ("full", "uniform", "1"), ("full", "block", "1")
EXCHANGES = ("p2p", "all_gather", "a2a")
ADAPTERS = ("--lora-rank", "3", "--load", "somewhere", "--finetune")


def rows(
    kind: str, cells: Iterable[Cell], *, default: int = 0, full: int = 0, saved_bytes_per_token: int = 20
) -> Iterator[object]:
    """Yield a row of the table for each configuration: the first ``default`` run by default, then ``full``, then long.

    ``saved_bytes_per_token`` bounds the saved numbers per token of the loss and the router that the planner leaves out.
    """
    for number, cell in enumerate(cells):
        marks = () if number < default else pytest.mark.full if number < default + full else pytest.mark.long
        yield pytest.param(cell, saved_bytes_per_token, marks=marks, id=f"{kind}: {short_name(cell)}")


def dense_cells() -> Iterator[Cell]:
    norms = ("selective", "layernorm")
    first = (
        ("llama", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding="optim")),
        ("llama", Layout(pp=2, recompute=BLOCK)),
        ("llama", Layout(cp=2, pp=2, recompute=norms)),
    )
    layouts = (
        *first,
        *(("gpt2", Layout(tp=tp, sequence_parallel=sp)) for tp, sp in ((1, False), (2, False), (2, True), (4, True))),
        *(("gpt2", Layout(pp=pp, virtual_stages=v)) for pp, v in ((2, 1), (4, 1), (2, 2))),
        *(("llama", Layout(tp=2, sequence_parallel=True, pp=2, dp=dp, sharding="optim")) for dp in (1, 4)),
        *(("llama", Layout(pp=2, recompute=recompute)) for recompute in (("selective",), ("selective", "mlp"), FULL)),
        *(("gpt2", Layout(tp=2, sequence_parallel=True, recompute=recompute)) for recompute in (MODULES, FULL)),
        *(("llama", Layout(tp=tp, virtual_stages=v, pp=2)) for tp, v in ((1, 2), (2, 1), (4, 2))),
        ("gpt2", Layout(pp=2, schedule="zero-bubble")),
        ("gpt2", Layout(pp=2, first_stage_layers=1)),
        ("gpt2", Layout(dp=4)),
        ("gpt2", Layout(dp=4, sharding="optim", overlap=True)),
        ("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True)),
        ("gpt2-untied", Layout(tp=2, sequence_parallel=True, pp=2)),
        ("gpt2-untied", Layout(pp=2, dp=2, sharding="optim")),
        ("llama", Layout(tp=2, pp=2, dp=2, sharding="optim", recompute=("selective", "core_attn", "mlp"))),
        ("llama", Layout(tp=2, sequence_parallel=True, pp=2, virtual_stages=2, recompute=("selective", "mlp"))),
        ("llama", Layout(pp=4, recompute=FULL)),
        ("llama", Layout(pp=4, virtual_stages=1, schedule="zero-bubble")),
        ("llama", Layout(tp=2, sequence_parallel=True, recompute=("selective",))),
        *(("llama", Layout(recompute=norms, tp=tp, sequence_parallel=tp > 1)) for tp in (1, 2)),
        ("llama", Layout(tp=2, sequence_parallel=True, recompute=MODULES)),
        ("llama", Layout(cp=2, tp=2, sequence_parallel=True)),
        ("llama", Layout(cp=4, recompute=FULL)),
        ("gpt2", Layout(cp=2)),
        *(("llama", Layout(cp=4, cp_comm_type=exchange)) for exchange in ("a2a", "all_gather")),
        ("llama", Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2))),
        *(("gpt2", Layout(cp=2, cp_comm_type=exchange)) for exchange in ("a2a", "all_gather")),
        ("gpt2", Layout(cp=2, dp=2, sharding="optim", recompute=("selective",))),
    )
    return (make_cell(shape, layout, extra=SIZES) for shape, layout in layouts)


def deferred_weight_gradient_cells() -> Iterator[Cell]:
    """Every bucket has a bias or the weight of a norm, whose gradients come first: all buckets are open at once."""
    layout = Layout(pp=2, dp=2, sharding="optim_grads", overlap=True, schedule="zero-bubble")
    yield make_cell("gpt2", layout, extra=(*SIZES, *UNCHECKED))


def optimizer_instance_cells() -> Iterator[Cell]:
    copies = ("--num-distributed-optimizer-instances", "2")
    for sharding in ("optim", "optim_grads"):
        for layout in (Layout(dp=4), Layout(tp=2, pp=2, dp=4, sequence_parallel=True)):
            yield make_cell("llama", replace(layout, sharding=sharding, overlap=True), extra=(*SIZES, *copies))


def adapter_cells() -> Iterator[Cell]:
    """Frozen weights have no gradients and no optimizer state."""
    layouts = (
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2, dp=2, sharding="optim"),
        Layout(dp=2, sharding="optim_grads"),
    )
    quantized = (*ADAPTERS, "--lora-base-quantization", "nf4", "--kv-channels", "64")
    yield make_cell("llama", layouts[0], extra=(*SIZES, *quantized))
    yield from (make_cell("llama", layout, extra=(*SIZES, *ADAPTERS)) for layout in layouts)


def norm_cells() -> Iterator[Cell]:
    """Norms of queries and keys, norms after branches, and attention windows."""
    layernorm, two_groups = ("--qk-layernorm",), ("--num-query-groups", "2")
    split = Layout(tp=2, sequence_parallel=True, pp=2)
    layouts = (
        ("qwen", split, ()),
        ("mistral", split, two_groups),
        ("olmo2", Layout(), two_groups),
        ("qwen", Layout(), two_groups),
        ("olmo2", split, ()),
        ("gemma3", split, ()),
        ("gemma4", split, ()),
        ("gemma4", Layout(), ()),
        ("gemma3", Layout(), two_groups),
        ("gpt2", Layout(), layernorm),
        ("gpt2", Layout(), (*layernorm, *two_groups)),
        ("gpt2", Layout(tp=2, sequence_parallel=True), ("--norm-placement", "sandwich")),
        *(("qwen", Layout(cp=2, cp_comm_type=exchange), ()) for exchange in EXCHANGES),
        *(("gpt2", Layout(cp=2, cp_comm_type=exchange), layernorm) for exchange in EXCHANGES),
        *(("qwen", Layout(recompute=("selective", module)), ()) for module in ("core_attn", "layernorm", "mlp")),
    )
    return (make_cell(shape, layout, extra=(*SIZES, *extra)) for shape, layout, extra in layouts)


def attention_kind_cells() -> Iterator[Cell]:
    """Attention sinks, softmax off by one, and layers without rotary positions."""
    layouts = (
        ("sinks", Layout()),
        ("no-rope", Layout()),
        ("off-by-one", Layout()),
        *((shape, Layout(cp=2, cp_comm_type=exchange)) for shape in ("sinks", "no-rope") for exchange in EXCHANGES),
        *(("sinks", Layout(recompute=("selective", module))) for module in ("core_attn", "layernorm")),
        ("sinks", Layout(recompute=FULL)),
        ("no-rope", Layout(tp=2, sequence_parallel=True, pp=2)),
    )
    return (make_attention_cell(shape, layout, extra=SIZES) for shape, layout in layouts)


def latent_fp8_cells() -> Iterator[Cell]:
    fp8 = ("--bf16", "--cpu-gemm-backend", "mkl", "--fp8-format", "hybrid")
    narrow = (*NARROW_LATENT, "--q-lora-rank", "48", *fp8, "--fp8-recipe")
    layouts = (
        ("latent", Layout(tp=2, sequence_parallel=True, recompute=UP_PROJECTIONS), (*narrow, "delayed")),
        ("latent", Layout(), (*narrow, "delayed")),
        ("latent", Layout(), (*narrow, "tensorwise", "--no-fp8-wgrad")),
        ("latent-wide-values", Layout(recompute=UP_PROJECTIONS), (*WIDE_LATENT, *fp8)),
        ("latent", Layout(recompute=CORE_AND_UP_PROJECTIONS), (*narrow, "delayed")),
        ("latent", Layout(recompute=("selective", "core_attn", "layernorm")), (*narrow, "tensorwise")),
        ("latent", Layout(pp=2, recompute=FULL), (*narrow, "delayed")),
        ("latent", Layout(cp=2, cp_comm_type="all_gather"), (*narrow, "delayed")),
    )
    return (make_latent_cell(shape, layout, extra=extra) for shape, layout, extra in layouts)


def expert_cells() -> Iterator[Cell]:
    moe, parts = ("selective", "moe"), ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
    of_tensor = ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)
    gate, float32_router = ("--moe-shared-expert-gate",), ("--moe-router-dtype", "fp32")
    gathered = ExpertLayout(tp=2, sequence_parallel=True, dispatcher="allgather")
    softplus = ("--moe-router-score-function", "sqrtsoftplus")
    layouts = (
        ("mixtral", of_tensor),
        ("deepseek-experts", ExpertLayout(dp=2, ep=2, expert_flags=softplus)),
        ("gpt2-experts", ExpertLayout(dp=2, ep=2, expert_flags=(*softplus, "--moe-z-loss-coeff", "0"))),
        ("mixtral", ExpertLayout(dp=2, ep=2)),
        ("mixtral", ExpertLayout(pp=2, dp=2, ep=2)),
        ("mixtral", gathered),
        ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim", overlap=True)),
        ("mixtral", ExpertLayout(pp=2, tp=2, ep=2, etp=1, sequence_parallel=True)),
        ("mixtral", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True)),
        ("deepseek-experts", ExpertLayout(dp=2, ep=2)),
        ("deepseek-experts", ExpertLayout(pp=2, dp=2, ep=2, sharding="optim", recompute=moe)),
        ("deepseek-experts", ExpertLayout(pp=2, virtual_stages=2, recompute=FULL)),
        ("gpt2-experts", ExpertLayout(dp=2, ep=2, expert_flags=float32_router)),
        ("deepseek-experts", replace(of_tensor, recompute=parts)),
        ("deepseek-experts", ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2, recompute=parts)),
        ("deepseek-experts", ExpertLayout(dp=2, ep=2, recompute=("selective", "shared_experts"), expert_flags=gate)),
        ("gpt2-experts", ExpertLayout(dp=2, ep=2, recompute=("selective", "moe_act"))),
        ("mixtral", ExpertLayout(dp=2, ep=2, expert_flags=ADAPTERS)),
        ("mixtral", replace(of_tensor, recompute=("selective", "layernorm"), expert_flags=ADAPTERS)),
        ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2, expert_flags=ADAPTERS)),
        ("mixtral", replace(gathered, expert_flags=float32_router)),
        ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, expert_flags=float32_router)),
    )
    return (make_expert_cell(shape, layout, extra=(*SIZES, *EXPERT_SIZES)) for shape, layout in layouts)


def mtp_cells() -> tuple[Cell, ...]:
    """Models with multi-token prediction (MTP) modules."""
    full, modules = ("full", "uniform", "2"), ("selective", "layernorm", "mlp")
    tensor = Layout(tp=2, sequence_parallel=True)
    return (
        mtp_latent_cell(Layout(pp=2)),
        mtp_cell("qwen-mtp", replace(tensor, pp=2)),
        mtp_cell("llama-mtp", Layout()),
        mtp_cell("qwen-mtp", Layout(tp=2)),
        mtp_cell("qwen-mtp", Layout(recompute=full)),
        mtp_cell("llama-mtp", Layout(pp=2, recompute=BLOCK)),
        mtp_cell("qwen-mtp", replace(tensor, recompute=modules)),
        mtp_cell("qwen-mtp", Layout(pp=2, virtual_stages=2)),
        mtp_cell("qwen-mtp", Layout(pp=2, schedule="zero-bubble")),
        mtp_cell("qwen-mtp", Layout(cp=2, pp=2)),
        mtp_cell("llama-mtp", Layout(cp=2, cp_comm_type="all_gather")),
        mtp_cell("llama-mtp", Layout(pp=2, dp=2, sharding="optim_grads", overlap=True)),
        mtp_cell("qwen-mtp", Layout(pp=2, dp=2, sharding="optim", overlap=True)),
        mtp_cell("llama-mtp", replace(tensor, pp=2), ("--normalization", "LayerNorm")),
        mtp_latent_cell(replace(tensor, recompute=UP_PROJECTIONS)),
        mtp_cell("qwen-mtp", tensor, fp8_flags("tensorwise")),
        mtp_cell("qwen-mtp", Layout(pp=2), (*fp8_flags("delayed"), "--first-last-layers-bf16")),
        mtp_cell("llama-mtp", replace(tensor, recompute=modules), fp8_flags("mxfp8")),
        mtp_cell("qwen-mtp", Layout(pp=2, recompute=full), fp8_flags("rowwise")),
        mtp_cell("llama-mtp", Layout(dp=2, sharding="optim"), (*fp8_flags("blockwise"), "--fp8-param-gather")),
    )


def mtp_expert_cells() -> tuple[Cell, ...]:
    return (
        mtp_expert_cell("mixtral", ExpertLayout(pp=2, dp=2, ep=2), ONE_MTP_MODULE),
        mtp_expert_cell("deepseek-experts", ExpertLayout(dp=2, ep=2), TWO_MTP_MODULES),
        mtp_expert_cell(
            "deepseek-experts", ExpertLayout(pp=2, dp=2, ep=2, recompute=("selective", "moe")), ONE_MTP_MODULE
        ),
    )


TABLE = (
    *rows("dense", dense_cells(), default=1, full=2),
    *rows("deferred weight gradients", deferred_weight_gradient_cells(), default=1),
    *rows("distributed optimizer instances", optimizer_instance_cells()),
    *rows("adapters", adapter_cells(), default=1, full=3, saved_bytes_per_token=40),
    *rows("norms", norm_cells(), full=2),
    *rows("attention kinds", attention_kind_cells(), full=2),
    *rows("latent", LATENT_CELLS, default=1),
    *rows("latent fp8", latent_fp8_cells()),
    *rows("experts", expert_cells(), full=1, saved_bytes_per_token=40),
    *rows("mtp", mtp_cells(), full=1),
    *rows("mtp experts", mtp_expert_cells(), saved_bytes_per_token=40),
)


@pytest.mark.parametrize(("cell", "saved_bytes_per_token"), TABLE)
def test_memory_of_a_step_matches_the_plan(cell: Cell, saved_bytes_per_token: int) -> None:
    assert_memory_matches_the_plan(cell, saved_bytes_per_token=saved_bytes_per_token)


def test_table_covers_every_dense_layout() -> None:
    assert len(list(dense_cells())) >= 30


NOT_COUNTED = ("--attn-logit-softcapping", "--reset-attention-mask")
"""On CPU soft caps save the attention scores, and each layer saves the mask of packed documents."""


def random_cells(seed: int, count: int) -> Iterator[Cell]:
    for cell in fuzz(seed, count):
        # Buckets that hold one parameter each are open at once in another order.
        if any(flag in cell.flags for flag in NOT_COUNTED) or {"--ddp-bucket-size", "optim_grads"} <= {*cell.flags}:
            continue
        experts = EXPERT_SIZES if "--num-experts" in cell.flags else ()
        sized = replace(cell, model_flags=(*cell.model_flags, *SIZES, *experts, *UNCHECKED))
        try:
            resolve_cell(sized.flags, sized.world_size, "bfloat16")
        except ConfigurationError:
            continue
        yield sized


@pytest.mark.long
def test_memory_of_random_configurations_matches_the_plan() -> None:
    cells = list(random_cells(41, 80))
    assert len(cells) >= 18
    for cell in cells:
        assert_memory_matches_the_plan(cell, saved_bytes_per_token=40, checks_flops=False)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(dp=2, sharding="optim_grads"), "gpt2"),
        (Layout(dp=2, sharding="optim_grads", overlap=True), "gpt2"),
        (Layout(dp=2, pp=2, sharding="optim_grads", schedule="zero-bubble"), "gpt2"),
        (Layout(dp=2, sharding="optim_grads_params", overlap=True, recompute=FULL), "llama"),
    ],
)
def test_full_buckets_of_sharded_gradients_are_counted(layout: Layout, shape: str) -> None:
    cell = make_cell(shape, layout, extra=(*SIZES, *UNCHECKED, "--num-layers", "4", "--ddp-bucket-size", "20000"))
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    for stage in range(plan.parallel_sizes.pp):
        state = stage_state(plan, stage, NATIVE)
        held = held_by_step(config, stage * layout.dp, cell.data)
        assert held.gradients == state.gradients + state.gradient_pool


@pytest.mark.parametrize("shape", ["llama", "gemma4"])
def test_unfused_attention_computes_all_scores(shape: str) -> None:
    cell = make_cell(shape, Layout(), extra=(*SIZES, "--attention-backend", "unfused", "--num-layers", "2"))
    config = resolve_cell(cell.flags, 1, "bfloat16")
    plan = Plan.of(config)
    flops = held_by_step(config, 0, cell.data).flops
    assert flops == pytest.approx(counted_flops(plan, cores=1), rel=0.01)
    assert megatron_step_flops(plan) == pytest.approx(flops, rel=0.01)


def test_weights_and_flops_of_layers_that_share_are_those_of_the_plan() -> None:
    """Half of the layers have no keys and twice the feed-forward, and all have a branch for their own input."""
    cell = make_cell("gemma4-e2b", Layout(pp=2), extra=(*SIZES, "--hidden-size-per-layer-input", "32"))
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan, flops = Plan.of(config), 0
    for stage in range(plan.parallel_sizes.pp):
        held, state = held_by_step(config, stage, cell.data), stage_state(plan, stage, NATIVE)
        assert (held.weights, held.optimizer) == pytest.approx((state.weights, state.optimizer), rel=1e-3)
        flops += held.flops
    assert flops == pytest.approx(counted_flops(plan), rel=0.01)
