"""How the weights of a model folder are quantised, as its config.json says it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.interop.huggingface.settings import Settings


@dataclass(frozen=True)
class BlockFloat8:
    """Say that linear weights are of 8 bits, with a factor for each block of so many rows and columns.

    ``dtype`` is the name of the dtype that they are read as.
    """

    block: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class BlockFloat4:
    """Say that weights of experts are of 4 bits, with an exponent for each 32 of them (MXFP4).

    ``dtype`` is the name of the dtype that they are read as.
    """

    dtype: str


def read_quantization(settings: Settings) -> BlockFloat8 | BlockFloat4 | None:
    """Return how weights are quantised, None where they are not; note a way that is not known."""
    inner = settings.inner("quantization_config")
    if inner is None:
        return None
    method = inner.values.get("quant_method")
    if method == "mxfp4":
        return BlockFloat4(settings.dtype() or "bfloat16")
    if method != "fp8":
        settings.refuse(
            f"quantization_config is set with quant_method {method!r:.40}; supported are fp8 in blocks and mxfp4"
        )
        return None
    block = inner.values.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        inner.refuse(f"weight_block_size is {block!r:.40}; two positive whole numbers are expected")
        return None
    dtype = settings.dtype() or "bfloat16"
    return BlockFloat8((block[0], block[1]), dtype)
