"""Triton kernels on a simulated GPU: a launch is one kernel, and its source determines what it reads and writes.

On a node without Triton this project's kernels are imported with a substitute for the package. They cannot be run.
Reading them is enough, since the bytes that a simulated launch moves follow from a kernel's source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.ops import triton as triton_kernels
from megatron.core.ops import triton_support
from megatron.planner.simulation.recorder import Gemm, Recorder

_PACKAGE = triton_kernels.__name__


Metadata = Callable[[tuple[int, ...], Any, Mapping[str, Any]], Mapping[str, Any]]
"""Triton's ``launch_metadata``: it takes the grid, the compiled kernel and the arguments by name."""


class ReadProgram:
    """A kernel's source and the names of its parameters, with the attributes of Triton's own ``JITFunction``."""

    def __init__(self, function: Callable[..., None], launch_metadata: Metadata | None = None) -> None:
        self.fn, self.launch_metadata = function, launch_metadata
        self.src = textwrap.dedent(inspect.getsource(function))
        self.arg_names = [*inspect.signature(function).parameters]
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Raise an error; a simulation patches this method."""
        raise RuntimeError(f"{self.__name__} cannot be launched without Triton")


@contextmanager
def readable_programs() -> Iterator[None]:
    """Import this project's kernels without Triton; after the context they cannot be imported again.

    The substitute is in ``sys.modules`` during these imports only, so that torch does not take it for Triton.
    """
    names = [f"{_PACKAGE}.{module.name}" for module in pkgutil.iter_modules(triton_kernels.__path__)]
    loaded = _without(names)
    try:
        package = _substitute()
        hidden = _without(package)
        sys.modules.update(package)
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            _without(package)
            sys.modules.update(hidden)
        yield
    finally:
        # If an import failed, some modules are missing.
        for name in names:
            sys.modules.pop(name, None)
            vars(triton_kernels).pop(name.rpartition(".")[2], None)
        for name, module in loaded.items():
            sys.modules[name] = module
            setattr(triton_kernels, name.rpartition(".")[2], module)


def _without(names: Iterator[str] | list[str] | Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Remove modules from ``sys.modules`` and return those that were there."""
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


def _jit(function: Callable[..., None] | None = None, *, launch_metadata: Metadata | None = None) -> Any:
    """Stand in for ``triton.jit``, with or without arguments."""
    if function is None:
        return functools.partial(ReadProgram, launch_metadata=launch_metadata)
    return ReadProgram(function)


def _substitute() -> dict[str, ModuleType]:
    """Return the modules that the kernels import: functions that are called on the host, and names for annotations."""
    triton, language, errors = (ModuleType(name) for name in ("triton", "triton.language", "triton.errors"))
    contents = {
        "jit": _jit,
        "cdiv": lambda size, block: -(-size // block),
        "next_power_of_2": lambda size: 1 << (size - 1).bit_length() if size > 0 else 0,
        "language": language,
        "errors": errors,
    }
    for name, value in contents.items():
        setattr(triton, name, value)
    setattr(errors, "TritonError", type("TritonError", (Exception,), {}))  # noqa: B010 a module has no such attribute
    return {module.__name__: module for module in (triton, language, errors)}


_DOTS = ("tl.dot", "tl.dot_scaled")


@contextmanager
def recorded_programs(recorder: Recorder) -> Iterator[None]:
    """Let Triton kernels accept fake tensors, and record each launch instead of running it.

    A tensor counts once if a kernel loads from it, and once if it stores to it. The FLOPs of a kernel with matmuls are
    those of its ``launch_metadata``. If that also has the rows, inner size and columns of a GEMM, the kernel is
    predicted like other GEMMs. Without Triton, a substitute for the package is used.
    """

    def launch(program: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        given = dict(zip(program.arg_names, arguments)) | constants
        loaded, stored = (_tensors(given, names) for names in _accesses(program))
        name = f"{program.__module__.rpartition('.')[2]}.{program.__name__}"
        recorder.launch(name, loaded, stored, _flops(program, grid, given), _gemm(program, grid, given))

    program_type = _program_type()
    with (
        nullcontext() if program_type is not None else readable_programs(),
        patch.object(program_type or ReadProgram, "run", launch),
        patch.object(triton_support, "has_readable_memory", lambda x: True),
        patch.object(triton_support, "triton_works", lambda: True),
    ):
        yield


def has_triton_package() -> bool:
    return _program_type() is not None


def _program_type() -> type | None:
    """Return Triton's class of kernels, or None without Triton."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return None
    found: type = JITFunction
    return found


def _tensors(given: dict[str, Any], names: frozenset[str]) -> list[torch.Tensor]:
    """Return the tensors that are passed under these names, without duplicates."""
    tensors = (given.get(name) for name in sorted(names))
    return list({id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


@functools.cache
def _accesses(program: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters from which a kernel loads and to which it stores, also in functions that it calls."""
    tree = ast.parse(program.src)
    pointers = {name: {name} for name in program.arg_names}
    loaded: set[str] = set()
    stored: set[str] = set()

    def names_in(expression: ast.expr) -> set[str]:
        return {
            name for node in ast.walk(expression) if isinstance(node, ast.Name) for name in pointers.get(node.id, ())
        }

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not _is_loaded(node.value):
            pointers.setdefault(node.targets[0].id, set()).update(names_in(node.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        callee = ast.unparse(node.func)
        if callee in ("tl.load", "tl.store"):
            (loaded if callee == "tl.load" else stored).update(names_in(node.args[0]))
        elif hasattr(helper := program.fn.__globals__.get(callee), "arg_names"):
            given = dict(zip(helper.arg_names, node.args)) | {
                each.arg: each.value for each in node.keywords if each.arg
            }
            for names, inner in zip((loaded, stored), _accesses(helper)):
                names.update(name for parameter in inner for name in names_in(given[parameter]))
    return frozenset(loaded), frozenset(stored)


def _flops(program: Any, grid: tuple[int, ...], given: Mapping[str, Any]) -> float | None:
    """Return the FLOPs of a launch, or None if a kernel with matmuls does not declare them."""
    if program.launch_metadata is not None:
        declared = program.launch_metadata(grid, None, given)
        return float(sum(value for key, value in declared.items() if key.startswith("flops")))
    return None if _multiplies(program) else 0.0


def _gemm(program: Any, grid: tuple[int, ...], given: Mapping[str, Any]) -> Gemm | None:
    """Return the sizes of a launch that is one GEMM, if the kernel declares them."""
    if program.launch_metadata is None:
        return None
    sizes = program.launch_metadata(grid, None, given).get("gemm")
    return None if sizes is None else Gemm(1, *sizes)


@functools.cache
def _multiplies(program: Any) -> bool:
    """Return whether a kernel, or a function that it calls, has a matmul."""
    callees = {ast.unparse(node.func) for node in ast.walk(ast.parse(program.src)) if isinstance(node, ast.Call)}
    helpers = (program.fn.__globals__.get(callee) for callee in callees)
    return not callees.isdisjoint(_DOTS) or any(_multiplies(helper) for helper in helpers if hasattr(helper, "src"))


def _is_loaded(expression: ast.expr) -> bool:
    """Return whether an expression uses a loaded value: then it is a number, not a pointer."""
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load" for node in ast.walk(expression))
