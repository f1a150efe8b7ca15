"""Flags of restarts: what needs what, and what a second copy needs."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

RESTART = ("--inprocess-restart",)
COPIES = (*RESTART, "--non-persistent-save-interval", "5")


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        (
            ("--inprocess-hard-timeout", "5"),
            1,
            "--inprocess-hard-timeout 5.0 has no effect without --inprocess-restart",
        ),
        (("--non-persistent-save-interval", "5"), 1, "has no effect without --inprocess-restart"),
        ((*RESTART, "--replication"), 2, "--replication has no effect without --non-persistent-save-interval"),
        ((*COPIES, "--replication-jump", "1"), 2, "--replication-jump 1 has no effect without --replication"),
        ((*COPIES, "--replication"), 1, "with world size 1 each rank would send its copy to itself; leave it out"),
        (
            (*COPIES, "--replication", "--replication-jump", "4"),
            4,
            "--replication --replication-jump 4: with world size 4 each rank .* to itself; give a jump of 1 to 3",
        ),
        (
            (*COPIES, "--non-persistent-ckpt-type", "global"),
            1,
            "--non-persistent-ckpt-type global is not supported yet",
        ),
        ((*RESTART, "--inprocess-barrier-timeout", "0"), 1, "--inprocess-barrier-timeout"),
    ],
)
def test_what_could_have_no_effect_is_refused(flags: tuple[str, ...], world_size: int, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        resolve_arguments([*MINIMAL, *flags], world_size)


@pytest.mark.parametrize("more", [(), ("--non-persistent-ckpt-type", "local"), ("--replication",)])
def test_copies_are_accepted(more: tuple[str, ...]) -> None:
    parsed = resolve_arguments([*MINIMAL, *COPIES, *more], 2)
    assert parsed.config.restart.non_persistent_save_interval == 5
