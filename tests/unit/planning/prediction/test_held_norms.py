"""Norms of queries and keys, norms behind branches and windows: what they keep, and how long attention is."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.planning.gpu import H100
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS
from megatron.planning.prediction.prediction import predict
from megatron.training.config.arguments import resolve_arguments
from megatron.verification.cells import BASE_FLAGS, SHAPES, Layout, make_cell
from tests.unit.planning.prediction.test_held_memory import SIZES, assert_held

LAYERNORM, TWO_GROUPS = ("--qk-layernorm",), ("--num-query-groups", "2")
CUT = Layout(tp=2, sequence_parallel=True, pp=2)
LAYOUTS = (
    ("qwen", CUT, ()),
    ("mistral", CUT, TWO_GROUPS),
    ("olmo2", Layout(), TWO_GROUPS),
    ("qwen", Layout(), TWO_GROUPS),
    ("olmo2", CUT, ()),
    ("gemma3", CUT, ()),
    ("gemma3", Layout(), TWO_GROUPS),
    ("gpt2", Layout(), LAYERNORM),
    ("gpt2", Layout(), (*LAYERNORM, *TWO_GROUPS)),
    ("gpt2", Layout(tp=2, sequence_parallel=True), ("--norm-placement", "both")),
    *(("qwen", Layout(cp=2, cp_comm_type=exchange), ()) for exchange in ("p2p", "all_gather", "a2a")),
    *(("gpt2", Layout(cp=2, cp_comm_type=exchange), LAYERNORM) for exchange in ("p2p", "all_gather", "a2a")),
    *(("qwen", Layout(recompute=("selective", module)), ()) for module in ("core_attn", "layernorm", "mlp")),
)
FEW = (0, 1)
"""Layouts which the default tests take."""


@pytest.mark.full
@pytest.mark.parametrize("number", FEW, ids=[f"{LAYOUTS[n][0]} {LAYOUTS[n][1].name}" for n in FEW])
def test_a_step_holds_what_is_predicted(number: int) -> None:
    shape, layout, more = LAYOUTS[number]
    assert_held(make_cell(shape, layout, extra=(*SIZES, *more)))


@pytest.mark.long
def test_steps_of_all_layouts_hold_what_is_predicted() -> None:
    for shape, layout, more in LAYOUTS:
        assert_held(make_cell(shape, layout, extra=(*SIZES, *more)))


def test_attention_looks_no_further_than_its_window() -> None:
    config = resolve_arguments(
        [*BASE_FLAGS, *SHAPES["mistral"], "--seq-length", "64", "--window-size", "15,0", "--bf16"], 1, needs_files=False
    ).config
    plan = Plan.of(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=52)))
    whole = dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, window_size=None, window_attn_skip_freq=None)
    )
    both = [predict(each, OURS, H100) for each in (whole, plan)]
    times = [each.time for each in both]
    assert times[0] is not None
    assert times[1] is not None
    # Every other layer has a window of 16 of 64 keys: 16 * (64 - 8) of 64 * 32 scores.
    assert times[1].layer.attention == times[0].layer.attention
    flops = [each.model.forward_flops_per_sequence(64) for each in (whole, plan)]
    scores = 4.0 * plan.model.query_projection_size
    assert flops[0] - flops[1] == pytest.approx(2 * scores * (64 * 32 - 16 * 56))
    assert both[0].tflops is not None
    assert both[1].tflops == pytest.approx(both[0].tflops * times[0].total / times[1].total)
