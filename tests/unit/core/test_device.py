"""What differs between devices, as far as a CPU can show it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.available_host_memory import machine_memory
from megatron.core.device import Device, MemoryUse, driver_capability, seeded_generator, select_device
from megatron.core.errors import ConfigurationError
from megatron.core.precision import arithmetic_dtype, dtype_from_name

CPU = Device("cpu")


def test_cpu_device() -> None:
    assert not CPU.is_cuda
    assert CPU.torch_device == torch.device("cpu")
    assert CPU.default_backend == "gloo"
    assert CPU.peak_tflops("bfloat16") is None
    CPU.make_current()
    CPU.synchronize()
    CPU.empty_cache()


def test_cuda_device_is_named_without_being_touched() -> None:
    device = Device("cuda", 3)
    assert device.is_cuda
    assert device.torch_device == torch.device("cuda", 3)
    assert device.default_backend == "nccl"


STATE = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("method", "given", "function", "expected"),
    [
        ("make_current", (), "set_device", (3,)),
        ("synchronize", (), "synchronize", (3,)),
        ("empty_cache", (), "empty_cache", ()),
        ("set_rng_state", (STATE,), "set_rng_state", (STATE, 3)),
        ("start_profiler", (), "profiler.start", ()),
        ("stop_profiler", (), "profiler.stop", ()),
        ("record_memory_history", (), "memory._record_memory_history", ()),
        ("save_memory_history", ("file",), "memory._dump_snapshot", ("file",)),
    ],
)
def test_cuda_is_asked_for_what_a_cuda_device_does(
    method: str, given: tuple[object, ...], function: str, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(f"torch.cuda.{function}", lambda *words, **named: calls.append(words))
    getattr(Device("cuda", 3), method)(*given)
    assert calls == [expected]


def test_the_queue_of_a_device_is_empty_has_work_or_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue:
        def __init__(self, answer: bool | None) -> None:
            self.answer = answer

        def query(self) -> bool:
            if self.answer is None:
                raise RuntimeError("an illegal memory access was encountered")
            return self.answer

    found = []
    for answer in (True, False, None):
        monkeypatch.setattr(torch.cuda, "default_stream", lambda index, answer=answer: Queue(answer))
        found.append((Device("cuda").queue_state(), Device("cuda").has_work_left()))
    failed = "failed: an illegal memory access was encountered"
    assert found == [("idle", False), ("has work left", True), (failed, False)]
    assert (CPU.queue_state(), CPU.has_work_left()) == ("", False)


def test_free_memory_of_a_device_includes_what_this_process_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = {"mem_get_info": (3000, 10_000), "memory_reserved": 500, "memory_allocated": 200}
    for name, amount in amounts.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, amount=amount: amount)
    assert (Device("cuda").free_bytes(), Device("cuda").used_bytes()) == (3300, 7000)


@dataclass
class Stream:
    """Stand for a stream of a device: its events are numbered."""

    num_events: int = 0

    def record_event(self, event: object) -> object:
        self.num_events += 1
        return event or self.num_events


def test_marks_are_events_of_the_current_stream_but_for_work_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU.marker() is None
    stream, answers = Stream(), [False, True, False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers.pop(0))
    mark = Device("cuda", 3).marker()
    assert mark is not None
    assert [mark(None) for _ in range(3)] == [1, None, 2]
    answers.append(False)
    assert mark(stream) is stream


def test_pinned_memory_is_told_of_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU.pinned_bytes() is None
    assert Device("cuda").pinned_bytes() == 0
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 4096})
    assert Device("cuda").pinned_bytes() == 4096


def test_random_state_round_trip() -> None:
    CPU.seed_default_generator(7)
    state = CPU.get_rng_state()
    first = torch.rand(5)
    CPU.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)
    CPU.seed_default_generator(7)
    assert torch.equal(torch.rand(5), first)


def test_a_seeded_generator_leaves_no_trace() -> None:
    CPU.seed_default_generator(7)
    expected = torch.rand(5)
    CPU.seed_default_generator(7)
    drawn = []
    for seed in (3, 4, 3):
        with seeded_generator(CPU.torch_device, seed):
            drawn.append(torch.rand(5))
    with pytest.raises(ValueError), seeded_generator(CPU.torch_device, 3):
        raise ValueError
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_memory_of_the_process_is_counted_in_mib() -> None:
    before = CPU.memory_use()
    # Not from torch, whose allocator may have memory of earlier tests.
    with mmap.mmap(-1, 64 * 1024 * 1024) as block:
        block.write(bytes([1]) * len(block))
        after = CPU.memory_use()
    assert 48 < after.allocated - before.allocated < 160
    assert after.max_allocated >= after.allocated - 1
    assert (after.reserved, after.max_reserved) == (after.allocated, after.max_allocated)


def test_what_all_processes_use_is_less_than_there_is() -> None:
    used, memory = CPU.used_bytes(), machine_memory()
    assert used is not None
    assert memory is not None
    assert 10 * 2**20 < used < memory.installed


def test_memory_of_a_cuda_device_is_counted_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    for mib, name in enumerate(names, start=1):
        monkeypatch.setattr(torch.cuda, name, lambda index, mib=mib: mib * 1024 * 1024 if index == 3 else 0)
    assert Device("cuda", 3).memory_use() == MemoryUse(1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(("platform", "expected"), [("linux", 5.0), ("darwin", 5.0 / 1024)])
def test_the_peak_is_told_in_kib_but_on_a_mac(platform: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.device._PROCESS_MEMORY", "/proc/absent")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5 * 1024))
    assert CPU.memory_use() == MemoryUse(expected, expected, expected, expected)


def test_without_proc_the_peak_stands_for_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.device._PROCESS_MEMORY", "/proc/absent")
    use = CPU.memory_use()
    assert use.allocated == use.max_allocated > 10


def test_device_follows_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [select_device(rank) for rank in range(2)] == [Device("cuda", 0), Device("cuda", 1)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert select_device(0) == Device("cuda", 0)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    assert select_device(0) == CPU
    monkeypatch.delenv("MEGATRON_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(0) == CPU


def test_more_processes_than_devices_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job half on CUDA and half on the CPU would wait for itself for ever."""
    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        with pytest.raises(ConfigurationError, match="4 processes run on this node, which has 2 CUDA devices"):
            select_device(rank)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigurationError, match="3 processes run on this node"):
        select_device(2)


