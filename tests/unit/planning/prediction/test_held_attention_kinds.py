"""Attention sinks, and layers without rotary positions: what they keep, and how long such a layer takes."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.planning.gpu import H100
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS
from megatron.planning.prediction.prediction import predict
from megatron.training.config.arguments import resolve_arguments
from megatron.verification.attention_cells import make_attention_cell
from megatron.verification.cells import Layout
from tests.unit.planning.prediction.test_held_memory import SIZES, assert_held

LAYOUTS = (
    ("sinks", Layout()),
    ("no-rope", Layout()),
    ("off-by-one", Layout()),
    *(
        (shape, Layout(cp=2, cp_comm_type=way))
        for shape in ("sinks", "no-rope")
        for way in ("p2p", "all_gather", "a2a")
    ),
    *(("sinks", Layout(recompute=("selective", module))) for module in ("core_attn", "layernorm")),
    ("sinks", Layout(recompute=("full", "uniform", "1"))),
    ("no-rope", Layout(tp=2, sequence_parallel=True, pp=2)),
)
FEW = (0, 1)
"""Layouts which the default tests take."""


@pytest.mark.full
@pytest.mark.parametrize("number", FEW, ids=[LAYOUTS[number][0] for number in FEW])
def test_a_step_holds_what_is_predicted(number: int) -> None:
    shape, layout = LAYOUTS[number]
    assert_held(make_attention_cell(shape, layout, extra=SIZES))


@pytest.mark.long
def test_steps_of_all_layouts_hold_what_is_predicted() -> None:
    for shape, layout in LAYOUTS:
        assert_held(make_attention_cell(shape, layout, extra=SIZES))


def test_layers_without_rotary_positions_rotate_nothing() -> None:
    flags = (
        "--model-preset",
        "llama3.1-8b",
        "--num-layers",
        "4",
        "--mock-data",
        "--bf16",
        "--train-iters",
        "1",
        "--lr",
        "1e-4",
    )
    plan = Plan.of(resolve_arguments([*flags, "--micro-batch-size", "1"], 1, needs_files=False).config)
    steps = []
    for pattern in (None, "4", "1"):
        model = dataclasses.replace(plan.model, no_rope_freq=pattern)
        steps.append(time_of_step(dataclasses.replace(plan, model=model)))
    every, without_some, none = steps
    assert every > none
    assert every - without_some == pytest.approx((every - none) / 4)


def time_of_step(plan: Plan) -> float:
    time = predict(plan, OURS, H100).time
    assert time is not None
    return time.total
