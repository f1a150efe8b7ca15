"""Specifications of modules: a class, its submodules and further arguments, from which a model builds a module."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any


@dataclass
class ModuleSpec:
    """A module to build: a class or its import path (module, name), arguments, and the specifications of its parts."""

    module: tuple[str, str] | type
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the module."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the object at an import path (module, name).

    Raises:
        ImportError: the module has no such name.
    """
    base, name = module_path
    module = importlib.import_module(base)
    if not hasattr(module, name):
        raise ImportError(f"module {base} has no {name}")
    return getattr(module, name)


def get_module(spec_or_module: ModuleSpec | type, **additional_kwargs: Any) -> Any:
    """Return the class or function of a specification."""
    if isinstance(spec_or_module, (type, FunctionType)):
        return spec_or_module
    module = spec_or_module.module
    return module if isinstance(module, (type, FunctionType)) else import_module(module)


def build_module(spec_or_module: ModuleSpec | type, *args: Any, **kwargs: Any) -> Any:
    """Build a module from a specification or a class; a function is returned as it is.

    The specification's ``params``, and its ``submodules`` if it has any, are passed with the other arguments. An error
    names the class.

    Raises:
        TypeError: an argument is in ``params`` and in ``kwargs``.
    """
    module = get_module(spec_or_module)
    if isinstance(module, FunctionType):
        return module
    params: dict[str, Any] = {}
    if isinstance(spec_or_module, ModuleSpec):
        params = spec_or_module.params
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **params, **kwargs)
    except Exception as error:
        raise type(error)(f"{error} when instantiating {module.__name__}").with_traceback(
            error.__traceback__
        ) from error
