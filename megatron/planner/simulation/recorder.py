"""Record a simulated step operation by operation, without computing values.

A record has the operations with the sizes of their GEMMs, from which FLOPs follow, host synchronizations, transfers,
and the live device memory by holder, tracked per storage.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.core.process_group import CollectiveCall

_OPERANDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), ("self", "mat2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
    "linear": ("input", "weight"),
}
"""Names of both operands in the operators' schemas."""
_PACKED = torch.float4_e2m1fn_x2
"""Dtype with two 4-bit elements per item."""
_BY_BYTES = ("aten", "prim", "prims", "c10d", "profiler")
"""Namespaces whose operators only move bytes, unless their names indicate otherwise."""
_COMPUTES = re.compile(r"mm(_|$)|matmul|linear(_|$)|attention|conv(olution|_|\d)|einsum|tensordot|(^|_)(lstm|gru)(_|$)")
"""Names of operators that compute more than memory traffic."""


@dataclass(frozen=True)
class Gemm:
    """Sizes of ``batch`` matmuls ``[rows, inner] @ [inner, columns]`` in one launch.

    The groups of a grouped GEMM count as equally large, so one size may be a fraction.
    """

    batch: int
    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """Return the FLOPs; a multiply-add has two."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


def gemm_of(func: Any, values: Mapping[str, Any]) -> Gemm | None:
    """Return the sizes of an operator's GEMM, or None if it has none; ``values`` are its arguments by name.

    Rows after the last group of a grouped GEMM do not count. If the group offsets have no values, the groups are
    assumed to hold all rows.
    """
    namespace, name = func._schema.name.split("::")
    name = name if name in _OPERANDS else name.removesuffix("_")
    if namespace != "aten" or name not in _OPERANDS:
        return None
    left, right = (values[operand] for operand in _OPERANDS[name])
    inner = left.shape[-1] * (2 if left.dtype is _PACKED else 1)
    if "grouped" in name:
        return _grouped(left, right, values.get("offs"))
    if name == "linear":
        return Gemm(1, math.prod(left.shape[:-1]), inner, math.prod(right.shape[:-1]))
    # A vector is one row on the left, and one column on the right.
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    return Gemm(math.prod(left.shape[:-2]), rows, inner, columns)


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> Gemm:
    """Return the sizes of a grouped GEMM: the groups divide the rows, the columns, or the inner dimension."""
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if ends is None:
        return Gemm(left.shape[0], rows, inner, columns)
    groups = len(ends)

    def mean(size: int) -> float:
        return (size if isinstance(ends, FakeTensor) or not groups else int(ends[-1])) / max(groups, 1)

    if left.dim() == right.dim():
        # In the gradient of a weight, each group sums over its own tokens.
        return Gemm(groups, rows, mean(inner), columns)
    return Gemm(groups, mean(rows), inner, columns) if left.dim() == 2 else Gemm(groups, rows, inner, mean(columns))


def is_uncounted(func: Any) -> bool:
    """Return whether an operator with unknown FLOPs may compute more than memory traffic."""
    namespace, name = func._schema.name.split("::")
    return namespace not in _BY_BYTES or _COMPUTES.search(name) is not None


PHASES = ("begin", "batch", "forward", "backward", "reduction", "optimizer", "end")
"""Phases of a step, in order."""
PASSES = ("batch", "forward", "backward")
"""Phases that run per micro-batch."""
HOST_DIRECTIONS = TO_HOST, TO_DEVICE = ("to the host", "to the device")


@dataclass(frozen=True)
class Operation:
    """One operation that launches kernels.

    ``shapes`` are those of its tensors, and ``itemsize`` is the size of their elements, which is 1/2 for NVFP4.
    ``num_bytes`` are the bytes that it reads and writes. ``flops`` are the FLOPs of a matmul or of attention, without
    masked scores. ``where`` is the line of this project that called it; for an autograd operation, the line whose
    gradient it computes. ``gemm`` has the sizes of a GEMM. ``is_recomputed`` says that activation recomputation runs
    it. ``is_uncounted`` says that it may have unknown FLOPs: a custom operator, or a Triton kernel with ``tl.dot`` but
    no ``launch_metadata``. ``is_expert`` says that it is a GEMM of MoE experts.
    """

    phase: str
    name: str
    where: str
    shapes: tuple[tuple[int, ...], ...]
    itemsize: float
    num_bytes: int
    flops: float = 0.0
    gemm: Gemm | None = None
    is_recomputed: bool = False
    is_uncounted: bool = False
    is_expert: bool = False


@dataclass(frozen=True)
class HostWait:
    """One host synchronization: the host waits for the device."""

    phase: str
    where: str
    what: str


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy between device and host: the line that called it, its direction, and its bytes."""

    phase: str
    where: str
    direction: str
    num_bytes: int