def test_a_host_of_unknown_number_of_processes_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (None, "0", "1"):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if count is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
        room = CPU.host_room()
        assert room is not None
        assert room.num_processes == 1


def test_the_number_of_processes_of_the_machine_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    room = CPU.host_room()
    assert room is not None
    assert room.num_processes == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE is 'four' in the environment"):
        CPU.host_room()


@pytest.mark.parametrize("visible", ["0", "3", "GPU-8c1f-77"])
def test_a_process_that_is_shown_one_device_takes_it(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """SLURM's --gpus-per-task 1 shows local rank 1 one device, which is its number 0."""
    for name in ("MEGATRON_DEVICE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [select_device(rank) for rank in range(4)] == [Device("cuda", 0)] * 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert select_device(1) == Device("cuda", 0)


@pytest.mark.parametrize(
    "environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}]
)
def test_one_device_for_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("MEGATRON_DEVICE", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in range(2):
        with pytest.raises(ConfigurationError, match="2 processes run on this node, which has 1 CUDA devices"):
            select_device(rank)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", (989.0, 67.0)),
        ("NVIDIA H100 80GB HBM3", (989.0, 67.0)),
        ("NVIDIA H800", (989.0, 67.0)),
        ("NVIDIA B200", (2250.0, 75.0)),
        ("NVIDIA B300 SXM6 AC", (2250.0, 75.0)),
        ("NVIDIA A100-SXM4-80GB", (312.0, 19.5)),
        ("NVIDIA A800-SXM4-80GB", (312.0, 19.5)),
        ("NVIDIA L40S", (362.0, 91.6)),
        ("Tesla V100-SXM2-32GB", (125.0, 15.7)),
    ],
)
def test_peak_of_known_devices(monkeypatch: pytest.MonkeyPatch, name: str, tflops: tuple[float, float]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    device = Device("cuda", 0)
    assert (device.peak_tflops("bfloat16"), device.peak_tflops("float32")) == tflops
    assert device.peak_tflops("float16") == tflops[0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Quadro of Theseus")
    assert device.peak_tflops("bfloat16") is None


def test_arithmetic_is_never_below_float32() -> None:
    wide = {name: arithmetic_dtype(dtype_from_name(name)) for name in ("float16", "bfloat16", "float32", "float64")}
    assert wide == {
        "float16": torch.float32,
        "bfloat16": torch.float32,
        "float32": torch.float32,
        "float64": torch.float64,
    }


def test_deterministic_multiplication_finds_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    CPU.make_deterministic()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    Device("cuda").make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    Device("cuda").make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert calls == [True] * 3
    assert torch.utils.deterministic.fill_uninitialized_memory is False


@pytest.mark.parametrize(
    ("num_devices", "reachable", "expected"),
    [(4, {0, 1, 3}, True), (4, {0, 1}, False), (1, set(), False)],
    ids=["all of them", "not all", "shown its own alone"],
)
def test_a_device_has_peers_where_it_reads_all_that_the_process_sees(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, reachable: set[int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other in reachable)
    assert Device("cuda", 2 if num_devices > 1 else 0).has_peers() is expected
    assert not CPU.has_peers()


def test_work_on_a_cpu_is_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [10.0]

    def work() -> None:
        seconds[0] += 0.5

    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])
    assert CPU.time_calls(work, 3) == 1.5


@dataclass
class Driver:
    """Stand for the library of a driver: what fails returns a number other than 0."""

    failing: str = ""
    num_shutdowns: int = 0

    # The names of the methods are those of the library.

    def nvmlInit_v2(self) -> int:
        return int(self.failing == "init")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        return 6 if self.failing == "handle" or index != 0 else 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: object, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 5
        return int(self.failing == "capability")

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.mark.parametrize(
    ("failing", "expected", "num_shutdowns"),
    [("", 9, 1), ("init", None, 0), ("handle", None, 1), ("capability", None, 1)],
)
def test_the_driver_is_asked_for_its_first_device(
    failing: str, expected: int | None, num_shutdowns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert driver_capability() == expected
    assert driver.num_shutdowns == num_shutdowns


def test_without_a_driver_there_is_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.device._DRIVER_LIBRARY", "libabsent.so.1")
    assert driver_capability() is None


def test_freed_memory_is_kept_on_a_cpu_unless_the_environment_sets_the_allocator(monkeypatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda parameter, value: calls.append((parameter, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    CPU.keep_freed_memory()
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    Device("cuda").keep_freed_memory()
    assert calls == []
    CPU.keep_freed_memory()
    assert calls == [(-3, 2**25), (-1, 2**31 - 1)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    CPU.keep_freed_memory()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_the_c_library_accepts_the_thresholds() -> None:
    mallopt = ctypes.CDLL(None).mallopt
    results: list[int] = []
    library = SimpleNamespace(mallopt=lambda *arguments: results.append(mallopt(*arguments)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: library)
        CPU.keep_freed_memory()
    assert results == [1, 1]
