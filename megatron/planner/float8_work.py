"""What making operands in fp8 reads and writes in one layer and micro-batch, as this program does it.

Every operand is read in 16 bits and written in 8, along its rows for the layer's own product and its input's gradient,
and turned for the weight's. Weights are rounded in each pass. Scales are not counted. Bytes are those of the kernels
that a dry run shows; for one scale a matrix they are equal.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.expert_layer import ExpertLayer
from megatron.planner.layer_widths import is_whole_on_ranks, layer_widths
from megatron.planner.layer_work import join_product, layer_products
from megatron.planner.traffic.float8_traffic import fills_blocks, gathers_gradients

_HALF, _EIGHTH = 2, 1
_AMAX = 6
"""A matrix's own amax: absolute values read, written, and read again."""
_BY_TORCH = {"rowwise": 55, "blockwise": 63, "mxfp8": 67}
"""Recipes with scales of rows and blocks round with some twenty of torch's own operations, counted in a dry run."""
_SUM = 8
"""A product of a weight's gradient writes it, and another pass adds it: that much more than a product that adds."""
_OF_WHOLE = ("delayed", "tensorwise")
"""Recipes in which a matrix and its transpose are rounded alike, so that both are written by one pass."""


def cast_passes(model: TransformerConfig) -> tuple[int, int, int]:
    """Return the bytes a number of rounding an operand, of its transpose beside it, and of a second time, by the scale
    of the first.
    """
    if model.fp8_recipe not in _OF_WHOLE:
        return (_BY_TORCH[model.fp8_recipe],) * 3
    plain = _HALF + _EIGHTH + (_AMAX if model.fp8_recipe == "tensorwise" else 0)
    return plain, _EIGHTH, _HALF + _EIGHTH


def float8_expert_cast_bytes(layer: ExpertLayer) -> float:
    """Return the bytes for the products of a rank's experts, whose inputs are kept in 16 bits and read again."""
    model, h = layer.model, layer.model.hidden_size
    plain, turned, again = cast_passes(model)
    total = 0
    for inner, columns in ((h, layer.gates * layer.width), (layer.width, h)):
        total += layer.given * (
            inner * (plain + again * model.fp8_wgrad) + columns * (plain + turned * model.fp8_wgrad)
        )
        total += (plain + again + _SUM * model.fp8_wgrad) * layer.num_local * inner * columns
    return float(total)


def float8_cast_bytes(
    model: GPTConfig, tokens: int, rows: int, *, has_experts: bool = False, has_join: bool = False
) -> float:
    """Return the bytes; ``tokens`` are those of the products, ``rows`` those of the residual stream on a rank.

    With ``has_join`` those of the product in front of a layer that predicts a further token are among them.

    Of a feed-forward of experts only the shared one's are counted, if it is there.
    """
    of_whole = model.fp8_recipe in _OF_WHOLE
    plain, turned, weight_again = cast_passes(model)
    is_cut, total = model.sequence_parallel and model.tensor_model_parallel_size > 1, 0
    products = dict(zip(layer_widths(model, has_experts=has_experts), layer_products(model, has_experts=has_experts)))
    if has_join:
        products["eh_proj"] = join_product(model)
    for name, product in products.items():
        is_column, is_whole = name not in ("linear_proj", "linear_fc2"), is_whole_on_ranks(name)
        has_turned = product.is_trained and model.fp8_wgrad
        given = rows if is_column else tokens
        total += plain * given * product.inner
        if has_turned and is_column and not is_whole and is_cut and (of_whole or not fills_blocks(model, rows)):
            # What is gathered is turned where it arrives.
            total += (2 * _EIGHTH if of_whole else turned) * tokens * product.inner
        elif has_turned:
            total += turned * given * product.inner
        total += (plain + weight_again + _SUM * has_turned) * product.size
        if not is_column and is_cut and gathers_gradients(model):
            total += plain * rows * product.columns + 2 * _EIGHTH * tokens * product.columns * has_turned
        else:
            total += (plain + turned * has_turned) * (rows if is_whole else tokens) * product.columns
    return float(total)
