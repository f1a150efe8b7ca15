"""The device of a process: everything in which CUDA differs from a CPU."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.available_host_memory import HostRoom, available_bytes, machine_memory
from megatron.core.cuda_graph import CudaGraphBackend, GraphBackend
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import DeviceMark
from megatron.core.host_memory import CudaHostCopies, HostCopies

_MIB = 1024 * 1024
_MAX_MEMORY_EVENTS = 100_000
_PROCESS_MEMORY = "/proc/self/statm"
_DRIVER_LIBRARY = "libnvidia-ml.so.1"

# Dense bf16/fp16 and fp32 peaks in TFLOP/s, from the vendors' data sheets.
_PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("H200", 989.0, 67.0),
    ("H100", 989.0, 67.0),
    ("H800", 989.0, 67.0),
    ("B300", 2250.0, 75.0),
    ("B200", 2250.0, 75.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("V100", 125.0, 15.7),
)


@dataclass(frozen=True)
class MemoryUse:
    """Hold a process's memory figures in MiB; on CPU, allocated is what is resident and max allocated its peak."""

    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class Device:
    """Name the device that this process computes on and answer what depends on its kind."""

    kind: str
    index: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """Return the device in torch's own type."""
        return torch.device("cuda", self.index) if self.is_cuda else torch.device("cpu")

    @property
    def default_backend(self) -> str:
        """Return the communication backend that fits the device."""
        return "nccl" if self.is_cuda else "gloo"

    def make_current(self) -> None:
        """Direct this process's CUDA work to the device."""
        if self.is_cuda:
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def time_calls(self, work: Callable[[], object], count: int) -> float:
        """Return the seconds of so many calls of some work: by the clock on a CPU, between two events on CUDA.

        The host is then ahead of the device, so that neither launches nor the wait for the device are measured.
        """
        if not self.is_cuda:
            begun = time.perf_counter()
            for _ in range(count):
                work()
            return time.perf_counter() - begun
        with torch.cuda.device(self.index):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(count):
                work()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def make_deterministic(self) -> None:
        """Let torch use only algorithms that give the same bits again; call it before anything is computed."""
        if self.is_cuda:
            # cuBLAS asks for a workspace of its own for each stream, and torch refuses to multiply without.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Fills whatever is allocated, for programs that read memory before they write it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def keep_float32_sums(self) -> None:
        """Let no bfloat16 matrix product round its partial sums; call it before anything is computed."""
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def seed_default_generator(self, seed: int) -> None:
        """Seed torch's default generators."""
        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default generator."""
        return torch.cuda.get_rng_state(self.index) if self.is_cuda else torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's default generator."""
        if self.is_cuda:
            torch.cuda.set_rng_state(state, self.index)
        else:
            torch.set_rng_state(state)

    def empty_host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of the machine's memory from which a copy to the device need not be waited for."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def host_copies(self) -> HostCopies:
        """Return what copies tensors between the device's memory and the machine's."""
        return CudaHostCopies(self.torch_device) if self.is_cuda else HostCopies()

    def free_bytes(self) -> int | None:
        """Return the device's memory that nobody uses, caches of this process included; None where it has none."""
        if not self.is_cuda:
            return None
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return torch.cuda.mem_get_info(self.index)[0] + cached

    def used_bytes(self) -> int | None:
        """Return what all processes use of the device's memory, of the machine's on a CPU; None where it is unknown."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.index)
            return total - free
        memory = machine_memory()
        return None if memory is None else memory.installed - memory.available

    def pinned_bytes(self) -> int | None:
        """Return the machine's memory that this process has pinned, what is kept for later included; None on a CPU."""
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if self.is_cuda else None

    def host_room(self) -> HostRoom | None:
        """Return the machine's available memory and who shares it; None where it is unknown."""
        available = available_bytes()
        return None if available is None else HostRoom(available, max(_local_world_size(), 1))

    def has_peers(self) -> bool:
        """Return whether the device reads the memory of all others that this process sees, and it sees some.

        A process that was shown its own device alone shares no memory with others: all of theirs have the number 0, by
        which torch tells a machine's devices apart.
        """
        others = [index for index in range(torch.cuda.device_count()) if index != self.index]
        return self.is_cuda and bool(others) and all(torch.cuda.can_device_access_peer(self.index, i) for i in others)

    def graph_backend(self) -> GraphBackend | None:
        """Return what records work as graphs, or None where there is no such thing (every CPU)."""
        return CudaGraphBackend() if self.is_cuda else None

    def memory_use(self) -> MemoryUse:
        """Return the memory in use by this process."""
        if self.is_cuda:
            return MemoryUse(
                torch.cuda.memory_allocated(self.index) / _MIB,
                torch.cuda.max_memory_allocated(self.index) / _MIB,
                torch.cuda.memory_reserved(self.index) / _MIB,
                torch.cuda.max_memory_reserved(self.index) / _MIB,
            )
        resident = _resident_bytes() / _MIB
        # The kernel counts the peak in coarse steps: it can lag behind what is resident now.
        peak = max(resident, _peak_bytes() / _MIB)
        return MemoryUse(resident, peak, resident, peak)

    def queue_state(self) -> str:
        """Return in words whether the device has work left, or what it failed with; "" on a CPU. It is not waited for.

        The queue is the default stream's, which other threads may be asked for.
        """
        if not self.is_cuda:
            return ""
        try:
            return "idle" if torch.cuda.default_stream(self.index).query() else "has work left"
        except RuntimeError as error:
            return f"failed: {error}"

    def has_work_left(self) -> bool:
        """Return whether the default stream has work that is not done; False on a CPU, and where the device failed."""
        return self.queue_state() == "has work left"

    def marker(self) -> Callable[[DeviceMark | None], DeviceMark | None] | None:
        """Return what marks the end of the work that the current stream was given; None on a CPU, which has no queue.

        It moves an old mark that it is given. While work is recorded as a graph, and given to nobody, the mark is None.
        """
        return _mark_current_stream if self.is_cuda else None

    def start_profiler(self) -> None:
        """Begin the part of the run that nsys --capture-range=cudaProfilerApi records."""
        if self.is_cuda:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop_profiler(self) -> None:
        """End the part of the run that nsys records."""
        if self.is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def record_memory_history(self) -> None:
        """Keep from now on where each block of the device's memory was asked for and given back."""
        if self.is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    def save_memory_history(self, path: str) -> None:
        """Write what was kept to a file.

        Raises:
            OSError: the file cannot be written.
        """
        if self.is_cuda:
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]

    def peak_tflops(self, dtype_name: str) -> float | None:
        """Return the device's dense matrix peak in TFLOP/s, or None where it is not known (every CPU)."""
        if not self.is_cuda:
            return None
        name = torch.cuda.get_device_name(self.index)
        for pattern, low_precision, single in _PEAK_TFLOPS:
            if pattern in name:
                return low_precision if dtype_name in ("bfloat16", "float16") else single
        return None

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def _mark_current_stream(old: Any) -> DeviceMark | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    event: DeviceMark = torch.cuda.current_stream().record_event(old)
    return event