@dataclass(frozen=True)
class Communication:
    """One communication of a step; ``crosses_machines`` says whether its group spans several nodes."""

    phase: str
    where: str
    call: CollectiveCall
    crosses_machines: bool


Transfer = Communication | HostCopy
"""Transfer that runs in parallel to the kernels."""


@dataclass(frozen=True)
class LinkEvent:
    """Start of a transfer after ``num_operations`` operations, or the wait of all further operations for its end."""

    phase: str
    num_operations: int
    transfer: Transfer
    is_wait: bool


@dataclass
class StepRecord:
    """Record of a step of one rank, in order; ``memory`` has the live bytes by holder after a number of operations.

    ``link_events`` begin with ``num_carried`` transfers that are still in flight from the previous step.
    """

    operations: list[Operation] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    link_events: list[LinkEvent] = field(default_factory=list)
    num_carried: int = 0
    memory: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    peak_bytes: int = 0
    peak_holders: Mapping[str, int] = field(default_factory=dict)
    peak_phase: str = ""


HOLDERS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Holders of device memory; ``buffers`` is everything else, such as work space and messages."""
_BLOCK_BYTES = 512
"""Block size of torch's caching allocator."""
_GRADIENT_FILES = "megatron/core/distributed/"


class LiveMemory:
    """Live memory of fake CUDA tensors, tracked per storage.

    ``bytes_by_holder`` is in the order of ``HOLDERS``.
    """

    def __init__(self) -> None:
        self.bytes_by_holder = [0] * len(HOLDERS)
        self.logits_widths = range(0)
        self._live: dict[int, tuple[int, int]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_by_holder)

    def see(self, tensor: torch.Tensor, phase: str, where: str) -> bool:
        """Count a tensor's storage if it is new, and return whether it is."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        num_bytes = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._set(key, num_bytes, HOLDERS.index(self._holder(tensor, phase, where)))
        weakref.finalize(storage, self._free, key)
        return True

    def assign(self, tensors: Iterable[torch.Tensor], holder: str) -> None:
        """Set the holder of live tensors."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                num_bytes, _ = self._live[key]
                self._free(key)
                self._set(key, num_bytes, HOLDERS.index(holder))

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as free although the tensor exists."""
        self._free(tensor.untyped_storage()._cdata)

    def remember(self, tensor: torch.Tensor, holder: str) -> None:
        """Count memory again after `forget`."""
        if tensor.untyped_storage()._cdata in self._live:
            return
        num_bytes = -(-tensor.untyped_storage().nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._set(tensor.untyped_storage()._cdata, num_bytes, HOLDERS.index(holder))

    def resized(self, storage: torch.UntypedStorage) -> bool:
        """Update the size of a storage if it is tracked, and return whether it is."""
        if storage._cdata not in self._live:
            return False
        holder = self._live[storage._cdata][1]
        self._free(storage._cdata)
        self._set(storage._cdata, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES, holder)
        return True

    def _holder(self, tensor: torch.Tensor, phase: str, where: str) -> str:
        if _GRADIENT_FILES in where:
            return "gradients"
        if phase in ("forward", "backward") and tensor.dim() and tensor.shape[-1] in self.logits_widths:
            return "logits"
        return "activations" if phase == "forward" else "buffers"

    def _set(self, key: int, num_bytes: int, holder: int) -> None:
        self._live[key] = (num_bytes, holder)
        self.bytes_by_holder[holder] += num_bytes

    def _free(self, key: int) -> None:
        num_bytes, holder = self._live.pop(key, (0, 0))
        self.bytes_by_holder[holder] -= num_bytes


_RECOMPUTATION = torch.utils.checkpoint.__file__
_PROJECT = Path(__file__).resolve().parents[3]
# Not the whole folder, since a virtual environment may be in it.
_NAMED = (f"{_PROJECT / 'megatron'}/", str(_PROJECT / "pretrain_gpt.py"))
# Modules that copy on behalf of other modules.
_PASSED_OVER = (
    str(Path(__file__).resolve().parents[1]),
    str(_PROJECT / "megatron/core/host_memory.py"),
    str(_PROJECT / "megatron/core/weight_prefetch.py"),
)
_GROUPED_LINEAR = "moe/grouped_experts.py"
"""End of the path of the file with the experts' linear layers."""
_VIEWS = frozenset(
    (
        *(
            "view",
            "_unsafe_view",
            "t",
            "transpose",
            "permute",
            "slice",
            "select",
            "split",
            "split_with_sizes",
            "unbind",
        ),
        *("expand", "detach", "alias", "squeeze", "unsqueeze", "as_strided", "narrow", "chunk", "unfold", "movedim"),
        *("lift_fresh", "diagonal", "_reshape_alias", "view_as_real", "is_same_size", "record_stream"),
    )
)
_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_")
_IN_PLACE = ("_fused_sgd_",)
"""In-place operations that torch does not support on fake tensors."""
_OVERWRITE = ("copy_", "zero_", "fill_", "bernoulli_", "normal_", "uniform_", "random_", "_foreach_copy_")
"""Operations that do not read what they overwrite (for the last one: CopyFunctor in ATen's ForeachBinaryOpList.cu)."""
_CROSSING = ("_to_copy", "copy_")
_HEADS_BEHIND = "_flash_attention_"
"""Kernels that take ``[b, s, heads, d]``; all other attention kernels take ``[b, heads, s, d]``."""
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_DEVICE_OF = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations on fake CUDA tensors; operations on CPU tensors alone are computed.

    Each value that the host reads from the device is 1. The caller sets ``phase`` during the step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = StepRecord()
        self.memory = LiveMemory()
        self.phase = "begin"
        self.is_crossing_machines: dict[tuple[str, ...], bool] = {}
        self.axes_of_ranks: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._where_of_node: dict[int, str] = {}
        self._last_listing: FrameType | None = None
        self._announced: Communication | None = None
        self._under_way: dict[int, tuple[Any, Transfer]] = {}

    def start(self) -> None:
        """Start a new record; live memory and transfers in flight are kept."""
        carried = [transfer for _, transfer in self._under_way.values()]
        events = [LinkEvent(self.phase, 0, each, is_wait=False) for each in carried]
        self.record = StepRecord(link_events=events, num_carried=len(events))
        self._note_memory(is_peak=True)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized."""
        if self.memory.resized(storage):
            self._note_memory()

    def wait(self, what: str, where: str | None = None) -> None:
        """Record that the host waits."""
        self.record.waits.append(HostWait(self.phase, where or self._where(), what))

    def communicate(self, call: CollectiveCall) -> None:
        """Record a communication; pass this method to process groups as their observer."""
        crosses = self.is_crossing_machines.get(call.axes, False)
        self._announced = Communication(self.phase, self._where(), call, crosses)
        self.record.communications.append(self._announced)

    def begin_transfer(self, work: Any) -> None:
        """Record that the last observed communication is in flight; ``work`` is its handle."""
        if self._announced is None or work is None:
            return
        self._begin(work, self._announced)
        self._announced = None

    def begin_copy(self, work: Any, direction: str, num_bytes: int) -> None:
        """Record that a copy between host and device is in flight; ``work`` is its handle."""
        copy = HostCopy(self.phase, self._where(), direction, num_bytes)
        self.record.host_copies.append(copy)
        self._begin(work, copy)

    def end_transfer(self, work: Any) -> None:
        """Record that operations launched from now on wait for a transfer; the host does not wait."""
        _, transfer = self._under_way.pop(id(work), (None, None))
        if transfer is not None:
            self._note_link(transfer, is_wait=True)

    def launch(
        self,
        name: str,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        flops: float | None = 0.0,
        gemm: Gemm | None = None,
    ) -> None:
        """Record a kernel that only a CUDA build has; ``flops`` is None if they are not known."""
        num_bytes = sum(map(_spanned_bytes, (*read, *written)))
        work = _Work(flops or 0.0, gemm, is_uncounted=flops is None)
        self._note(name, [*read, *written], num_bytes, work, self._named_after_forward(self._where()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation without values, and record it."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        # There are many operations. Those without anything to record take this shorter path.
        with torch._C.DisableTorchFunction():
            if (namespace == "prim" or name in _VIEWS) and args and isinstance(args[0], FakeTensor):
                return func(*args, **kwargs)
            return self._run(func, namespace, name, args, kwargs)

    def _result(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation, without values."""
        if func._overloadname == "dtype_out":
            # torch 2.11 has no such overload of a matmul for fake tensors and would take the dtype for a factor.
            return kwargs["out"]
        return None if name in _IN_PLACE else func(*args, **kwargs)

    def _run(self, func: Any, namespace: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_on_host = not any(isinstance(tensor, FakeTensor) for tensor in given)
        if is_on_host and namespace != "c10d" and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self._note_value()
            return 1.0 if given[0].dtype.is_floating_point else 1
        result = self._result(func, name, args, kwargs)
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        where = self._where()
        is_new = [self.memory.see(tensor, self.phase, where) for tensor in returned]
        if any(is_new):
            self._note_memory()
        if namespace == "c10d":
            return result
        devices = {tensor.device.type for tensor in (*given, *returned)}
        if name in _CROSSING and len(devices) > 1:
            target = returned[0]
            copy = HostCopy(self.phase, where, TO_DEVICE if target.is_cuda else TO_HOST, target.nbytes)
            self.record.host_copies.append(copy)
            # It runs in order with the kernels.
            self._note_link(copy, is_wait=False)
            self._note_link(copy, is_wait=True)
            is_async = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
            if not is_async:
                ends = f"{given[-1].device.type} to {returned[0].device.type}"
                self.wait(f"copy from {ends}", where)
        if name in _INDEXING and any(tensor.dtype is torch.bool and tensor.is_cuda for tensor in given[1:]):
            self.wait("index by a mask", where)
        if "cuda" not in devices or name in _ALLOCATIONS:
            return result
        cuda = [tensor for tensor in given if tensor.device.type == "cuda"]
        made = [tensor for tensor in returned if tensor.device.type == "cuda"]
        num_bytes = _moved_bytes(func, name, args, kwargs, cuda, made)
        work = _work(func, args, kwargs, result)
        if work.flops:
            # An output tensor is not an operand, and may have a wider dtype.
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if name.startswith(_HEADS_BEHIND):
            given = [tensor.transpose(1, 2) for tensor in given if tensor.dim() == 4]
        name = name if namespace == "aten" else f"{namespace}::{name}"
        self._note(name, given or made, num_bytes, work, self._named_after_forward(where))
        return result

    def _note(self, name: str, tensors: Sequence[torch.Tensor], num_bytes: int, work: _Work, where: str) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors[:4])
        # If the accumulator has a wider dtype than the matmul that is added to it, use that of the matmul.
        sizes = [_element_bytes(tensor) for tensor in tensors[:4] if tensor.dtype.is_floating_point]
        itemsize = min(sizes, default=tensors[0].element_size() if tensors else 1)
        is_recomputed = work.flops > 0.0 and _is_recomputed()
        self.record.operations.append(
            Operation(
                *(self.phase, name, where, shapes, itemsize, num_bytes, work.flops, work.gemm),
                is_recomputed=is_recomputed,
                is_uncounted=work.is_uncounted,
                is_expert=work.gemm is not None and _is_of_experts(),
            )
        )

    def _begin(self, work: Any, transfer: Transfer) -> None:
        self._under_way[id(work)] = work, transfer
        self._note_link(transfer, is_wait=False)

    def _note_link(self, transfer: Transfer, *, is_wait: bool) -> None:
        self.record.link_events.append(LinkEvent(self.phase, len(self.record.operations), transfer, is_wait))

    def _note_value(self) -> None:
        """Record that the host reads a value; all values of one ``tolist`` come in one copy."""
        frame: FrameType | None = sys._getframe(2)
        listing = None
        while frame is not None and listing is None:
            listing = frame if frame.f_code.co_name == "tolist" else None
            frame = frame.f_back
        if listing is None or listing is not self._last_listing:
            self.wait("value read")
        self._last_listing = listing

    def _note_memory(self, is_peak: bool = False) -> None:
        by_holder = tuple(self.memory.bytes_by_holder)
        self.record.memory.append((len(self.record.operations), by_holder))
        if is_peak or sum(by_holder) > self.record.peak_bytes:
            self.record.peak_bytes = sum(by_holder)
            self.record.peak_holders = dict(zip(HOLDERS, by_holder))
            self.record.peak_phase = self.phase

    def _where(self) -> str:
        """Return the line of this project that runs, or an empty string within autograd's own operations."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = _reported_name(frame.f_code.co_filename)
            if name is not None:
                return f"{name}:{frame.f_lineno}"
            if frame.f_code.co_name == "_engine_run_backward":
                return ""
            frame = frame.f_back
        return ""

    def _named_after_forward(self, where: str) -> str:
        """Return the line that called an operation; for a gradient, the line of its forward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._where_of_node[torch._C._autograd._get_sequence_nr()] = where
            return where
        number = node._sequence_nr()
        known = self._where_of_node.get(number) or self._where_of_node.get(number + 1)
        return where or f"gradient of {known or node.name()}"


