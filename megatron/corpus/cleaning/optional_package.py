"""Packages that only some kinds of cleaning need."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.errors import ConfigurationError


def load_package(module: str, flag: str) -> Any:
    """Import a module of an optional package for a flag that the user gave.

    Raises:
        ConfigurationError: the package is missing or broken (a bad shared object raises OSError).
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{flag} needs the package {package}, which cannot be imported ({error}); "
            f"install it with: pip install {package}"
        ) from error
