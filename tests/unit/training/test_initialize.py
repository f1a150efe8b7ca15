"""What a process learns from its launcher, and what it does on its own."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.device import Device
from megatron.training import initialize
from megatron.training.arguments import resolve_arguments
from megatron.training.initialize import LaunchEnvironment, initialize_runtime, read_launch_environment
from tests.unit.training.command_lines import MINIMAL


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [({}, "", 0), ({}, "--local-rank 3", 3), ({"LOCAL_RANK": "2"}, "--local-rank 3", 2)],
)
def test_local_rank_is_the_launchers_or_the_flags(
    environment: dict[str, str], flags: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen: list[int | None] = []

    def note(launch: LaunchEnvironment) -> Device:
        seen.append(launch.local_rank)
        return Device("cpu")

    monkeypatch.setattr(initialize, "initialize_device", note)
    initialize_runtime(resolve_arguments([*MINIMAL, *flags.split()], 1).config, read_launch_environment())
    assert [rank or 0 for rank in seen] == [expected]


def test_one_process_needs_no_backend_and_says_nothing_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    initialize_runtime(resolve_arguments(MINIMAL, 1).config, LaunchEnvironment())
    assert not dist.is_initialized()
    assert "WARNING" not in capsys.readouterr().out