@contextmanager
def seeded_generator(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's default generator inside the context; after it, it goes on as if nothing had been drawn.

    No work on the device is waited for: CUDA's generators have their state, a seed and a count, on the host.
    """
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    outer = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(outer)


def select_device(local_rank: int) -> Device:
    """Return the CUDA device of this local rank, or the CPU of a machine that has none.

    ``MEGATRON_DEVICE=cpu`` in the environment keeps a run on the CPU of a machine that has GPUs. A launcher may show
    each process one device, its own (SLURM's ``--gpus-per-task 1``): that is device 0 whatever the local rank. It
    counts as the process's own where ``CUDA_VISIBLE_DEVICES`` names one device and torchrun, whose processes share
    their environment, did not start them.

    Raises:
        ConfigurationError: more processes were started on this machine than it has CUDA devices.
    """
    if os.environ.get("MEGATRON_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        return Device("cpu")
    num_processes = max(local_rank + 1, _local_world_size())
    num_devices = torch.cuda.device_count()
    if num_devices == 1 and _has_device_of_its_own():
        return Device("cuda", 0)
    if num_processes > num_devices:
        raise ConfigurationError(
            f"{num_processes} processes on this machine, which has {num_devices} CUDA devices; start at most "
            f"{num_devices} with --nproc-per-node, or set MEGATRON_DEVICE=cpu to run them all on the CPU (where each "
            "has a device of its own, CUDA_VISIBLE_DEVICES must name it, and torchrun must not start them)"
        )
    return Device("cuda", local_rank)


def _has_device_of_its_own() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) == 1 and visible.strip() != "" and "TORCHELASTIC_RUN_ID" not in os.environ


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, or None where there is no driver to ask."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def driver_capability() -> int | None:
    """Return the major compute capability of the driver's first GPU without starting CUDA; None if there is none."""
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if driver.nvmlInit_v2() != 0:
        return None
    failed = driver.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) or driver.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    )
    driver.nvmlShutdown()
    return None if failed else major.value


def _local_world_size() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal():
        raise ConfigurationError(f"LOCAL_WORLD_SIZE is {text!r} in the environment; a whole number is expected")
    return int(text)


def _resident_bytes() -> int:
    """Return the memory that is resident now, or the peak where the system has no /proc to ask."""
    if not os.path.exists(_PROCESS_MEMORY):
        return _peak_bytes()
    with open(_PROCESS_MEMORY) as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
