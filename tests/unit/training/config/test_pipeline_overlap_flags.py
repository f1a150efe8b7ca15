"""Flags of what a pipeline overlaps: where they cannot have an effect, a line says so."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

PIPELINE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
ZERO_BUBBLE = (*PIPELINE, "--pipeline-schedule", "zero-bubble")
SHARDED = (*PIPELINE, "--data-parallel-sharding-strategy", "optim_grads")
ALONE = "with --pipeline-model-parallel-size 1"
DEFER, DELAY = "--defer-embedding-wgrad-compute", "--delay-wgrad-compute"


@pytest.mark.parametrize(
    ("flags", "world_size", "lines"),
    [
        (
            ("--no-overlap-p2p-communication", DELAY, DEFER),
            1,
            [f"{flag} has no effect {ALONE}" for flag in ("--no-overlap-p2p-communication", DELAY, DEFER)],
        ),
        (
            (*ZERO_BUBBLE, DELAY, DEFER),
            2,
            [
                f"{flag} has no effect with --pipeline-schedule zero-bubble, which defers weight gradients itself"
                for flag in (DELAY, DEFER)
            ],
        ),
        (
            (*PIPELINE, DELAY, DEFER, "--wgrad-deferral-limit", "3"),
            2,
            [
                f"{DEFER} has no effect with {DELAY}, which computes them with the others",
                f"--wgrad-deferral-limit 3 has no effect with {DELAY}, which computes them with the others",
            ],
        ),
        (
            (*SHARDED, DEFER),
            4,
            [
                f"{DEFER} has no effect with --data-parallel-sharding-strategy optim_grads: gradients are reduced "
                "after each micro-batch"
            ],
        ),
    ],
)
def test_what_cannot_have_an_effect_is_said_and_turned_off(
    flags: tuple[str, ...], world_size: int, lines: list[str]
) -> None:
    parsed = resolve_arguments([*MINIMAL, *flags], world_size)
    assert list(parsed.notes) == lines
    model = parsed.config.model
    assert not model.defer_embedding_wgrad_compute
    assert model.overlap_p2p_communication


def test_a_limit_that_cannot_be_is_refused_where_it_would_not_count_too() -> None:
    with pytest.raises(ConfigurationError, match=r"--wgrad-deferral-limit -1: a value of 0 or more is expected"):
        resolve_arguments([*MINIMAL, DEFER, "--wgrad-deferral-limit", "-1"], 1)


def test_a_pipeline_takes_each_of_them() -> None:
    for flag in ("--no-overlap-p2p-communication", DELAY, DEFER):
        parsed = resolve_arguments([*MINIMAL, *PIPELINE, flag], 2)
        assert parsed.notes == ()
    assert parsed.config.model.defer_embedding_wgrad_compute
