"""Read files of torch.save as data, without executing the pickle: values eagerly, tensors on demand.

A pickle is a program that can call any function it names. This interpreter handles only the opcodes that describe
values, in bounded memory. It imports nothing: the few names that a checkpoint needs (tensors, namespaces, arrays) are
recognized, and every other allowed object becomes a `Record`.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import pickletools
import reprlib
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from megatron.core.dist_checkpointing import dtype_of
from megatron.core.errors import CheckpointError, DamagedCheckpointError

_FREE_OPERATIONS = 250_000
_BYTES_AN_OPERATION = 1.8
"""Checkpoint pickles have more than two bytes per operation."""
_FREE_BYTES = 600 << 20
_BYTES_A_BYTE = 32
"""A checkpoint's objects take about twenty times the size of its pickle."""
_MOST_DEPTH = 100
_MOST_KEY_PARTS = 64
_MOST_REPEATS = 64
_FREE_PARTS = 1 << 20
_BYTES_AN_ITEM = 32


class PickleBudget:
    """Limits on a pickle's number of operations and, approximately, the memory that they allocate."""

    def __init__(self) -> None:
        self.spent = 0
        self.operations = 0

    def begin(self, num_bytes: int, num_read: int) -> None:
        """Count an operation that allocates ``num_bytes``, after ``num_read`` bytes of the pickle have been read.

        Raises:
            ValueError: the operations or the memory exceed what a checkpoint of this size needs.
        """
        self.operations += 1
        if self.operations > _FREE_OPERATIONS + num_read / _BYTES_AN_OPERATION:
            raise ValueError(f"its first {num_read} bytes have {self.operations} pickle operations")
        self.spend(num_bytes, num_read)

    def spend(self, num_bytes: int, num_read: int) -> None:
        """Count allocated memory, after ``num_read`` bytes of the pickle have been read.

        Raises:
            ValueError: the memory exceeds what a checkpoint of this size needs.
        """
        self.spent += num_bytes
        if self.spent > _FREE_BYTES + _BYTES_A_BYTE * num_read:
            raise ValueError(f"its first {num_read} bytes need {self.spent} bytes of memory")

    def spend_items(self, values: Iterable[Any], num_read: int) -> None:
        """Count the items of strings and containers that are copied.

        Raises:
            ValueError: as `spend`.
        """
        for value in values:
            if isinstance(value, (str, bytes, list, tuple, dict, set)):
                self.spend(_BYTES_AN_ITEM * len(value), num_read)


def check_key(key: Any) -> None:
    """Reject a dictionary key that is slow to hash or nested too deeply.

    Raises:
        ValueError: the key has more than 64 parts.
    """
    if not isinstance(key, tuple):
        return
    parts, left = 0, [key]
    while left:
        items = left.pop()
        parts += len(items)
        if parts > _MOST_KEY_PARTS:
            raise ValueError(f"a key of more than {_MOST_KEY_PARTS} parts")
        left += [item for item in items if isinstance(item, tuple)]


