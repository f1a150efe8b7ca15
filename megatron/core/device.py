"""The device of a process: everything that differs between CUDA and CPU."""

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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_RETURNED_BYTES, _NEVER_TRIMMED = 32 * _MIB, 2**31 - 1
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
    """Memory use of a process in MiB; on CPU, allocated is the resident set size and max_allocated its peak."""

    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class Device:
    """The device that this process computes on, and the operations that depend on its kind."""

    kind: str
    index: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """Return the device as a ``torch.device``."""
        return torch.device("cuda", self.index) if self.is_cuda else torch.device("cpu")

    @property
    def default_backend(self) -> str:
        """Return the default communication backend of the device."""
        return "nccl" if self.is_cuda else "gloo"

    def make_current(self) -> None:
        """Make the device current for this process's CUDA work."""
        if self.is_cuda:
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def time_calls(self, work: Callable[[], object], count: int) -> float:
        """Return the time in seconds of ``count`` calls of ``work``: wall-clock time on CPU, CUDA event time on CUDA.

        With CUDA events the host runs ahead of the device, so neither launches nor device synchronization are measured.
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
        """Let torch use only deterministic algorithms; call it before any computation."""
        if self.is_cuda:
            # cuBLAS needs a workspace per stream for this, and torch raises an error without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # It would fill every allocation, for programs that read uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def keep_float32_sums(self) -> None:
        """Disable reduced-precision accumulation in bfloat16 matmuls; call it before any computation."""
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def seed_default_generator(self, seed: int) -> None:
        """Seed torch's default generators."""
        torch.manual_seed(seed)

    def seed_generator(self, seed: int) -> None:
        """Seed the device's default generator; other devices keep their states."""
        if self.is_cuda:
            torch.cuda.default_generators[self.index].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

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
        """Allocate host memory from which asynchronous copies to the device are possible (pinned on CUDA)."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def host_copies(self) -> HostCopies:
        """Return the object that copies tensors between device and host memory."""
        return CudaHostCopies(self.torch_device) if self.is_cuda else HostCopies()

    def free_bytes(self) -> int | None:
        """Return the device's free memory plus this process's allocator cache; None on CPU."""
        if not self.is_cuda:
            return None
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return torch.cuda.mem_get_info(self.index)[0] + cached

    def used_bytes(self) -> int | None:
        """Return the memory that all processes use on the device (host memory on CPU); None if it is unknown."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.index)
            return total - free
        memory = machine_memory()
        return None if memory is None else memory.installed - memory.available

    def pinned_bytes(self) -> int | None:
        """Return the host memory pinned by this process, including torch's cache of pinned blocks; None on CPU."""
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if self.is_cuda else None

    def host_room(self) -> HostRoom | None:
        """Return the available host memory and the number of processes that share it; None if it is unknown."""
        available = available_bytes()
        return None if available is None else HostRoom(available, max(_local_world_size(), 1))

    def has_peers(self) -> bool:
        """Return whether the device has peer access to all other devices that this process sees, and sees at least one.

        A process that sees only its own device cannot share memory with other devices: each process then calls its
        device number 0, and torch tells the devices of a node apart by number.
        """
        others = [index for index in range(torch.cuda.device_count()) if index != self.index]
        return self.is_cuda and bool(others) and all(torch.cuda.can_device_access_peer(self.index, i) for i in others)

    def graph_backend(self) -> GraphBackend | None:
        """Return the backend that captures work as graphs, or None if there is none (on CPU)."""
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
        # The kernel updates the peak in coarse steps: it can be below the current resident size.
        peak = max(resident, _peak_bytes() / _MIB)
        return MemoryUse(resident, peak, resident, peak)

    def memory_summary(self) -> str:
        """Describe the memory in use by this process in several lines."""
        if self.is_cuda:
            return torch.cuda.memory_summary(self.index)
        use = self.memory_use()
        return f"resident memory: {use.allocated:.0f} MiB\npeak resident memory: {use.max_allocated:.0f} MiB"

    def queue_state(self) -> str:
        """Describe whether the device has work left, or its failure; "" on CPU. It does not wait for the device.

        The queue is that of the default stream, and the method may be called from any thread.
        """
        if not self.is_cuda:
            return ""
        try:
            return "idle" if torch.cuda.default_stream(self.index).query() else "has work left"
        except RuntimeError as error:
            return f"failed: {error}"

    def has_work_left(self) -> bool:
        """Return whether the default stream has unfinished work; False on CPU and if the device failed."""
        return self.queue_state() == "has work left"

    def marker(self) -> Callable[[DeviceMark | None], DeviceMark | None] | None:
        """Return the function that records an event at the end of the current stream's work; None on CPU.

        The function reuses the event passed to it, if any. During graph capture the function returns None.
        """
        return _mark_current_stream if self.is_cuda else None

    def start_profiler(self) -> None:
        """Start the section of the run that nsys --capture-range=cudaProfilerApi records."""
        if self.is_cuda:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop_profiler(self) -> None:
        """Stop the section of the run that nsys records."""
        if self.is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def record_memory_history(self) -> None:
        """Start recording the call stacks of every device memory allocation and free."""
        if self.is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    def save_memory_history(self, path: str) -> None:
        """Write the recorded memory history to a file.

        Raises:
            OSError: the file cannot be written.
        """
        if self.is_cuda:
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]

    def peak_tflops(self, dtype_name: str) -> float | None:
        """Return the device's peak dense matmul throughput in TFLOP/s, or None if it is unknown (on every CPU)."""
        if not self.is_cuda:
            return None
        name = torch.cuda.get_device_name(self.index)
        for pattern, low_precision, single in _PEAK_TFLOPS:
            if pattern in name:
                return low_precision if dtype_name in ("bfloat16", "float16") else single
        return None

    def keep_freed_memory(self) -> None:
        """Let glibc's allocator keep what a CPU process frees, for the tensors of the next step.

        By default it returns large blocks to the system, which clears every page of them when they are allocated
        again. Blocks of 32 MiB and more are still returned. Variables such as ``MALLOC_TRIM_THRESHOLD_`` in the
        environment take precedence.
        """
        mallopt = None if self.is_cuda else getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
            return
        mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIMMED)

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def is_captured(x: torch.Tensor) -> bool:
    """Return whether a CUDA graph records the operations on a tensor's device instead of running them."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _mark_current_stream(old: Any) -> DeviceMark | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    event: DeviceMark = torch.cuda.current_stream().record_event(old)
    return event


@contextmanager
def seeded_generator(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's default generator inside the context and restore its state afterwards.

    It does not synchronize the device: CUDA generators keep their state, a seed and an offset, on the host.
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
    """Return the CUDA device of this local rank, or the CPU if the node has no GPU.

    ``MEGATRON_DEVICE=cpu`` in the environment selects the CPU on a node with GPUs. A launcher may show each process
    only its own device (SLURM's ``--gpus-per-task 1``), which is then device 0 for every local rank. This is assumed if
    ``CUDA_VISIBLE_DEVICES`` names one device and the process was not started by torchrun, whose processes share their
    environment.

    Raises:
        ConfigurationError: more processes were started on this node than it has CUDA devices.
    """
    if os.environ.get("MEGATRON_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        return Device("cpu")
    num_processes = max(local_rank + 1, _local_world_size())
    num_devices = torch.cuda.device_count()
    if num_devices == 1 and _has_device_of_its_own():
        return Device("cuda", 0)
    if num_processes > num_devices:
        raise ConfigurationError(
            f"{num_processes} processes run on this node, which has {num_devices} CUDA devices; start at most "
            f"{num_devices} with --nproc-per-node, or set MEGATRON_DEVICE=cpu to run them all on the CPU (if each sees "
            "a different device, CUDA_VISIBLE_DEVICES must name it, and torchrun must not start them)"
        )
    return Device("cuda", local_rank)


def current_device() -> Device:
    """Return the CUDA device that this process has made current, or the CPU if it may use no GPU."""
    return Device("cuda", torch.cuda.current_device()) if num_cuda_devices() else Device("cpu")


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that this process may use; 0 with ``MEGATRON_DEVICE=cpu``."""
    return 0 if os.environ.get("MEGATRON_DEVICE", "") == "cpu" else torch.cuda.device_count()


def _has_device_of_its_own() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) == 1 and visible.strip() != "" and "TORCHELASTIC_RUN_ID" not in os.environ


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, or None if there is no driver."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def driver_capability() -> int | None:
    """Return the first GPU's major compute capability from the driver without initializing CUDA; None without GPU."""
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
    """Return the current resident set size, or the peak on systems without /proc."""
    if not os.path.exists(_PROCESS_MEMORY):
        return _peak_bytes()
    with open(_PROCESS_MEMORY) as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
