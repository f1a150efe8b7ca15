"""Configurations drawn at random by a seed: what their steps hold on a CPU is what the planner says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from megatron.core.errors import ConfigurationError
from megatron.planning.activation_memory import activation_parts, layer_bytes
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS_ON_CPU
from megatron.planning.prediction.stage_memory import stage_memory, stage_state
from megatron.training.config.run_config import RunConfig
from megatron.verification.cells import Cell
from megatron.verification.random_cells import fuzz
from megatron.verification.run_cell import resolve_cell
from tests.harness.balanced_experts import balanced_experts
from tests.unit.planning.prediction.test_held_memory import SIZES, held_by_step

NOT_COUNTED = ("--mtp-num-layers", "--attn-logit-softcapping", "--reset-attention-mask")
"""Further tokens are refused; soft caps keep scores on a CPU, and documents a mask in each layer."""
NOT_MET = {
    "#46": "fully sharded, overlapped, layers recomputed: 28 % too many gradients are planned",
    "#76": "fully sharded, overlapped, layers recomputed: 24 % too many gradients are planned",
    "#73": "latent attention of wide values over gathered keys: 1.1 % too many saved bytes are planned",
}
"""Drawn configurations of which the planner is further off than the rest, and how; not explained yet."""


def drawn(seed: int, count: int) -> Iterator[tuple[Cell, RunConfig]]:
    for cell in fuzz(seed, count):
        # Buckets so small as to hold a parameter each are many at once in another order.
        if any(flag in cell.flags for flag in NOT_COUNTED) or {"--ddp-bucket-size", "optim_grads"} <= {*cell.flags}:
            continue
        experts = ("--moe-ffn-hidden-size", "96") if "--num-experts" in cell.flags else ()
        more = (*SIZES, *experts, "--no-check-for-nan-in-loss-and-grad")
        sized = replace(cell, model_flags=(*cell.model_flags, *more))
        try:
            config = resolve_cell(sized.flags, sized.world_size, "bfloat16")
        except ConfigurationError:
            continue
        yield sized, config


@pytest.mark.long
def test_steps_of_random_configurations_hold_what_is_predicted() -> None:
    several = list(drawn(41, 80))
    assert len(several) >= 18
    assert {cell.name.split()[0] for cell, _ in several} > NOT_MET.keys()
    for cell, config in several:
        if cell.name.split()[0] in NOT_MET:
            continue
        plan = Plan.of(config)
        wide = 4 * plan.num_rows * plan.model.hidden_size * (plan.model.normalization == "RMSNorm")
        for stage in range(plan.parallel_sizes.pp):
            has_experts = plan.model.num_experts is not None
            with balanced_experts() if has_experts else nullcontext():
                rank = stage * config.world_size // plan.parallel_sizes.pp
                held = held_by_step(config, rank, cell.data, counts_integers=has_experts)
            planned = stage_memory(plan, stage, OURS_ON_CPU)
            counted = (held.weights, held.gradients, held.optimizer)
            # Of sharded weights a rank has its shards when the step has ended.
            weights = stage_state(plan, stage, OURS_ON_CPU).weights
            assert counted == pytest.approx((weights, planned.gradients, planned.optimizer), rel=0.01), cell
            kept, ends = activation_parts(plan, stage, layer_bytes(plan, OURS_ON_CPU.saved))
            ends += wide * (ends > 0)
            assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=40 * plan.num_tokens), cell.name