def hashable(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items after checking that each can be hashed quickly.

    Raises:
        ValueError: as `check_key`.
    """
    for item in items:
        check_key(item)
        yield item


def dict_of(items: Sequence[Any]) -> dict[Any, Any]:
    """Build a dictionary from alternating keys and values.

    Raises:
        ValueError: as `check_key`.
    """
    return dict(zip(hashable(items[::2]), items[1::2]))


def check_value(value: Any, record: type[Any]) -> None:
    """Reject a value that contains itself, nests too deeply, or repeats its parts so often that reading never ends.

    ``record`` is the class of objects that hold values as ``arguments`` and ``attributes``.

    Raises:
        ValueError: the value is rejected.
    """
    kinds = (list, tuple, dict, set, record)
    # Per finished container: 256 times the number of its parts, counted with repetition, plus its depth.
    done: dict[int, int] = {}
    is_open: set[int] = set()
    left = [value]
    while left:
        item = left[-1]
        if id(item) in done:
            left.pop()
            continue
        parts = _parts(item, record)
        if id(item) not in is_open:
            is_open.add(id(item))
            if len(is_open) > _MOST_DEPTH:
                raise ValueError(f"values are nested more than {_MOST_DEPTH} deep")
            inner = [part for part in parts if isinstance(part, kinds) and id(part) not in done]
            if any(id(part) in is_open for part in inner):
                raise ValueError("a value that contains itself")
            left += inner
            if inner:
                continue
        found = [done[id(part)] for part in parts if isinstance(part, kinds)]
        depth = 1 + max((entry % 256 for entry in found), default=0)
        count = 1 + len(parts) + sum(entry // 256 for entry in found)
        if depth > _MOST_DEPTH:
            raise ValueError(f"values are nested more than {_MOST_DEPTH} deep")
        if count > _FREE_PARTS + _MOST_REPEATS * (len(done) + len(parts)):
            raise ValueError("values refer to each other in an endless cycle")
        done[id(item)] = 256 * count + depth
        is_open.discard(id(item))
        left.pop()


def _parts(value: Any, record: type[Any]) -> list[Any]:
    if isinstance(value, record):
        return [value.arguments, value.attributes]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple, set)) else []


@dataclass(frozen=True)
class GlobalName:
    """Class or function that a pickle refers to; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """Object in a file: the name of its class, its constructor arguments and its attributes."""

    kind: GlobalName
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class StoredArray:
    """NumPy array in a file: its dtype string, its shape and its bytes."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""


@dataclass(frozen=True)
class StorageKey:
    """Storage in a file; ``start`` is the first element for a view of a larger storage."""

    key: str
    dtype: torch.dtype
    num_elements: int
    start: int = 0


@dataclass(frozen=True)
class LazyTensor:
    """Tensor in a file without its values; offset and strides count elements of the storage."""

    storage: StorageKey
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def flat_part(self, start: int, shape: tuple[int, ...]) -> LazyTensor:
        """Return the contiguous tensor of ``shape`` that starts at element ``start`` of this one-dimensional tensor."""
        assert self.strides == (1,), "only a flat buffer is cut"
        return LazyTensor(self.storage, self.offset + start, shape, contiguous_strides(shape))

    def box(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> LazyTensor:
        moved = sum(o * stride for o, stride in zip(offset, self.strides, strict=True))
        return LazyTensor(self.storage, self.offset + moved, shape, self.strides)

    def every_nth_row(self, start: int, step: int, count: int) -> LazyTensor:
        """Return ``count`` rows (elements of dim 0), every ``step``-th one from ``start``."""
        first, *others = self.strides
        return LazyTensor(self.storage, self.offset + start * first, (count, *self.shape[1:]), (first * step, *others))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous row-major tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def native_row_blocks(tensor: LazyTensor, head_dim: int, version: float) -> list[tuple[int, LazyTensor]]:
    """Return (first row in native order, values of the rows) of every block of a rank's QKV weight or bias.

    Shapes: ``tensor: [rows]`` or ``[rows, h]``.
    """
    rows = tensor.shape[0]
    if version >= 2.0:
        return [(0, tensor)]
    num_heads = rows // (3 * head_dim)
    blocks = []
    for head in range(num_heads):
        for part in range(3):
            if version >= 1.0:
                block = tensor.every_nth_row(head * 3 * head_dim + part, 3, head_dim)
            else:
                block = tensor.every_nth_row((part * num_heads + head) * head_dim, 1, head_dim)
            blocks.append(((head * 3 + part) * head_dim, block))
    return blocks


PersistentLoad = Callable[[Any], StorageKey]

NAMESPACE = GlobalName("argparse", "Namespace")

_STORAGE_DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# Objects of these classes become records; they are options of a run that have no effect here.
_INERT_MODULES = (
    "megatron.core.enums",
    "megatron.core.transformer.enums",
    "megatron.core.inference.enums",
    "megatron.model.enums",
    "megatron.legacy.model.enums",
)
_INERT_NAMES = (
    GlobalName("signal", "Signals"),
    GlobalName("torch", "device"),
    GlobalName("torch", "Tensor"),
    GlobalName("torch.nn.parameter", "Parameter"),
    GlobalName("pathlib", "PosixPath"),
    GlobalName("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
)

_MOST_DIMS = 64
_MOST_REPEATED = 1 << 24
"""Maximum number of values of a tensor that repeats a few stored values."""
_NUMPY_RECONSTRUCT = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_NUMPY_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")


def read_pickle(
    stream: mmap.mmap | bytes, path: Path, persistent_load: PersistentLoad, records: Collection[GlobalName] = ()
) -> Any:
    """Read the pickle at the stream's position, and leave the stream after its end.

    ``path`` is used in messages. ``persistent_load`` converts a file's description of a storage to its key. Objects of
    the classes in ``records`` also become records.

    Raises:
        CheckpointError: the pickle refers to a name that is not allowed in a checkpoint.
        ValueError: the stream has no valid pickle.
    """
    first = 0 if isinstance(stream, bytes) else stream.tell()
    try:
        value = _Interpreter(path, persistent_load, records, first).run(pickletools.genops(cast("BinaryIO", stream)))
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"not a pickle of a checkpoint ({type(error).__name__}: {reprlib.repr(error.args)})"
        ) from error
    check_value(value, Record)
    return value


def storage_dtype(kind: Any, path: Path) -> torch.dtype:
    """Return the dtype of a storage class named in a file.

    Raises:
        CheckpointError: the name is not a storage class.
    """
    if isinstance(kind, GlobalName) and kind.module == "torch" and kind.name in _STORAGE_DTYPES:
        return _STORAGE_DTYPES[kind.name]
    if isinstance(kind, torch.dtype):
        return kind
    raise CheckpointError(f"{path}: {kind} is not a storage type")


class _Interpreter:
    """Interpreter of one pickle: its stack, marks and memo."""

    def __init__(self, path: Path, persistent_load: PersistentLoad, records: Iterable[GlobalName], first: int) -> None:
        self.path = path
        self.first, self.position = first, first
        self.budget = PickleBudget()
        self.persistent_load = persistent_load
        self.records = frozenset((*_INERT_NAMES, *records))
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Any:
        """Execute the operations until STOP, and return the value on top of the stack."""
        for operation, argument, position in operations:
            name = operation.name
            self.position = position or 0
            self.budget.begin(_COSTS.get(name, _USUAL_COST), self.position - self.first)
            if name == "STOP":
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _MEMO_STORES:
                self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
            elif name in _MEMO_LOADS:
                self.stack.append(self.memo[argument])
            elif name not in ("PROTO", "FRAME"):
                handler = _HANDLERS.get(name)
                if handler is None:
                    raise CheckpointError(f"{self.path}: the pickle operation {name} is not allowed in a checkpoint")
                handler(self, argument)
        raise ValueError("the pickle is truncated")

    def refuse(self, what: object) -> CheckpointError:
        """Return the error for a name that is not allowed."""
        return CheckpointError(
            f"{self.path}: the file requests {str(what)[:200]}, which is not allowed in a checkpoint; it was not run, "
            "and nothing was loaded from this file"
        )

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        self.spend_items(items)
        return items

    def spend_items(self, *values: Any) -> None:
        """Count the items of copied values; raise if they exceed what the file's size explains."""
        self.budget.spend_items(values, self.position - self.first)

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def make_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def make_short_tuple(self, length: int) -> None:
        items = tuple(self.stack[len(self.stack) - length :])
        del self.stack[len(self.stack) - length :]
        self.stack.append(items)

    def make_list(self, _: Any) -> None:
        self.stack.append(self.pop_mark())

    def make_dict(self, _: Any) -> None:
        items = self.pop_mark()
        self.stack.append(dict_of(items))

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        _of(list, self.stack[-1]).append(item)

    def extend(self, _: Any) -> None:
        items = self.pop_mark()
        _of(list, self.stack[-1]).extend(items)

    def add_to_set(self, _: Any) -> None:
        items = self.pop_mark()
        _of(set, self.stack[-1]).update(hashable(items))

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        check_key(key)
        _of(dict, self.stack[-1])[key] = value

    def set_items(self, _: Any) -> None:
        items = self.pop_mark()
        _of(dict, self.stack[-1]).update(dict_of(items))

    def find(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(self._named(GlobalName(module, name)))

    def find_on_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._named(GlobalName(_of(str, module), _of(str, name))))

    def reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._made(function, _of(tuple, arguments)))

    def build(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StoredArray):
            _, shape, dtype, is_column_major, data = state
            if is_column_major and len(shape) > 1:
                raise CheckpointError(
                    f"{self.path}: an array is stored in column-major (Fortran) order, which is not supported"
                )
            target.shape, target.dtype, target.data = _shape(shape), _array_dtype(dtype), _of(bytes, data)
        elif isinstance(target, Record) and target.kind == _NUMPY_DTYPE:
            return  # byte order etc.: all written arrays are little-endian
        elif isinstance(target, Record) and isinstance(state, tuple):
            target.attributes["state"] = state
        elif isinstance(target, Record):
            self.spend_items(state)
            target.attributes.update(_of(dict, state))
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            return  # metadata that modules attach to their state dict
        else:
            raise self.refuse(f"attributes to be set on {type(target).__name__}")

    def load_persistent(self, _: Any) -> None:
        self.stack.append(self.persistent_load(self.stack.pop()))

    def _named(self, name: GlobalName) -> Any:
        """Return the object that represents a name on the stack.

        Raises:
            CheckpointError: the name is not allowed.
        """
        if name.module == "torch":
            if name.name == "complex64":
                return torch.complex64  # dtype of RoPE frequencies stored with the weights, which are never read
            with suppress(KeyError):
                return dtype_of(name.name)
        if str(name) in (*_MAKERS, _TENSOR_WITH_ATTRIBUTES) or name in self.records or name.module in _INERT_MODULES:
            return name
        if name.module == "torch" and name.name in _STORAGE_DTYPES:
            return name
        raise self.refuse(name)

    def _made(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if not isinstance(function, GlobalName):
            raise self.refuse(f"a call of {reprlib.repr(function)}")
        if str(function) == _TENSOR_WITH_ATTRIBUTES:
            # A tensor with attached attributes, which are ignored.
            rebuild, _, tensor_arguments, _ = arguments
            if not isinstance(rebuild, GlobalName) or str(rebuild) not in _TENSOR_MAKERS:
                raise self.refuse(f"a tensor made by {reprlib.repr(rebuild)}")
            return self._made(rebuild, _of(tuple, tensor_arguments))
        self.spend_items(*arguments)
        if str(function) in _MAKERS:
            return _MAKERS[str(function)](arguments)
        if function in self.records or function.module in _INERT_MODULES:
            return Record(function, arguments)
        raise self.refuse(f"a call of {function}")


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _make_tensor(arguments: tuple[Any, ...]) -> LazyTensor:
    storage, offset = _of(StorageKey, arguments[0]), _of(int, arguments[1])
    shape, strides = _shape(arguments[2]), _shape(arguments[3])
    if offset < 0 or len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {shape} with strides {strides} at {offset}")
    if math.prod(size for size in shape if size) >= 2**63 or math.prod(shape) > max(
        storage.num_elements, _MOST_REPEATED
    ):
        raise ValueError(f"a tensor of shape {shape} in a storage of {storage.num_elements} values")
    reach = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if reach and offset + reach > storage.num_elements:
        raise ValueError(f"a tensor of shape {shape} extends beyond its storage of {storage.num_elements} values")
    return LazyTensor(storage, storage.start + offset, shape, strides)


def _shape(values: Any) -> tuple[int, ...]:
    """Convert tensor sizes or strides, and check that PyTorch supports them."""
    sizes = tuple(_of(int, size) for size in itertools.islice(values, _MOST_DIMS + 1))
    if len(sizes) > _MOST_DIMS or not all(0 <= size < 2**63 for size in sizes):
        raise ValueError(f"the shape {reprlib.repr(sizes)}")
    return sizes


def _array_dtype(dtype: Any) -> str:
    return str(_of(str, _of(Record, dtype).arguments[0]))


def _make_parameter(arguments: tuple[Any, ...]) -> LazyTensor:
    tensor: LazyTensor = _of(LazyTensor, arguments[0])
    return tensor


def _make_bytes(arguments: tuple[Any, ...]) -> bytes:
    text, encoding = arguments
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in the encoding {reprlib.repr(encoding)}")
    data: bytes = _of(str, text).encode("latin1")
    return data


def _make_ordered_dict(arguments: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    if not arguments:
        return OrderedDict()
    pairs = arguments[0].items() if isinstance(arguments[0], dict) else _of(list, arguments[0])
    return OrderedDict(zip(hashable(key for key, _ in pairs), (value for _, value in pairs)))


def _make_array(arguments: tuple[Any, ...]) -> StoredArray:
    return StoredArray()


def _make_array_scalar(arguments: tuple[Any, ...]) -> StoredArray:
    return StoredArray(_array_dtype(arguments[0]), (), _of(bytes, arguments[1]))


def _record_maker(name: GlobalName) -> Callable[[tuple[Any, ...]], Record]:
    return lambda arguments: Record(name, arguments)


_NUMPY_DTYPE = GlobalName("numpy", "dtype")

_TENSOR_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_TENSOR_MAKERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_parameter": _make_parameter,
    "torch._utils._rebuild_parameter_with_state": _make_parameter,
}
_MAKERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **_TENSOR_MAKERS,
    "torch.Size": lambda arguments: _shape(arguments[0]),
    "collections.OrderedDict": _make_ordered_dict,
    "_codecs.encode": _make_bytes,
    "numpy.ndarray": _make_array,
    "numpy.dtype": _record_maker(_NUMPY_DTYPE),
    "argparse.Namespace": _record_maker(NAMESPACE),
    **dict.fromkeys(("builtins.set", "__builtin__.set"), lambda arguments: set(hashable(arguments[0]))),
    **dict.fromkeys(_NUMPY_RECONSTRUCT, _make_array),
    **dict.fromkeys(_NUMPY_SCALAR, _make_array_scalar),
}

