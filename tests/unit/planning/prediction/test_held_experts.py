"""What a step of a model with experts holds on a CPU, where tokens spread evenly, is what the planner says of it."""

from __future__ import annotations

import pytest

from megatron.planning.activation_memory import activation_parts, layer_bytes
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS_ON_CPU
from megatron.planning.prediction.stage_memory import stage_memory
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.balanced_experts import balanced_experts
from tests.unit.planning.prediction.test_held_memory import SIZES, counted_flops, held_by_step

EXPERTS = (*SIZES, "--moe-ffn-hidden-size", "96")
FULL, MOE = ("full", "uniform", "1"), ("selective", "moe")
PARTS = ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
GATE = ("--moe-shared-expert-gate",)
ADAPTERS = ("--lora-rank", "3", "--load", "somewhere", "--finetune")
LAYOUTS = (
    ("mixtral", ExpertLayout(dp=2, ep=2)),
    ("mixtral", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)),
    ("mixtral", ExpertLayout(pp=2, dp=2, ep=2)),
    ("mixtral", ExpertLayout(tp=2, sequence_parallel=True, dispatcher="allgather")),
    ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim", overlap=True)),
    ("mixtral", ExpertLayout(pp=2, tp=2, ep=2, etp=1, sequence_parallel=True)),
    ("mixtral", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True)),
    ("deepseek-experts", ExpertLayout(dp=2, ep=2)),
    ("deepseek-experts", ExpertLayout(pp=2, dp=2, ep=2, sharding="optim", recompute=MOE)),
    ("deepseek-experts", ExpertLayout(pp=2, virtual_stages=2, recompute=FULL)),
    ("gpt2-experts", ExpertLayout(dp=2, ep=2, expert_flags=("--moe-router-dtype", "fp32"))),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS)),
    ("deepseek-experts", ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2, recompute=PARTS)),
    ("deepseek-experts", ExpertLayout(dp=2, ep=2, recompute=("selective", "shared_experts"), expert_flags=GATE)),
    ("gpt2-experts", ExpertLayout(dp=2, ep=2, recompute=("selective", "moe_act"))),
    ("mixtral", ExpertLayout(dp=2, ep=2, expert_flags=ADAPTERS)),
    (
        "mixtral",
        ExpertLayout(
            tp=2, ep=2, etp=1, sequence_parallel=True, recompute=("selective", "layernorm"), expert_flags=ADAPTERS
        ),
    ),
    ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2, expert_flags=ADAPTERS)),
    (
        "mixtral",
        ExpertLayout(tp=2, sequence_parallel=True, dispatcher="allgather", expert_flags=("--moe-router-dtype", "fp32")),
    ),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, expert_flags=("--moe-router-dtype", "fp32"))),
)
FEW = (1, 7, 13)
"""Layouts of every kind, which the default tests take."""


def assert_held(number: int) -> None:
    shape, layout = LAYOUTS[number]
    cell = make_expert_cell(shape, layout, extra=EXPERTS)
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    per_stage, flops = config.world_size // plan.parallel_sizes.pp, 0
    # The last norm too has its input in float32 there; the loss keeps a few numbers a token.
    wide = 4 * plan.num_rows * plan.model.hidden_size * (plan.model.normalization == "RMSNorm")
    for stage in range(plan.parallel_sizes.pp):
        with balanced_experts():
            held = held_by_step(config, stage * per_stage, cell.data, counts_integers=True)
        flops += held.flops * per_stage
        predicted = stage_memory(plan, stage, OURS_ON_CPU)
        counted = (held.weights, held.gradients, held.optimizer)
        assert counted == pytest.approx((predicted.weights, predicted.gradients, predicted.optimizer), rel=0.01), stage
        kept, ends = activation_parts(plan, stage, layer_bytes(plan, OURS_ON_CPU.saved))
        ends = (wide if plan.model.lora_rank else ends + wide) * (ends > 0)
        assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=40 * plan.num_tokens), stage
    if plan.model.recompute_granularity is None and not plan.model.lora_rank:
        assert flops == pytest.approx(counted_flops(plan), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [FEW[0], *(pytest.param(number, marks=pytest.mark.long) for number in FEW[1:])],
    ids=[f"{LAYOUTS[n][0]} {LAYOUTS[n][1].name}" for n in FEW],
)
def test_a_step_holds_what_is_predicted(number: int) -> None:
    assert_held(number)


@pytest.mark.long
def test_steps_of_all_layouts_hold_what_is_predicted() -> None:
    for number in range(len(LAYOUTS)):
        assert_held(number)
