"""Import optional packages, or refuse in one line."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.errors import InputError, TokenizerError


def load_package(module: str, user: str, refusal: type[InputError] = TokenizerError) -> Any:
    """Import a module of an optional package for ``user``: a flag, a file or a kind of tokenizer.

    Raises:
        InputError: the package is missing or broken (a bad shared object raises OSError); of the kind ``refusal``.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        package = module.partition(".")[0]
        raise refusal(
            f"{user} needs the package {package}, which cannot be imported ({error}); "
            f"install it with: pip install {package}"
        ) from error
