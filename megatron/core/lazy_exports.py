"""Lazy exports of a package: a module is imported when one of its names is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562) for lazy imports.

    ``names`` maps each module of the package to the names that it exports, separated by spaces.
    """
    module_of = {name: module for module, several in names.items() for name in several.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return get