_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_USUAL_COST = 32
_COSTS = {
    **dict.fromkeys(("EMPTY_SET", "EMPTY_DICT", "DICT", "EMPTY_LIST", "LIST"), 320),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 160),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), 600),
    **dict.fromkeys(("SETITEM", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), 100),
}
"""Approximate bytes per operation, including the final check of its value."""
_MEMO_STORES = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_MEMO_LOADS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_HANDLERS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "MARK": _Interpreter.mark,
    "POP": _Interpreter.pop,
    "TUPLE": _Interpreter.make_tuple,
    "TUPLE1": lambda interpreter, _: interpreter.make_short_tuple(1),
    "TUPLE2": lambda interpreter, _: interpreter.make_short_tuple(2),
    "TUPLE3": lambda interpreter, _: interpreter.make_short_tuple(3),
    "LIST": _Interpreter.make_list,
    "DICT": _Interpreter.make_dict,
    "APPEND": _Interpreter.append,
    "APPENDS": _Interpreter.extend,
    "ADDITEMS": _Interpreter.add_to_set,
    "SETITEM": _Interpreter.set_item,
    "SETITEMS": _Interpreter.set_items,
    "GLOBAL": _Interpreter.find,
    "STACK_GLOBAL": _Interpreter.find_on_stack,
    "REDUCE": _Interpreter.reduce,
    "NEWOBJ": _Interpreter.reduce,
    "BUILD": _Interpreter.build,
    "BINPERSID": _Interpreter.load_persistent,
}


