"""When a run gives the device's unused memory back."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron.core.device import Device
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.timers import Timers
from tests.harness.distributed import run_distributed
from tests.unit.training.config.command_lines import MINIMAL


def events_of_a_run(level: int) -> list[str]:
    events: list[str] = []
    step = MegatronOptimizer.begin_step

    def counted_step(optimizer: MegatronOptimizer, timers: Timers) -> object:
        events.append("step")
        return step(optimizer, timers)

    words = ["--train-iters", "2", "--eval-iters", "0", "--empty-unused-memory-level", str(level)]
    with (
        patch.object(Device, "empty_cache", lambda device: events.append("empty")),
        patch.object(MegatronOptimizer, "begin_step", counted_step),
        patch("megatron.training.pretrain.shut_down"),  # the process group is the test's
    ):
        assert pretrain_gpt.main([*MINIMAL, *words]) == 0
    return events


@pytest.mark.parametrize(
    ("level", "iteration"), [(0, ["step"]), (1, ["step", "empty"]), (2, ["empty", "step", "empty"])]
)
def test_unused_memory_is_given_back_as_often_as_the_level_says(level: int, iteration: list[str]) -> None:
    assert run_distributed(1, events_of_a_run, level) == [iteration * 2]
