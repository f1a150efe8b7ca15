"""When the ranks tell each other their times, for which they wait for each other and for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron.core.process_group import Group
from megatron.core.timers import Timers
from tests.harness.distributed import run_distributed
from tests.unit.training.config.command_lines import MINIMAL


def gathers_of_a_run(level: int) -> list[int]:
    """Return over how many iterations the times were that were gathered after iterations."""
    of_iterations: list[int] = []
    gather = Timers.gather

    def counted(timers: Timers, group: Group, names: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        if "normalizer" in options:
            of_iterations.append(options["normalizer"])
        return gather(timers, group, names, *rest, **options)

    words = ["--train-iters", "5", "--log-interval", "2", "--eval-iters", "0", "--timing-log-level", str(level)]
    with (
        patch.object(Timers, "gather", counted),
        patch("megatron.training.pretrain.shut_down"),  # the process group is the test's
    ):
        assert pretrain_gpt.main([*MINIMAL, *words]) == 0
    return of_iterations


@pytest.mark.parametrize(("level", "iterations"), [(0, []), (1, [2, 2])])
def test_times_are_gathered_where_something_is_timed(level: int, iterations: list[int]) -> None:
    assert run_distributed(1, gathers_of_a_run, level) == [iterations]