_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CHECK_CHUNK_BYTES = 16 * 1024 * 1024
_NOT_THE_FORMAT = (
    *(zipfile.BadZipFile, struct.error, ValueError, EOFError, LookupError, RuntimeError, TypeError, AttributeError),
    *(ArithmeticError, AssertionError),
)
_HAS_MADVISE = hasattr(mmap.mmap, "madvise")  # not on Windows


@dataclass(frozen=True)
class StoragePlace:
    """Location of a storage's bytes in a file. ``checksum`` is the file's CRC-32, if it has one."""

    start: int
    num_bytes: int
    checksum: int | None = None


class TorchFile:
    """Open file in torch's zip format, or in its legacy format; ``value`` is the saved object.

    Tensors in ``value`` are `LazyTensor`. `view` memory-maps their bytes, so that only the accessed pages are read.
    With a ``section`` (first byte, number of bytes) only that part of the file is read, as a file in zip format.

    Raises:
        DamagedCheckpointError: the file is missing, truncated or in another format.
        CheckpointError: the file contains objects other than data.
    """

    def __init__(self, path: Path, section: tuple[int, int] | None = None) -> None:
        self.path = path
        self._section = section
        self.places: dict[str, StoragePlace] = {}
        self._map: mmap.mmap | None = None
        try:
            with open(path, "rb") as file:
                self.value = self._read(file)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
        except _NOT_THE_FORMAT as error:
            raise DamagedCheckpointError(f"{path}: not a complete torch file ({error})") from error

    def close(self) -> None:
        """Close the file and invalidate its views."""
        self._map = None

    def view(self, tensor: LazyTensor) -> torch.Tensor:
        """Return a tensor that is memory-mapped from the file.

        Raises:
            DamagedCheckpointError: the storage is missing or too short.
        """
        place = self.places.get(tensor.storage.key)
        itemsize = tensor.dtype.itemsize
        if place is None or place.num_bytes < tensor.storage.num_elements * itemsize:
            raise DamagedCheckpointError(f"{self.path}: the values of storage {tensor.storage.key} are missing")
        if tensor.num_elements == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
        if tensor.offset + reach > place.num_bytes // itemsize:
            raise DamagedCheckpointError(f"{self.path}: a tensor extends beyond storage {tensor.storage.key}")
        flat = torch.frombuffer(
            self._mapped(), dtype=tensor.dtype, count=reach, offset=place.start + tensor.offset * itemsize
        )
        return flat.as_strided(tensor.shape, tensor.strides)

    def with_tensors(self, value: Any) -> Any:
        """Return a value of the file with its tensors loaded into memory; for small tensors."""
        if isinstance(value, LazyTensor):
            return self.view(value).clone()
        if isinstance(value, Mapping):
            return {key: self.with_tensors(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.with_tensors(item) for item in value)
        return value

    def release_pages(self) -> None:
        """Release the memory of the accessed pages; views remain valid and are read again on access."""
        if self._map is not None and _HAS_MADVISE:
            self._map.madvise(mmap.MADV_DONTNEED)

    def check_storage(self, key: str) -> None:
        """Verify a storage's checksum, if the format has one.

        Raises:
            DamagedCheckpointError: the checksum does not match, or the file has no such storage.
        """
        place = self.places.get(key)
        if place is None:
            raise DamagedCheckpointError(f"{self.path}: the values of storage {key} are missing")
        if place.checksum is None:
            return
        found = 0
        mapped = memoryview(self._mapped())
        for start in range(place.start, place.start + place.num_bytes, _CHECK_CHUNK_BYTES):
            found = zlib.crc32(mapped[start : min(start + _CHECK_CHUNK_BYTES, place.start + place.num_bytes)], found)
            self.release_pages()
        if found != place.checksum:
            raise DamagedCheckpointError(f"{self.path}: the bytes of storage {key} do not match their checksum")

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with open(self.path, "rb") as file:
                # Private instead of shared: torch does not accept read-only memory, and nothing writes through it.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map

    def _read(self, file: BinaryIO) -> Any:
        if self._section is not None:
            return self._read_zip(FileSection(file, *self._section), self._section[0])
        if file.read(4) == b"PK\x03\x04":
            return self._read_zip(file)
        # Memory-mapped, so that a length claimed in the file cannot exceed the file.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return self._read_legacy(mapped)

    def _read_zip(self, file: BinaryIO | FileSection, first_byte: int = 0) -> Any:
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(cast(BinaryIO, file)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if "data.pkl" not in entries:
                raise ValueError("it contains no data.pkl")
            for name, entry in entries.items():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{name} is compressed")
                if entry.compress_size != entry.file_size:
                    raise ValueError(f"{name} has {entry.file_size} bytes, but {entry.compress_size} are stored")
                if entry.header_offset + entry.file_size > size:
                    raise ValueError(f"it ends within {name}")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise CheckpointError(f"{self.path}: written on a big-endian host, which is not supported")
            for name, entry in entries.items():
                if name.startswith("data/"):
                    start = _data_start(file, entry)
                    if start + entry.file_size > size:
                        raise ValueError(f"it ends within {name}")
                    place = StoragePlace(first_byte + start, entry.file_size, entry.CRC)
                    self.places[name.removeprefix("data/")] = place
            return read_pickle(archive.read(entries["data.pkl"]), self.path, self._storage)

    def _storage(self, description: Any) -> StorageKey:
        """Parse the file's description of a storage: (tag, kind, key, device, number of elements)."""
        tag, kind, key, _, num_elements = description
        if tag != "storage" or not isinstance(key, (str, int)) or not _is_count(num_elements):
            raise ValueError("a persistent object that is not a storage")
        return StorageKey(str(key), storage_dtype(kind, self.path), num_elements)

    def _read_legacy(self, file: mmap.mmap) -> Any:
        """Read torch's format before version 1.6: several pickles, then the storages in the order of a list of keys."""

        def nothing_stored(description: Any) -> StorageKey:
            raise ValueError("a storage in the header")

        if read_pickle(file, self.path, nothing_stored) != _LEGACY_MAGIC:
            raise ValueError("its magic number is wrong")
        if read_pickle(file, self.path, nothing_stored) != _LEGACY_VERSION:
            raise ValueError("its version is not supported")
        system = read_pickle(file, self.path, nothing_stored)
        if not system.get("little_endian", False):
            raise CheckpointError(f"{self.path}: written on a big-endian host, which is not supported")
        dtypes: dict[str, torch.dtype] = {}

        def stored(description: Any) -> StorageKey:
            *whole, view = description
            storage = self._storage(whole)
            dtypes.setdefault(storage.key, storage.dtype)
            if view is None:
                return storage
            _, start, length = view
            if not _is_count(start) or not _is_count(length):
                raise ValueError("a storage without a size")
            return StorageKey(storage.key, dtypes[storage.key], start + length, start)

        value = read_pickle(file, self.path, stored)
        for key in read_pickle(file, self.path, nothing_stored):
            num_bytes = int.from_bytes(file.read(8), "little") * dtypes[key].itemsize
            if file.tell() + num_bytes > len(file):
                raise ValueError(f"it ends within storage {key}")
            self.places[key] = StoragePlace(file.tell(), num_bytes)
            file.seek(num_bytes, os.SEEK_CUR)
        return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


class FileSection(io.RawIOBase):
    """File-like view of a part of an open file.

    Raises:
        ValueError: the file ends within the part.
    """

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._start, self._num_bytes, self._position = file, start, num_bytes, 0
        size = os.fstat(file.fileno()).st_size
        if start < 0 or num_bytes < 0 or start + num_bytes > size:
            raise ValueError(f"it has {size} bytes, but {num_bytes} at {start} are needed")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek within the part, and return the new position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer at the end of the part."""
        rest = max(self._num_bytes - self._position, 0)
        self._file.seek(self._start + self._position)
        data = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._position += len(data)
        return data


def _data_start(file: BinaryIO | FileSection, entry: zipfile.ZipInfo) -> int:
    """Return the start of an entry's data; the extra field may differ between local header and directory."""
    file.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return entry.header_offset + _LOCAL_HEADER.size + int(header[-2]) + int(header[-1])
