"""What making operands in fp8 reads and writes in one layer and micro-batch, as this program does it.

Every operand is read in 16 bits and written in 8, along its rows for the layer's own product and its input's gradient,
and turned for the weight's. Weights are rounded in each pass. Scales are not counted. Bytes are those of the kernels
that a dry run shows; for one scale a matrix they are equal.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planning.prediction.layer_work import layer_products
from megatron.planning.traffic.float8_traffic import fills_blocks, gathers_gradients

_HALF, _EIGHTH = 2, 1
_AMAX = 6
"""A matrix's own amax: absolute values read, written, and read again."""
_BY_TORCH = {"rowwise": 55, "blockwise": 63, "mxfp8": 67}
"""Recipes with scales of rows and blocks round with some twenty of torch's own operations, counted in a dry run."""
_SUM = 8
"""A product of a weight's gradient writes it, and another pass adds it: that much more than a product that adds."""
_OF_WHOLE = ("delayed", "tensorwise")
"""Recipes in which a matrix and its transpose are rounded alike, so that both are written by one pass."""


def float8_cast_bytes(model: GPTConfig, tokens: int, rows: int) -> float:
    """Return the bytes; ``tokens`` are those of the products, ``rows`` those of the residual stream on a rank."""
    of_whole = model.fp8_recipe in _OF_WHOLE
    plain, turned, weight_again = _HALF + _EIGHTH, _EIGHTH, _HALF + _EIGHTH
    if model.fp8_recipe == "tensorwise":
        plain += _AMAX
    elif not of_whole:
        plain = turned = weight_again = _BY_TORCH[model.fp8_recipe]
    is_cut, total = model.sequence_parallel and model.tensor_model_parallel_size > 1, 0
    for number, product in enumerate(layer_products(model)):
        is_column = number % 2 == 0
        has_turned = product.is_trained and model.fp8_wgrad
        given = rows if is_column else tokens
        total += plain * given * product.inner
        if has_turned and is_column and is_cut and (of_whole or not fills_blocks(model, rows)):
            # What is gathered is turned where it arrives.
            total += (2 * _EIGHTH if of_whole else turned) * tokens * product.inner
        elif has_turned:
            total += turned * given * product.inner
        total += (plain + weight_again + _SUM * has_turned) * product.size
        if not is_column and is_cut and gathers_gradients(model):
            total += plain * rows * product.columns + 2 * _EIGHTH * tokens * product.columns * has_turned
        else:
            total += (plain + turned * has_turned) * tokens * product.columns
    return float(total)
