"""Attention windows, layers without rotary positions and latent attention change the predicted time of a layer."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.planner.gpu import H100
from megatron.planner.implementations import OURS
from megatron.planner.layer_time import LayerTime
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.planner.simulation.vocabulary import with_known_vocabulary
from megatron.training.config.arguments import resolve_arguments
from megatron.verification.cells import BASE_FLAGS, SHAPES, Layout
from megatron.verification.latent_cells import make_latent_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.sized_cells import NARROW_LATENT, UP_PROJECTIONS


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
    config = resolve_arguments([*flags, "--micro-batch-size", "1"], 1, needs_files=False).config
    plan = Plan.of(with_known_vocabulary(config))
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


def layer_of(layout: Layout, more: tuple[str, ...]) -> LayerTime:
    cell = make_latent_cell("latent", layout, extra=more)
    time = predict(Plan.of(resolve_cell(cell.flags, cell.world_size, "bfloat16")), OURS, H100).time
    assert time is not None
    return time.layer


def test_recomputed_and_wider_heads_take_longer() -> None:
    plain, again = (layer_of(Layout(recompute=recompute), NARROW_LATENT) for recompute in ((), UP_PROJECTIONS))
    assert again.products > plain.products
    assert again.total > plain.total
    wider = layer_of(Layout(), (*NARROW_LATENT, "--qk-head-dim", "64"))
    assert wider.products > plain.products
    assert wider.attention > plain.attention
    # MLA sends its narrow latent vectors, and other attention sends whole hidden states.
    ends = layer_of(Layout(tp=2, sequence_parallel=True), NARROW_LATENT).tensor_parallel
    assert (
        0.0
        < ends
        < layer_of(Layout(tp=2, sequence_parallel=True), (*NARROW_LATENT, "--kv-lora-rank", "4096")).tensor_parallel
    )
