"""Triton's programs in a dry run, without their package."""

from __future__ import annotations

import sys

import pytest

from megatron.core.errors import ConfigurationError
from megatron.core.kernels import triton_choice
from megatron.planner.simulation.recorder import Recorder
from megatron.planner.simulation.triton import recorded_programs


def test_a_machine_without_the_package_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", None)
    before = triton_choice.has_readable_memory, triton_choice.triton_works
    with (
        pytest.raises(ConfigurationError, match="install triton, or add --without-triton"),
        recorded_programs(Recorder()),
    ):
        pass
    assert (triton_choice.has_readable_memory, triton_choice.triton_works) == before
