"""Variables that CUDA, its allocator and NCCL read when they start: what a run sets, when, and what it leaves alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core import device as device_module
from megatron.core.device import Device, driver_capability
from megatron.training import initialize
from megatron.training.initialize import CudaSettings, LaunchEnvironment, choose_cuda_settings, initialize_runtime
from tests.unit.training.config.command_lines import MINIMAL

NAMES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY"),
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
)
ALWAYS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_HIGH_PRIORITY": "1"}
ORDERED = {**ALWAYS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
WITHOUT_WARNING = {"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0"}


def settings(flags: str, world_size: int, capability: int = 9, **environment: str) -> CudaSettings:
    config = resolve_arguments([*MINIMAL, *flags.split()], world_size).config
    return choose_cuda_settings(config, environment, capability)


@pytest.mark.parametrize(
    ("flags", "world_size", "capability", "expected"),
    [
        ("", 1, 9, ALWAYS),
        ("", 2, 9, ALWAYS),
        ("--tensor-model-parallel-size 2", 2, 9, ORDERED),
        ("--tensor-model-parallel-size 2", 2, 8, ORDERED),
        ("--context-parallel-size 2", 2, 9, ORDERED),
        ("--pipeline-model-parallel-size 2", 2, 9, ALWAYS | WITHOUT_WARNING),
        ("--tensor-model-parallel-size 2", 2, 10, ALWAYS),
        ("--tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params", 4, 9, ALWAYS),
    ],
)
def test_what_a_run_sets(flags: str, world_size: int, capability: int, expected: Mapping[str, str]) -> None:
    assert settings(flags, world_size, capability).added == expected


def test_a_users_setting_wins_and_all_is_said_in_one_line() -> None:
    tensor = "--tensor-model-parallel-size 2"
    assert settings(tensor, 2).line == (
        "> CUDA settings: CUDA_DEVICE_MAX_CONNECTIONS=1, PYTORCH_ALLOC_CONF=expandable_segments:True, "
        "TORCH_NCCL_HIGH_PRIORITY=1"
    )
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    chosen = settings(tensor, 2, **given)
    assert chosen.added == {"TORCH_NCCL_HIGH_PRIORITY": "1"}
    assert chosen.line == (
        "> CUDA settings: TORCH_NCCL_HIGH_PRIORITY=1, CUDA_DEVICE_MAX_CONNECTIONS=32 (from the environment), "
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 (from the environment)"
    )
    assert settings("", 1, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync", TORCH_NCCL_HIGH_PRIORITY="0").added == {}


class CudaInName(Device):
    """Be a CPU that counts as CUDA."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Return what the environment has when a device is chosen, which starts CUDA."""
    seen: list[dict[str, str]] = []
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def choose(launch: LaunchEnvironment) -> Device:
        seen.append({name: os.environ[name] for name in NAMES if name in os.environ})
        return CudaInName("cpu")

    monkeypatch.setattr(initialize, "initialize_device", choose)
    return seen


def test_cuda_starts_with_the_settings(
    at_start: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_module, "driver_capability", lambda: 9)
    initialize_runtime(resolve_arguments(MINIMAL, 1).config, LaunchEnvironment())
    assert at_start == [ALWAYS]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> CUDA settings")]
    assert lines == ["> CUDA settings: PYTORCH_ALLOC_CONF=expandable_segments:True, TORCH_NCCL_HIGH_PRIORITY=1"]


def test_without_a_driver_the_environment_stays_as_it_is(
    at_start: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_module, "driver_capability", lambda: None)
    initialize_runtime(resolve_arguments(MINIMAL, 1).config, LaunchEnvironment())
    assert at_start == [{}]
    assert "CUDA settings" not in capsys.readouterr().out


class Driver:
    """Be NVIDIA's management library (NVML)."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "nvmlDeviceGetCudaComputeCapability" and not self.status:
                for pointer, value in zip(args[1:], (10, 3)):
                    pointer._obj.value = value
            return self.status if name != "nvmlInit_v2" else 0

        return call


@pytest.mark.parametrize(("status", "expected"), [(0, 10), (6, None)])
def test_the_driver_tells_the_capability(status: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert driver_capability() == expected
    assert driver.calls[0] == "nvmlInit_v2"
    assert driver.calls[-1] == "nvmlShutdown"
