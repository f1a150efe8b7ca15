"""The file of --tp-comm-overlap-cfg: which products of a layer have their communication in chunks."""

from __future__ import annotations

from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.core.tensor_parallel.overlap.linear_overlap import CHUNKED_METHODS

_FLAG = "--tp-comm-overlap-cfg"
_CHUNKED_PRODUCTS = tuple(f"{name}_{kind}" for name in ("qkv", "proj", "fc1", "fc2") for kind in ("fprop", "dgrad"))
_WHOLE_PRODUCTS = ("qkv_wgrad", "fc1_wgrad")
"""Products beside which another one's result travels as a whole."""
_METHODS = (*CHUNKED_METHODS, "bulk")


def read_overlap_methods(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the methods of a file as ``PRODUCT=METHOD``, and the names of settings that have no effect here.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it says nothing that is known.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{_FLAG} {path}: the file cannot be read: {error}") from None
    methods: dict[str, str] = {}
    ignored: dict[str, None] = {}
    product = ""
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].rstrip()
        key, colon, value = (part.strip().strip("'\"") for part in text.strip().partition(":"))
        where = f"{_FLAG} {path}, line {number}"
        if not text.strip() or text == "---":
            continue
        if not colon or (text[0].isspace() and not product) or bool(value) != text[0].isspace():
            raise ConfigurationError(
                f"{where}: {text.strip()!r} is neither 'PRODUCT:' nor an indented 'SETTING: VALUE'"
            )
        if not text[0].isspace():
            product = key
            if product not in (*_CHUNKED_PRODUCTS, *_WHOLE_PRODUCTS):
                known = ", ".join((*_CHUNKED_PRODUCTS, *_WHOLE_PRODUCTS))
                raise ConfigurationError(f"{where}: {product} is no product; possible: {known}")
        elif key == "method":
            possible = _METHODS if product in _CHUNKED_PRODUCTS else ("bulk",)
            if value not in possible:
                raise ConfigurationError(f"{where}: method {value} of {product}; possible: {', '.join(possible)}")
            methods[product] = value
        else:
            ignored[key] = None
    return tuple(f"{name}={method}" for name, method in methods.items()), tuple(ignored)