@functools.cache
def _reported_name(path: str) -> str | None:
    """Return a source file's path within the project, or None if its lines are not reported."""
    if path.startswith(_NAMED) and not path.startswith(_PASSED_OVER):
        return Path(path).relative_to(_PROJECT).as_posix()
    return None


def _element_bytes(tensor: torch.Tensor) -> float:
    return 0.5 if tensor.dtype is _PACKED else tensor.element_size()


def _spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor covers; expanded dimensions count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else 1
    return count * tensor.element_size()


def _moved_bytes(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[torch.Tensor],
    returned: Sequence[torch.Tensor],
) -> int:
    """Return the minimum bytes that an operation reads and writes."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    if name in ("index_add_", "index_add"):
        return 3 * _spanned_bytes(values["source"])
    if name in ("index_put_", "_index_put_impl_") and values.get("accumulate"):
        # Only the indexed rows are moved: see indexing_backward_kernel in ATen's Indexing.cu.
        return 3 * _spanned_bytes(values["values"])
    if name == "embedding":
        return 2 * _spanned_bytes(returned[0])
    if name in ("gather", "scatter_", "scatter_add_"):
        return int(3 * values["index"].numel() * values["self"].element_size())
    changed = {
        id(tensor)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(values.get(argument.name))
        if isinstance(tensor, torch.Tensor)
    }
    times = 1 if name in _OVERWRITE or "out" in func._overloadname else 2
    total = sum(_spanned_bytes(tensor) * (times if id(tensor) in changed else 1) for tensor in given)
    total += sum(_spanned_bytes(tensor) for tensor in returned if id(tensor) not in changed)
    # A wide row does not fit into a multiprocessor: it is read for its maximum, for the sum, and for the result.
    return total + (2 * _spanned_bytes(given[0]) if name in ("softmax", "_softmax") else 0)


@dataclass(frozen=True)
class _Work:
    """FLOPs of an operation."""

    flops: float = 0.0
    gemm: Gemm | None = None
    is_uncounted: bool = False


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Work:
    values = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    if (gemm := gemm_of(func, values)) is not None:
        return _Work(gemm.flops, gemm)
    if func._overloadpacket not in flop_registry:
        return _Work(is_uncounted=is_uncounted(func))
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_HEADS_BEHIND):
        return _Work(_flash_flops(name, values))
    flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    return _Work(flops / 2 if values.get("is_causal") else flops)


def _is_recomputed() -> bool:
    """Return whether activation recomputation runs within the backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == _RECOMPUTATION and frame.f_code.co_name == "unpack_hook":
            return True
        frame = frame.f_back
    return False


def _is_of_experts() -> bool:
    """Return whether a linear layer of experts, or the sum of its weight gradients, runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_GROUPED_LINEAR) or code.co_name == "_add_grouped_matmul_now":
            return True
        frame = frame.f_back
    return False


def _flash_flops(name: str, values: dict[str, Any]) -> float:
    """Return the FLOPs of torch's FlashAttention kernel for the query-key pairs that are not masked."""
    batch, num_queries, heads, width = values["query"].shape
    num_keys = values["key"].shape[1]
    pairs: float = num_queries * num_keys
    if values["is_causal"]:
        window = values.get("window_size_left", -1)
        widest = num_keys if window < 0 else window + 1
        pairs = sum(min(widest, num_keys - num_queries + 1 + place) for place in range(num_queries))
    num_products = 5 if name.endswith("backward") else 2
    return float(2 * num_products * pairs * batch * heads * width)
