"""Read a pickle as data: a small interpreter of the opcodes that describe values, which runs nothing of the file.

A pickle is a program: it may name any function and have it called. Here a name stays a name. The few names that a
checkpoint needs are known by what they mean (a tensor, a namespace, an array); every other one is refused.
"""

from __future__ import annotations

import itertools
import math
import mmap
import pickletools
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from megatron.core.dist_checkpointing.mapping import dtype_of
from megatron.core.errors import CheckpointError
from megatron.core.files.pickle_bounds import PickleBudget, check_key, check_value, dict_of, hashable
from megatron.interop.megatron_torch.stored_values import GlobalName, LazyTensor, Record, StorageKey, StoredArray

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
# Their objects become records of a name and arguments: options of a run that decide nothing here.
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
"""How many values a tensor may have that repeats a few stored ones."""
_NUMPY_RECONSTRUCT = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_NUMPY_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")


def read_pickle(
    stream: mmap.mmap | bytes, path: Path, persistent_load: PersistentLoad, records: Collection[GlobalName] = ()
) -> Any:
    """Return the value of the pickle at the stream's position, and leave the stream after its end.

    ``path`` is for messages. ``persistent_load`` turns what the file says of a storage into its key. Objects of the
    classes in ``records`` become records, too.

    Raises:
        CheckpointError: the pickle names something that is not on the list of what a checkpoint may hold.
        ValueError: it is no pickle.
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
    """Return the dtype of a storage class that a file names.

    Raises:
        CheckpointError: it is not one.
    """
    if isinstance(kind, GlobalName) and kind.module == "torch" and kind.name in _STORAGE_DTYPES:
        return _STORAGE_DTYPES[kind.name]
    if isinstance(kind, torch.dtype):
        return kind
    raise CheckpointError(f"{path}: {kind} is not a kind of storage")


class _Interpreter:
    """Hold the stack, the marks and the memo of one pickle."""

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
        """Follow the operations to STOP and return what is then on the stack."""
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
                    raise CheckpointError(f"{self.path}: a checkpoint has no use for the pickle operation {name}")
                handler(self, argument)
        raise ValueError("the pickle ends before its end")

    def refuse(self, what: object) -> CheckpointError:
        """Return the error for a name that is not on the list."""
        return CheckpointError(
            f"{self.path}: the file asks for {str(what)[:200]}, which no checkpoint needs; it was not run, and nothing "
            "is loaded from this file"
        )

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        self.spend_items(items)
        return items

    def spend_items(self, *values: Any) -> None:
        """Count the items of values that are copied; refuse a file that asks for more than its size explains."""
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
                raise CheckpointError(f"{self.path}: an array is stored column by column, which is not supported")
            target.shape, target.dtype, target.data = _shape(shape), _array_dtype(dtype), _of(bytes, data)
        elif isinstance(target, Record) and target.kind == _NUMPY_DTYPE:
            return  # byte order and the like: all that is written is little-endian
        elif isinstance(target, Record) and isinstance(state, tuple):
            target.attributes["state"] = state
        elif isinstance(target, Record):
            self.spend_items(state)
            target.attributes.update(_of(dict, state))
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            return  # the metadata that modules attach to their state
        else:
            raise self.refuse(f"attributes to be set on {type(target).__name__}")

    def load_persistent(self, _: Any) -> None:
        self.stack.append(self.persistent_load(self.stack.pop()))

    def _named(self, name: GlobalName) -> Any:
        """Return what stands for a name on the stack.

        Raises:
            CheckpointError: it is not on the list.
        """
        if name.module == "torch":
            if name.name == "complex64":
                return torch.complex64  # of rotary positions that are stored beside the weights, and never read
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
            # A tensor and what was attached to it: what is attached decides nothing here.
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
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _make_tensor(arguments: tuple[Any, ...]) -> LazyTensor:
    storage, offset = _of(StorageKey, arguments[0]), _of(int, arguments[1])
    shape, strides = _shape(arguments[2]), _shape(arguments[3])
    if offset < 0 or len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {shape} with strides {strides} at {offset}")
    if math.prod(size for size in shape if size) >= 2**63 or math.prod(shape) > max(
        storage.num_elements, _MOST_REPEATED
    ):
        raise ValueError(f"a tensor of shape {shape} made of {storage.num_elements} stored values")
    reach = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if reach and offset + reach > storage.num_elements:
        raise ValueError(f"a tensor of shape {shape} reaches beyond its {storage.num_elements} stored values")
    return LazyTensor(storage, storage.start + offset, shape, strides)


def _shape(values: Any) -> tuple[int, ...]:
    """Return sizes of dims, or strides, as PyTorch can have them."""
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
"""About how many bytes an operation takes, together with what its value takes when it is looked over at the end."""
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
