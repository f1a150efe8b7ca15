"""What a process learns from its launcher, and what it does on its own."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.config.arguments import resolve_arguments
from megatron.config.resolution import machine_notes
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.training import initialize
from megatron.training.initialize import LaunchEnvironment, initialize_runtime, read_launch_environment
from tests.unit.training.config.command_lines import MINIMAL


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
    assert note == "--local-rank 1 has no effect: the environment's LOCAL_RANK is used"


def test_offload_to_the_host_says_what_a_cpu_leaves_without_effect() -> None:
    offload = "--optimizer-cpu-offload --optimizer-offload-policy auto"
    flags = [
        *("--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads", "--no-pin-cpu-params"),
        "--optimizer-offload-auto-threshold 1024",
    ]
    config = resolve_arguments([*MINIMAL, *offload.split(), *" ".join(flags).split()], 1).config
    assert [line.partition(" has no effect on a CPU: ")[0] for line in machine_notes(config, False, True)] == flags
    assert list(machine_notes(config, True, True)) == []
    plain = resolve_arguments([*MINIMAL, *offload.split()], 1).config
    assert list(machine_notes(plain, False, True)) == []
