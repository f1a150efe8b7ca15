"""Packages that only some kinds of tokenizer need."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.errors import TokenizerError


def load_package(package: str, tokenizer_type: str) -> Any:
    """Import an optional package for a tokenizer that the user asked for by name.

    Raises:
        TokenizerError: the package is missing or broken (a bad shared object raises OSError).
    """
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:
        raise TokenizerError(
            f"{tokenizer_type} needs the package {package}, which cannot be imported ({error}); "
            f"install it with: pip install {package}"
        ) from error
