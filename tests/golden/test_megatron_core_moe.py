"""Routers, MoE functions and MoE layers under megatron-core's names compute megatron-core's numbers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core import parallel_state
from tests.golden import megatron_core_moe
from tests.harness.distributed import run_distributed

REFERENCE = json.loads(Path(__file__).with_name("moe").joinpath("megatron_core_moe.json").read_text())
CASES = [(kind, name) for kind, cases in REFERENCE.items() for name in cases]


def compute_here() -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    return megatron_core_moe.compute()


@functools.cache
def computed() -> dict[str, Any]:
    (result,) = run_distributed(1, compute_here, timeout_s=60.0)
    return json.loads(json.dumps(result))


def assert_close(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name in expected:
            assert_close(actual[name], expected[name], f"{where} {name}")
    elif isinstance(expected, list) and expected and not isinstance(expected[0], float):
        assert len(actual) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(actual, expected)):
            assert_close(mine, theirs, f"{where} {number}")
    elif expected is None:
        assert actual is None, where
    else:
        assert actual == pytest.approx(expected, rel=2e-5, abs=2e-6), where


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_numbers_are_those_of_megatron_core(kind: str, name: str) -> None:
    assert_close(computed()[kind][name], REFERENCE[kind][name], name)
