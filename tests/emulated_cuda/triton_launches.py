"""Triton programs on emulated devices: interpreted on the memory of their tensors, with every load and store known."""

from __future__ import annotations

import ast
import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.compiler.errors import CompilationError

from tests.emulated_cuda.activation import load_bindings
from tests.emulated_cuda.runtime import properties
from tests.harness.triton_interpreter import multiply_bfloat16

_FIRST_WITH_E4M3 = (8, 9)
_BEFORE_E4M3 = ("fp8e4b15", "fp8e5")
"""What Triton supports on devices before."""


@dataclasses.dataclass(frozen=True)
class _Access:
    """The addresses that one instance of a program accesses in one operation, and the size of an item in bytes."""

    addresses: np.ndarray[Any, Any]
    item_size: int
    instance: int


class _Accesses:
    """Collect the addresses that a launch loads and stores."""

    def __init__(self) -> None:
        self.instance = 0
        self._loads: list[_Access] = []
        self._stores: list[_Access] = []
        self._atomics: list[_Access] = []

    def load(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], item_size: int) -> None:
        self._loads.append(self._access(pointers, mask, item_size))

    def store(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], item_size: int) -> None:
        self._stores.append(self._access(pointers, mask, item_size))

    def update(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], item_size: int) -> None:
        self._atomics.append(self._access(pointers, mask, item_size))

    def _access(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], item_size: int) -> _Access:
        return _Access(pointers[mask.astype(bool)].astype(np.uint64).ravel(), item_size, self.instance)

    def intervals(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return what was read and what was written, each as (address, number of bytes)."""
        return _merged(self._loads), _merged([*self._stores, *self._atomics])

    def race(self) -> int | None:
        """Return an address that one instance stores and another one accesses, or None.

        No order is defined between the instances of a launch. Atomic updates exclude each other only.
        """
        if not self._stores:
            return None
        stored, by = _with_instances(self._stores)
        if not len(stored):
            return None
        order = np.argsort(stored, kind="stable")
        stored, by = stored[order], by[order]
        twice = np.flatnonzero((stored[1:] == stored[:-1]) & (by[1:] != by[:-1]))
        if len(twice):
            return int(stored[twice[0]])
        for others in (self._loads, self._atomics):
            if others:
                addresses, instances = _with_instances(others)
                places = np.minimum(np.searchsorted(stored, addresses), len(stored) - 1)
                meets = np.flatnonzero((stored[places] == addresses) & (by[places] != instances))
                if len(meets):
                    return int(addresses[meets[0]])
        return None


def _with_instances(accesses: list[_Access]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the addresses of all accesses, and which instance each is by."""
    instances = np.array([access.instance for access in accesses])
    return (
        np.concatenate([access.addresses for access in accesses]),
        np.repeat(instances, [len(access.addresses) for access in accesses]),
    )


def _merged(accesses: list[_Access]) -> list[tuple[int, int]]:
    intervals: list[tuple[int, int]] = []
    for item_size in {access.item_size for access in accesses}:
        addresses = np.unique(np.concatenate([each.addresses for each in accesses if each.item_size == item_size]))
        if not len(addresses):
            continue
        breaks = np.flatnonzero(np.diff(addresses) != item_size) + 1
        firsts = addresses[np.concatenate([[0], breaks])]
        lasts = addresses[np.concatenate([breaks - 1, [len(addresses) - 1]])]
        intervals += [(int(first), int(last - first) + item_size) for first, last in zip(firsts, lasts)]
    return intervals


class _ObservedMemory:
    """Memory of the Triton interpreter that also reports each load and store to ``accesses``."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.accesses: _Accesses | None = None

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if self.accesses is not None:
            self.accesses.load(pointers, mask, np.dtype(dtype).itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        if self.accesses is not None:
            self.accesses.store(pointers, mask, value.dtype.itemsize)
        return self._memory.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any) -> Any:
        if self.accesses is not None:
            self.accesses.update(pointers, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(operation, pointers, value, mask, semantics)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, semantics: Any) -> Any:
        if self.accesses is not None:
            self.accesses.update(pointers, np.ones_like(pointers, dtype=bool), value.dtype.itemsize)
        return self._memory.atomic_cas(pointers, expected, value, semantics)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@contextmanager
def _observed(memory: _ObservedMemory) -> Iterator[_Accesses]:
    outer, memory.accesses = memory.accesses, _Accesses()
    try:
        yield memory.accesses
    finally:
        memory.accesses = outer


def _specialization(value: Any) -> Any:
    """Return what of an argument Triton compiles a program for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int", value == 1, value % 16 == 0
    return type(value).__name__ if isinstance(value, float) else repr(value)


class _NothingToRestore:
    """Be the scope of a patch that stays."""

    def restore(self) -> None:
        pass


def make_interpreter_fast(interpreter: Any) -> None:
    """Let the interpreter patch the language once per function, cache types, and not check integers for overflow.

    It patches the language anew at each launch and at each call of a function by a program, which looks through a
    thousand members of modules: most of the time of a small program. Only interpreted programs use the language here.
    """
    patch_language, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[Any] = set()
    numpy_types: dict[str, Any] = {}

    def patch_once(function: Any) -> _NothingToRestore:
        if function not in patched:
            patch_language(function)
            patched.add(function)
        return _NothingToRestore()

    def known_numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.is_ptr():
            return numpy_type(kind)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = known_numpy_type
    builder = interpreter.interpreter_builder
    # Checks for overflow are most of the time of a small program. Compiled programs have them in debug mode only.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _keep_descriptions(interpreter.tl.core)
    _broadcast_unequal_shapes_only(interpreter.interpreter_semantic)


def _keep_descriptions(core: Any) -> None:
    """Compute the attributes of each block type once, and those that a tensor has by its type."""
    describe_block, describe_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = _identity(element_ty), tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            describe_block(self, element_ty, shape)
            blocks[key] = dict(vars(self), key=key)
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = vars(type).get("key") or _identity(type)
        if key not in tensors:
            describe_tensor(self, handle, type)
            tensors[key] = {name: value for name, value in vars(self).items() if name != "handle"}
        vars(self).update(tensors[key])
        self.handle = handle

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _identity(kind: Any) -> Any:
    """Return a key that identifies a scalar or a pointer type."""
    return (kind.name, kind.address_space, kind.const) if kind.is_ptr() else kind.name


def _broadcast_unequal_shapes_only(semantic: Any) -> None:
    """Leave out the comparison of each dim where two operands have one shape."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(left: Any, right: Any) -> Any:
        shape, other = vars(left.type).get("key", (None, None))[1], vars(right.type).get("key", (None, None))[1]
        return (left, right) if shape == other else broadcast(left, right)

    semantic.broadcast_impl_value = broadcast_unequal


def _reject_missing_formats(interpreter: Any) -> None:
    """Let programs fail that convert to a format which Triton does not compile for the device.

    The rule is that of ``CUDABackend.parse_options`` in ``triton/backends/nvidia/compiler.py``.
    """
    semantic = interpreter.interpreter_semantic
    cast = semantic.cast
    is_missing = (properties().major, properties().minor) < _FIRST_WITH_E4M3

    def cast_if_compiled(value: Any, kind: Any, *arguments: Any, **named: Any) -> Any:
        if is_missing and kind.scalar.name == "fp8e4nv":
            message = f"type {kind} not supported in this architecture. The supported fp8 dtypes are {_BEFORE_E4M3}"
            raise CompilationError(None, ast.Pass(), f"ValueError({message!r})")
        return cast(value, kind, *arguments, **named)

    semantic.cast = cast_if_compiled


def _tell_instances(interpreter: Any, memory: _ObservedMemory) -> None:
    """Let the accesses of a launch know which instance of the program runs."""
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx

    def begin_and_tell(x: int, y: int, z: int) -> None:
        begin(x, y, z)
        if memory.accesses is not None:
            memory.accesses.instance += 1

    builder.set_grid_idx = begin_and_tell


def run_on_emulated_devices() -> None:
    """Let the interpreter take tensors of emulated devices as they are, without copies.

    On a GPU the first launch with new kinds of arguments compiles the program, which no capture permits.
    """
    from triton.runtime import interpreter

    core = load_bindings()
    memory = _ObservedMemory(interpreter._interpreter)
    _tell_instances(interpreter, memory)
    interpreter._interpreter = memory
    make_interpreter_fast(interpreter)
    multiply_bfloat16()
    _reject_missing_formats(interpreter)
    run_on_host = interpreter.GridExecutor.__call__
    compiled: set[Any] = set()

    def run(self: Any, *arguments: Any, **named: Any) -> None:
        tensors = [value for value in (*arguments, *named.values()) if _is_emulated(value)]
        if not tensors:
            run_on_host(self, *arguments, **named)
            return
        devices = {tensor.device.index for tensor in tensors}
        for value in (*arguments, *named.values()):
            if isinstance(value, torch.Tensor) and not _is_emulated(value):
                raise ValueError(
                    f"Pointer argument (at {self.fn.__name__}) cannot be accessed from Triton (cpu tensor?)"
                )
        if len(devices) > 1:
            raise ValueError(f"{self.fn.__name__} is launched with tensors of several devices: {sorted(devices)}")
        if devices != {core.current_device()}:
            # Triton launches on the current device, whatever device its pointers are of.
            raise RuntimeError(
                f"CUDA error: an illegal memory access was encountered: {self.fn.__name__} is launched on device "
                f"{core.current_device()} with tensors of device {tensors[0].device.index}"
            )
        spans = [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors]
        key = (self.fn, *map(_specialization, arguments), *sorted((k, _specialization(v)) for k, v in named.items()))
        if key not in compiled:
            core.forbid_in_capture(f"cuModuleLoadData, by the compilation of the Triton program {self.fn.__name__}")
            compiled.add(key)

        def interpret(on_host: list[torch.Tensor]) -> Any:
            twins = iter(on_host)
            host_arguments = [next(twins) if _is_emulated(value) else value for value in arguments]
            host_named = {name: next(twins) if _is_emulated(value) else value for name, value in named.items()}
            with _observed(memory) as accesses:
                run_on_host(self, *host_arguments, **host_named)
            reads, writes = accesses.intervals()
            _check_inside(self.fn.__name__, (*reads, *writes), spans)
            if (address := accesses.race()) is not None:
                raise RuntimeError(
                    f"emulated CUDA: race: an instance of the Triton program {self.fn.__name__} stores at {address:#x} "
                    "what another instance of the launch accesses too, and no order is defined between the two"
                )
            return reads, writes

        core.run_python_work(f"triton:{self.fn.__name__}", tensors[0].device.index, tensors, interpret)

    def keep(self: Any, arguments: Any, named: Any) -> Any:
        return list(arguments), dict(named)

    def leave(self: Any, *_: Any) -> None:
        pass

    interpreter.GridExecutor.__call__ = run
    # The tensors are in host memory, or twins of emulated ones: a copy to the host and back would race.
    interpreter.GridExecutor._init_args_hst = keep
    interpreter.GridExecutor._restore_args_dev = leave


def _check_inside(name: str, intervals: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> None:
    """Raise if a program has accessed bytes that are in no storage of its tensors; both are (address, size)."""
    joined = _joined(spans)
    starts = [start for start, _ in joined]
    for address, size in intervals:
        place = bisect.bisect_right(starts, address) - 1
        if place < 0 or address + size > joined[place][1]:
            raise RuntimeError(
                f"CUDA error: an illegal memory access was encountered: {name} accesses {size} bytes at {address:#x}, "
                "which are not all in the memory of its tensors"
            )


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and the last address of stretches of memory, each as long as it can be."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], start + size)
        else:
            found.append((start, start + size))
    return found


def _is_emulated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda
