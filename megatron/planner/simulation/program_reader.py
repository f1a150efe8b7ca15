"""A substitute for Triton's package on a node without it: this project's programs can be read with it, and not run.

What a simulated launch moves follows from a program's source, so that reading it is enough.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron.core.ops import triton as triton_kernels

_PACKAGE = triton_kernels.__name__


class ReadProgram:
    """Hold a program's source and the names of its parameters, as Triton's own decorator does."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.fn = function
        self.src = textwrap.dedent(inspect.getsource(function))
        self.arg_names = [*inspect.signature(function).parameters]
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return a function that launches the program."""
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Raise an error: a simulation takes the place of this function."""
        raise RuntimeError(f"{self.__name__} cannot be launched without Triton")


@contextmanager
def readable_programs() -> Iterator[None]:
    """Import this project's programs without Triton; after the context they cannot be imported again.

    The substitute is in ``sys.modules`` during these imports alone: torch must not take it for Triton.
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
        # An import that failed left some of them out.
        for name in names:
            sys.modules.pop(name, None)
            vars(triton_kernels).pop(name.rpartition(".")[2], None)
        for name, module in loaded.items():
            sys.modules[name] = module
            setattr(triton_kernels, name.rpartition(".")[2], module)


def _without(names: Iterator[str] | list[str] | Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Remove modules from ``sys.modules`` and return those that were there."""
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


def _substitute() -> dict[str, ModuleType]:
    """Return the modules that the programs import: what they call on the host, and names for annotations."""
    triton, language, errors = (ModuleType(name) for name in ("triton", "triton.language", "triton.errors"))
    contents = {
        "jit": ReadProgram,
        "cdiv": lambda size, block: -(-size // block),
        "next_power_of_2": lambda size: 1 << (size - 1).bit_length() if size > 0 else 0,
        "language": language,
        "errors": errors,
    }
    for name, value in contents.items():
        setattr(triton, name, value)
    setattr(errors, "TritonError", type("TritonError", (Exception,), {}))  # noqa: B010 a module has no such attribute
    return {module.__name__: module for module in (triton, language, errors)}
