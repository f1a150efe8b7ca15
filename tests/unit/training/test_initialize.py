"""What a process learns from its launcher and does on its own, variables of CUDA and NCCL included."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.arguments import resolve_arguments
from megatron.config.resolution import machine_notes
from megatron.core import device as device_module
from megatron.core.device import Device, driver_capability
from megatron.core.errors import ConfigurationError
from megatron.training import initialize
from megatron.training.initialize import (
    CudaSettings,
    LaunchEnvironment,
    choose_cuda_settings,
    initialize_runtime,
    read_launch_environment,
)
from tests.unit.config.command_lines import MINIMAL


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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "x"},
            "RANK is 'x' in the environment; start the processes with torchrun, or unset RANK to",
        ),
        ({"RANK": "1", "WORLD_SIZE": "two", "LOCAL_RANK": ""}, "WORLD_SIZE is 'two', LOCAL_RANK is '' in the"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2 in the environment"),
        ({"RANK": "3"}, "RANK is 3 and WORLD_SIZE is 1 in the environment"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        read_launch_environment()
    assert message in str(caught.value)


def test_one_process_needs_no_backend_and_says_nothing_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    initialize_runtime(resolve_arguments(MINIMAL, 1).config, LaunchEnvironment())
    assert not dist.is_initialized()
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        (Device("cuda", 3), "nccl", ("nccl", torch.device("cuda", 3), False)),
        (Device("cuda", 3), "gloo", ("gloo", None, False)),
        (Device("cpu"), "nccl", ("gloo", None, True)),
    ],
)
def test_nccl_is_bound_to_the_device_that_all_its_groups_and_barriers_take(
    device: Device, backend: str, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[dict[str, object]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **options: joined.append(options))
    warning = initialize.initialize_distributed(LaunchEnvironment(1, 4, 3), device, backend, 5)
    (options,) = joined
    assert (options["backend"], options["device_id"], warning is not None) == expected
    assert (options["rank"], options["world_size"], options["timeout"]) == (1, 4, timedelta(minutes=5))


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        # torchrun gives 1 to all that it starts.
        ([], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ("1", None)),
        (["--inprocess-restart"], {}, ("0", "0")),
        (["--inprocess-restart"], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ("0", "0")),
        (["--inprocess-restart"], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, ("0", "0")),
        (["--inprocess-restart"], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, ("2", "0")),
        (["--inprocess-restart"], {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, ("0", "1")),
    ],
)
def test_torchs_watchdog_ends_no_process_that_outlives_its_peers(
    words: list[str], given: dict[str, str], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
    seen: list[tuple[str | None, ...]] = []

    def join(*arguments: object) -> None:
        seen.append(tuple(os.environ.get(name) for name in names))

    # What is set here is taken back behind the test, whatever is written meanwhile.
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(initialize, "initialize_distributed", join)
    config = resolve_arguments([*MINIMAL, "--save", "checkpoints", *words], 1).config
    initialize_runtime(config, LaunchEnvironment())
    assert seen == [expected]


def test_a_store_that_never_answers_does_not_hold_a_failing_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(initialize, "_FAILURE_TIMEOUT", timedelta(seconds=0.5))
        assert initialize.is_first_failure()
        assert not initialize.has_run_failed()


def test_sums_of_bfloat16_products_are_kept_in_float32_where_it_is_asked_for() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    try:
        for words, expected in (([], True), (["--disable-bf16-reduced-precision-matmul"], False)):
            settings.allow_bf16_reduced_precision_reduction = True
            initialize_runtime(resolve_arguments([*MINIMAL, *words], 1).config, LaunchEnvironment())
            assert settings.allow_bf16_reduced_precision_reduction is expected
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def test_a_machine_says_which_flags_it_leaves_without_effect() -> None:
    flags = "--local-rank 1 --empty-unused-memory-level 2 --no-gradient-accumulation-fusion"
    config = resolve_arguments([*MINIMAL, *flags.split()], 1).config
    assert [line.partition(" has no effect ")[0] for line in machine_notes(config, False, False)] == [
        "--local-rank 1",
        "--empty-unused-memory-level 2",
        "--no-gradient-accumulation-fusion",
    ]
    assert list(machine_notes(config, True, False)) == []
    (note,) = machine_notes(config, True, True)
    assert note == "--local-rank 1 has no effect: the environment variable LOCAL_RANK is used"


def test_groups_without_nccl_say_what_has_no_effect() -> None:
    flags = "--nccl-communicator-config-path nccl.yaml --use-nccl-ub"
    config = resolve_arguments([*MINIMAL, *flags.split()], 1).config
    assert list(machine_notes(config, True, True)) == []
    assert list(machine_notes(config, True, True, has_nccl=False)) == [
        f"{flag} has no effect: the process groups do not use NCCL"
        for flag in ("--nccl-communicator-config-path nccl.yaml", "--use-nccl-ub")
    ]


def test_offload_to_the_host_says_what_a_cpu_leaves_without_effect() -> None:
    offload = "--optimizer-cpu-offload --optimizer-offload-policy auto"
    flags = [
        *("--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads", "--no-pin-cpu-params"),
        "--optimizer-offload-auto-threshold 1024",
    ]
    config = resolve_arguments([*MINIMAL, *offload.split(), *" ".join(flags).split()], 1).config
    assert [line.partition(" has no effect on a CPU")[0] for line in machine_notes(config, False, True)] == flags
    assert list(machine_notes(config, True, True)) == []
    plain = resolve_arguments([*MINIMAL, *offload.split()], 1).config
    assert list(machine_notes(plain, False, True)) == []


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
        ("--use-nccl-ub", 2, 9, {"TORCH_NCCL_HIGH_PRIORITY": "1"}),
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
