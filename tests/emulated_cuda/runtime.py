"""The functions and classes that a CUDA build of torch has in ``torch._C``; torch's own Python code runs on them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.emulated_cuda.activation import load_bindings
from tests.emulated_cuda.gpus import GPUS, DeviceProperties

core: Any = load_bindings()

CUDA_VERSION = "12.9"
_NCCL_VERSION = (2, 27, 3)
_NUMBER_OF_CUDA = 1  # of c10::DeviceType
_COUNTS = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)
_EXIT_STATUS_OF_REPORTS = 86
_DEFAULT_POOL = (0, 0)


def properties() -> DeviceProperties:
    """Return the properties of the emulated GPU type."""
    return GPUS[os.environ["EMULATED_CUDA"]]


class StreamBase(torch._C.Stream):
    """Be ``torch._C._CudaStreamBase``."""

    def __new__(cls, priority: int = 0, **known: int) -> StreamBase:
        if "stream_ptr" in known:
            # Justified: no code of the project creates a torch.cuda.ExternalStream.
            raise NotImplementedError("torch.cuda.ExternalStream is not emulated")
        if "stream_id" not in known:
            device = core.current_device()
            known = {"stream_id": core.new_stream(device, priority), "device_index": device}
        self = super().__new__(
            cls, stream_id=known["stream_id"], device_index=known["device_index"], device_type=_NUMBER_OF_CUDA
        )
        self._priority = priority
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    @property
    def priority(self) -> int:
        return -1 if self._priority < 0 else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class EventBase:
    """Be ``torch._C._CudaEventBase``."""

    _event: Any

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> EventBase:
        if interprocess:
            # Justified: no code of the project shares an event between processes.
            raise NotImplementedError("torch.cuda.Event(interprocess=True) is not emulated")
        self = super().__new__(cls)
        self._event = core.Event(enable_timing)
        return self

    @property
    def device(self) -> torch.device | None:
        return torch.device("cuda", self._event.device) if self._event.is_recorded else None

    @property
    def cuda_event(self) -> int:
        return id(self._event) if self._event.is_recorded else 0

    def record(self, stream: Any) -> None:
        self._event.record(stream.device_index, stream.stream_id)

    def wait(self, stream: Any) -> None:
        self._event.wait(stream.device_index, stream.stream_id)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: EventBase) -> float:
        return float(self._event.elapsed_time(end._event))


class GraphBase:
    """Be ``torch._C._CUDAGraph``."""

    _graph: Any

    def __new__(cls, keep_graph: bool = False) -> GraphBase:
        self = super().__new__(cls)
        self._graph = core.Graph()
        return self

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self._graph.begin_capture(tuple(pool or (0, 0)), capture_error_mode)

    def capture_end(self) -> None:
        self._graph.end_capture()

    def instantiate(self) -> None:
        pass

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        pool: tuple[int, int] = self._graph.pool()
        return pool

    def enable_debug_mode(self) -> None:
        pass


def _stream_data(device: int, stream_id: int) -> tuple[int, int, int]:
    return stream_id, device, _NUMBER_OF_CUDA


def _memory_stats(device: int) -> dict[str, Any]:
    found = core.memory_counts(device)
    kinds = ("all", "small_pool", "large_pool")
    nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    stats: dict[str, Any] = {}
    for name in _COUNTS:
        counts = found.get(name, {})
        stats[name] = {
            kind: {key: getattr(counts[kind], key) for key in nothing} if kind in counts else dict(nothing)
            for kind in kinds
        }
    ooms = core.num_out_of_memory(device)
    return stats | {"num_alloc_retries": ooms, "num_ooms": ooms, "num_sync_all_streams": 0, "max_split_size": -1}


def _host_memory_stats() -> dict[str, Any]:
    count = core.pinned_bytes()
    figures = {"current": count.current, "peak": count.peak, "allocated": count.allocated, "freed": count.freed}
    return {"allocated_bytes": figures, "active_bytes": dict(figures)}


def _memory_snapshot(_: Any = None) -> dict[str, Any]:
    segments: dict[int, dict[str, Any]] = {}
    for block in core.list_blocks():
        segment = segments.setdefault(
            block.segment,
            {"device": block.device, "address": block.segment, "stream": block.stream, "total_size": 0}
            | {"allocated_size": 0, "active_size": 0, "requested_size": 0, "segment_type": "large"}
            | {"segment_pool_id": block.pool, "is_expandable": False, "frames": [], "blocks": []},
        )
        segment["total_size"] += block.size
        used = block.size if block.is_allocated else 0
        segment["allocated_size"] += used
        segment["active_size"] += used
        segment["requested_size"] += block.requested if block.is_allocated else 0
        state = "active_allocated" if block.is_allocated else "inactive"
        segment["blocks"].append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": state,
                "frames": [],
            }
        )
    traces: list[list[Any]] = [[] for _ in range(core.device_count())]
    return {"segments": list(segments.values()), "device_traces": traces, "allocator_settings": {}}


def _initialize() -> None:
    """Be ``torch._C._cuda_init``, which puts into torch.cuda what only a device knows."""
    torch.cuda._get_device_properties = lambda device: properties()
    torch.cuda.default_generators = tuple(core.default_generator(index) for index in range(core.device_count()))


class MemPoolBase:
    """Be ``torch._C._MemPool``: memory that only allocations inside of ``torch.cuda.use_mem_pool`` are given."""

    def __init__(self, allocator: Any = None, is_user_created: bool = True, *_: bool) -> None:
        self.allocator = allocator
        self._id = core.new_user_pool()
        core.retain_pool(self._id)

    def __del__(self) -> None:
        core.release_pool(self._id)

    @property
    def id(self) -> tuple[int, int]:
        return self._id  # type: ignore[no-any-return]


def _begin_allocate_to_pool(device: int, pool: tuple[int, int]) -> None:
    if tuple(core.chosen_pool(device)) != _DEFAULT_POOL:
        raise RuntimeError("beginAllocateToPool: already recording to a pool")
    core.retain_pool(pool)
    core.choose_pool(device, pool)


def _sleep(cycles: int) -> None:
    """Do nothing: emulated work takes no time of its own."""


_cudart = SimpleNamespace(
    cudaError=SimpleNamespace(success=0),
    cudaMemGetInfo=lambda device: (core.free_memory(device), core.total_memory()),
    cudaGetErrorString=lambda error: f"error {error}",
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
)


def add_cuda_functions() -> None:
    """Add what ``torch.cuda`` looks for in ``torch._C`` when it is imported."""

    def is_capturing() -> bool:
        return bool(core.is_capturing(core.current_device()))

    def exchange_device(device: int) -> int:
        return -1 if device < 0 else int(core.exchange_device(device))

    functions: dict[str, Any] = {
        "_has_cuda": True,
        "_cudart": _cudart,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": GraphBase,
        "_CudaDeviceProperties": DeviceProperties,
        "_graph_pool_handle": core.new_pool,
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_init": _initialize,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": core.device_count,
        "_cuda_getDevice": core.current_device,
        "_cuda_setDevice": core.exchange_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_getArchFlags": lambda: "sm_80 sm_86 sm_90 sm_100",
        "_cuda_synchronize": lambda: core.synchronize_device(core.current_device()),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": _sleep,
        "_cuda_getCurrentStream": lambda device: _stream_data(device, core.current_stream(device)),
        "_cuda_getDefaultStream": lambda device: _stream_data(device, 0),
        "_cuda_setStream": lambda stream_id, device_index, device_type: core.set_stream(device_index, stream_id),
        "_cuda_getCurrentRawStream": core.current_stream,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_hostMemoryStats": _host_memory_stats,
        "_cuda_resetPeakMemoryStats": core.reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": core.reset_peaks,
        "_cuda_emptyCache": core.empty_cache,
        "_cuda_CUDAAllocator": object,
        "_MemPool": MemPoolBase,
        "_cuda_beginAllocateToPool": _begin_allocate_to_pool,
        "_cuda_beginAllocateCurrentThreadToPool": _begin_allocate_to_pool,
        "_cuda_endAllocateToPool": lambda device, pool: core.choose_pool(device, _DEFAULT_POOL),
        "_cuda_releasePool": lambda device, pool: core.release_pool(pool),
        "_host_emptyCache": core.empty_host_cache,
        "_cuda_memorySnapshot": _memory_snapshot,
        "_cuda_record_memory_history": lambda *settings, **named: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_nccl_version": lambda: _NCCL_VERSION[0] << 32 | _NCCL_VERSION[1] << 16 | _NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
    }
    for name, value in functions.items():
        setattr(torch._C, name, value)
    core.set_capability(properties().major, properties().minor)


class _Ranges(contextlib.nullcontext[None]):
    """Be ``torch.autograd.profiler.emit_nvtx``, for which a tool looks at the ranges: here is none."""

    def __init__(self, enabled: bool = True, record_shapes: bool = False) -> None:
        super().__init__()


def finish_import() -> None:
    """Change the few parts of torch that the CPU build has compiled in."""
    torch.version.cuda = CUDA_VERSION
    resize_on_host = torch._C.StorageBase.resize_

    def resize(self: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize_on_host(self, num_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        core.resize_storage(whole, num_bytes)
        return self

    torch.UntypedStorage.resize_ = resize
    torch.autograd.profiler.emit_nvtx = _Ranges  # type: ignore[assignment, misc]
    atexit.register(_fail_after_reports)


def _fail_after_reports() -> None:
    """End the process with an error if it reported a race, whatever has become of the exception."""
    if not core.reports():
        return
    print(f"emulated CUDA: {len(core.reports())} reports, of which the first: {core.reports()[0]}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_STATUS_OF_REPORTS)
