"""A search that drops choices by their bounds finds the choices that one without bounds does."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.cli.planner_arguments import read_planned_run
from megatron.config.run_config import RunConfig
from megatron.planner.bounds import Bounds
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, OURS
from megatron.planner.memory import stage_state
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.planner.search import Search, search

MODEL = (
    *("--num-layers", "8", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "4096"),
    *("--max-position-embeddings", "4096", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256"),
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--global-batch-size", "16", "--micro-batch-size", "1", "--lr", "1e-4", "--train-iters", "9", "--mock-data"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
EXPERTS = ("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "2048", "--ffn-hidden-size", "4096")
_WANTED = 5


def config_of(*flags: str, world_size: int) -> RunConfig:
    config = read_planned_run([*MODEL, *flags, "--bf16"], 1).config
    return dataclasses.replace(config, world_size=world_size)


def fastest(found: Search) -> list[tuple[object, float]]:
    return [(each.choice, each.seconds) for each in found.ranked[:_WANTED]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "world_size", "precisions"), [((), 8, ("bf16", "fp8")), (EXPERTS, 4, ("bf16",))], ids=["dense", "experts"]
)
def test_no_choice_is_faster_than_its_bound_and_the_fastest_are_found(
    flags: tuple[str, ...], world_size: int, precisions: tuple[str, ...]
) -> None:
    config = config_of(*flags, world_size=world_size)
    every = search(config, H100, OURS, precisions, lambda config: ())
    bounded = search(config, H100, OURS, precisions, lambda config: (), wanted=_WANTED)
    assert fastest(bounded) == fastest(every)
    assert bounded.num_predicted < every.num_predicted
    assert any(each.reason.startswith("a step takes at least") for each in bounded.dropped)
    bounds = Bounds(H100, OURS)
    for each in every.candidates:
        plan = Plan.of(each.config)
        states = [stage_state(plan, stage, OURS) for stage in range(plan.parallel_sizes.pp)]
        assert bounds.seconds(plan, states) <= each.seconds * (1 + 1e-9), each.choice
        assert bounds.seconds(plan, states, 0.0) <= bounds.seconds(plan, states) * (1 + 1e-9), each.choice
        assert bounds.first_stage_bytes(plan, states[0]) <= each.prediction.stages[0].total, each.choice


@pytest.mark.full
def test_attention_whose_keys_travel_round_a_ring_is_not_slower_than_predicted() -> None:
    length = "65536"
    flags = ("--seq-length", length, "--max-position-embeddings", length, "--context-parallel-size", "2")
    plan = Plan.of(read_planned_run([*MODEL, *flags, "--bf16"], 2).config)
    time = predict(plan, OURS, H100).time
    assert time is not None
    assert Bounds(H100, OURS).seconds(plan, [stage_state(plan, 0, OURS)]) <= time.total


def test_no_layout_of_another_program_is_faster_than_its_bound() -> None:
    config = config_of(world_size=2)
    every = search(config, H100, MEGATRON_TE, ("bf16",), lambda config: ())
    bounded = search(config, H100, MEGATRON_TE, ("bf16",), lambda config: (), wanted=_WANTED)
    assert fastest(bounded) == fastest(every)
    bounds = Bounds(H100, MEGATRON_TE)
    for each in every.candidates:
        plan = Plan.of(each.config)
        states = [stage_state(plan, stage, MEGATRON_TE) for stage in range(plan.parallel_sizes.pp)]
        assert bounds.seconds(plan, states) <= each.seconds * (1 + 1e-9), each.choice
