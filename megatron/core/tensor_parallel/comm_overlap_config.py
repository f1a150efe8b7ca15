"""Tensor-parallel communication overlap: which linear layers use it, and the file of --tp-comm-overlap-cfg.

Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import Fp8Config, ParallelConfig

LinearName = Literal["qkv", "proj", "fc1", "fc2", "output"]
ROW_PARALLEL: tuple[LinearName, ...] = ("proj", "fc2")
CHUNKED_METHODS = ("ring_exchange", "pipeline")
"""Methods in a file of --tp-comm-overlap-cfg that select chunked overlap."""


@dataclass(frozen=True)
class LinearOverlap:
    """Communication overlap of a linear layer under sequence parallelism.

    ``forward`` and ``backward`` overlap communication chunk by chunk with the GEMM of the output and of the input
    gradient. For a column-parallel layer these are the all-gather of the input and the reduce-scatter of the input
    gradient. For a row-parallel layer these are the reduce-scatter of the output and the all-gather of the output
    gradient. ``bulk_gather`` overlaps a column-parallel layer's second all-gather of the input with the GEMM of the
    input gradient, and ``bulk_scatter`` overlaps the reduce-scatter of the input gradient with the GEMM of the weight
    gradient. ``uses_symmetric_memory`` uses torch's symmetric memory for chunked overlap.
    """

    forward: bool = False
    backward: bool = False
    bulk_gather: bool = True
    bulk_scatter: bool = True
    uses_symmetric_memory: bool = False


WHOLE = LinearOverlap()
"""No chunked overlap."""


def linear_overlap(config: ParallelConfig, name: LinearName | None) -> LinearOverlap:
    """Return a linear layer's overlap, by the configuration and its file's methods.

    A layer without a name does not overlap.
    """
    if name is None or not config.tp_comm_overlap:
        return WHOLE
    methods = dict(entry.split("=") for entry in config.tp_comm_overlap_methods)

    def is_chunked(product: str, default: bool) -> bool:
        method = methods.get(f"{name}_{product}")
        return default if method is None else method in CHUNKED_METHODS

    gathers, scatters = config.tp_comm_overlap_ag, config.tp_comm_overlap_rs
    if name in ROW_PARALLEL:
        forward, backward = scatters and is_chunked("fprop", True), gathers and is_chunked("dgrad", True)
    else:
        forward = gathers and is_chunked("fprop", True)
        backward = is_chunked("dgrad", config.tp_comm_overlap_rs_dgrad)
    has_chunks = config.tp_comm_overlap_impl != "whole"
    return LinearOverlap(
        forward=forward and has_chunks,
        backward=backward and has_chunks,
        bulk_gather=config.tp_comm_bulk_dgrad,
        bulk_scatter=config.tp_comm_bulk_wgrad,
        uses_symmetric_memory=config.tp_comm_overlap_impl == "symmetric-memory",
    )


def unchunked_gemms(fp8: Fp8Config, impl: str) -> str | None:
    """Return the quantized GEMMs that an implementation of chunked overlap does not split, or None.

    For ``auto`` these are the GEMMs that no implementation splits.
    """
    if fp8.fp4_format is not None:
        return "NVFP4 GEMMs"
    if fp8.fp8_format is None:
        return None
    if impl in ("ring", "whole") or fp8.fp8_recipe in ("blockwise", "mxfp8"):
        return "FP8 GEMMs"
    # Only a transposable FP8 gradient is gathered in FP8, and then the output is scattered by the FP8 layer itself.
    return "FP8 GEMMs of row-parallel layers" if fp8.fp8_recipe == "rowwise" or not fp8.fp8_wgrad else None


_FLAG = "--tp-comm-overlap-cfg"
_CHUNKED_PRODUCTS = tuple(f"{name}_{kind}" for name in ("qkv", "proj", "fc1", "fc2") for kind in ("fprop", "dgrad"))
_WHOLE_PRODUCTS = ("qkv_wgrad", "fc1_wgrad")
"""GEMMs that overlap a whole collective (bulk overlap)."""
_METHODS = (*CHUNKED_METHODS, "bulk")


def read_overlap_methods(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the methods of a file as ``PRODUCT=METHOD``, and the names of settings that have no effect here.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is invalid.
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
                raise ConfigurationError(f"{where}: {product} is not a GEMM; possible names: {known}")
        elif key == "method":
            possible = _METHODS if product in _CHUNKED_PRODUCTS else ("bulk",)
            if value not in possible:
                raise ConfigurationError(
                    f"{where}: method {value} of {product} is not known; possible methods: {', '.join(possible)}"
                )
            methods[product] = value
        else:
            ignored[key] = None
    return tuple(f"{name}={method}" for name, method in methods.items()), tuple(ignored)
