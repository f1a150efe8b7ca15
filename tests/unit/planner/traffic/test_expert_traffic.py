"""What layers of experts send, where tokens spread evenly, is the closed form, byte for byte."""

from __future__ import annotations

import pytest

from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.balanced_experts import balanced_experts
from tests.harness.step_traffic import assert_same_traffic

FULL, MOE = ("full", "uniform", "2"), ("selective", "moe")
GLOBAL = ("--moe-router-load-balancing-type", "global_aux_loss")
PARTS = ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
GATE = ("--moe-shared-expert-gate",)
RECIPES = ("tensorwise", "rowwise", "mxfp8", "blockwise")


def in_float8(recipe: str) -> tuple[str, ...]:
    """Return the flags of a recipe and of sizes that it can round."""
    sizes = "--hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64"
    return (*sizes.split(), "--seq-length", "64", "--max-position-embeddings", "64", *_HALF, "--fp8-recipe", recipe)


_HALF = ("--bf16", "--fp8-format", "hybrid")
FLOAT8 = (*in_float8("tensorwise"), "--first-last-layers-bf16")
CELLS = (
    ("mixtral", ExpertLayout(dp=2, ep=2), ()),
    ("mixtral", ExpertLayout(tp=2), ()),
    ("mixtral", ExpertLayout(cp=2, dp=2, ep=4, expert_flags=GLOBAL), ()),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather", recompute=FULL), ()),
    ("qwen3-moe", ExpertLayout(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True, recompute=FULL), ()),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, pp=2, ep=2, sequence_parallel=True, sharding="optim"), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), ()),
    ("deepseek-experts", ExpertLayout(tp=2, sequence_parallel=True, recompute=MOE), ("--hidden-dropout", "0.1")),
    ("dropping", ExpertLayout(tp=2, cp=2, ep=2, etp=2), ("--moe-expert-capacity-factor", "1")),
    ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), GATE),
    *(("deepseek-experts", ExpertLayout(tp=2, sequence_parallel=True), in_float8(recipe)) for recipe in RECIPES),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), FLOAT8),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), FLOAT8),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather", recompute=MOE), ("--moe-router-dtype", "fp32")),
    ("gpt2-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True), ("--moe-router-dtype", "fp64")),
    ("mixtral", ExpertLayout(tp=2, pp=2, ep=2, etp=1), ("--dataloader-type", "external")),
)
ADAPTERS = ("--lora-rank", "3")
OF_EXPERTS = (*ADAPTERS, "--lora-target-modules", "linear_fc1", "linear_fc2")
OF_SECOND = (*ADAPTERS, "--lora-target-modules", "linear_fc2")
STILL = ("--moe-router-bias-update-rate", "0")
FULL_LAYERS = ("full", "uniform", "1")
ADAPTED = (
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2), ADAPTERS),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather"), OF_EXPERTS),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=4, etp=1), OF_EXPERTS),
    ("mixtral", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True), OF_SECOND),
    ("qwen3-moe", ExpertLayout(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True, recompute=FULL_LAYERS), OF_SECOND),
    ("mixtral", ExpertLayout(tp=2, recompute=FULL_LAYERS), ADAPTERS),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2), (*OF_EXPERTS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, pp=2, ep=2, sequence_parallel=True), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, recompute=FULL_LAYERS), (*OF_SECOND, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, recompute=("selective", "mlp")), (*ADAPTERS, *STILL)),
    ("gpt2-experts", ExpertLayout(tp=2, dp=2, ep=2, sharding="optim"), OF_EXPERTS),
    ("dropping", ExpertLayout(tp=2, dp=2, ep=2), (*OF_EXPERTS, "--moe-expert-capacity-factor", "1")),
    ("dropping", ExpertLayout(tp=2, sequence_parallel=True), (*OF_SECOND, "--moe-expert-capacity-factor", "1")),
)


FEW = (0, 3, 4)
"""Layouts of every kind, which the default tests take."""


@pytest.mark.parametrize("number", FEW, ids=[f"{CELLS[number][0]} {CELLS[number][1].name}" for number in FEW])
def test_recorded_bytes_equal_the_closed_form(number: int) -> None:
    assert_equal(*CELLS[number])


@pytest.mark.long
def test_recorded_bytes_equal_the_closed_form_at_all_layouts() -> None:
    for cell in CELLS:
        assert_equal(*cell)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ADAPTED)))
def test_recorded_bytes_of_adapted_experts_equal_the_closed_form(number: int) -> None:
    assert_equal(*ADAPTED[number])


def assert_equal(shape: str, layout: ExpertLayout, extra: tuple[str, ...]) -> None:
    cell = make_expert_cell(shape, layout, extra=extra)
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    with balanced_experts():
        for rank in {0, config.world_size - 1}:
            assert_same_traffic(config, rank, cell.data)
