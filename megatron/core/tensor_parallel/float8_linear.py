"""The tensor-parallel linear layer with FP8 or NVFP4 GEMMs and communication.

A quantized matrix may be sharded by row over the ranks. Its parts are gathered as they are, together with their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_into,
    all_reduce,
    reduce_scatter_first_dim,
    reduce_scatter_into,
)
from megatron.core.flight_recorder import PendingWork
from megatron.core.main_grad import MainGrad, Receiver, bias_gradient, main_grad_of
from megatron.core.ops import WHOLE, Fp8Quantizers, Quantized, product, scaled_product
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import symmetric_memory
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE as NO_OVERLAP
from megatron.core.tensor_parallel.comm_overlap_config import LinearOverlap
from megatron.core.tensor_parallel.mappings import InputRegion, gather_gradient


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """Gated activation between two linear layers that is quantized as it is computed.

    ``kind`` is one of the gated kinds of `megatron.core.ops.triton`, and ``quantizers`` are those of the first layer.
    The gradient of its input is quantized as the output gradient of the first layer, and is not written in 16 bits. So
    autograd passes a gradient of NaN to the first layer, which has the quantized matrices as an attribute.
    """

    kind: str
    quantizers: Fp8Quantizers


def _leave_quantized(like: torch.Tensor, plain: Quantized, turned: Quantized) -> torch.Tensor:
    """Return a gradient of NaN without memory, for a layer that reads these matrices instead."""
    grad = torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(like.shape)
    grad.quantized = plain, turned  # type: ignore[attr-defined]
    return grad


def _quantized_gradient(grad: torch.Tensor) -> tuple[Quantized, Quantized] | None:
    """Return the quantized gradient of `_leave_quantized` and its transpose, or None for other gradients."""
    found: tuple[Quantized, Quantized] | None = grad.__dict__.get("quantized")
    assert found is None or found[0].data.numel() == grad.numel(), "the gradient was changed on its way"
    return found


class Gathering:
    """Asynchronous all-gather of a matrix's parts along dim 0, as raw bytes for FP8."""

    def __init__(self, part: torch.Tensor, group: Group) -> None:
        part = part.contiguous()
        self._dtype = part.dtype
        part = _bytes_of(part)
        self._whole = part.new_empty((part.shape[0] * group.size, *part.shape[1:]))
        self._work: PendingWork | None = all_gather_into(self._whole, part, group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the parts concatenated along dim 0."""
        if self._work is not None:
            self._work.wait()
        return self._whole if self._whole.dtype == self._dtype else self._whole.view(self._dtype)


def gather_rows(part: Quantized, group: Group) -> Quantized:
    """All-gather a matrix that is sharded by row.

    Shapes: ``[n, m] -> [group.size * n, m]``.
    """
    data = all_gather_first_dim(_bytes_of(part.data), group).view(part.data.dtype)
    scale = part.scale if part.blocks.rows == 0 else gather_scales(part.scale, group)
    return part.form(data, scale)


def gather_scales(scale: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather scales along dim 0 as bytes: of powers of two in float32, only the exponents are sent.

    Shapes: ``[n, m] -> [group.size * n, m]``.
    """
    sent = scale.to(torch.float8_e8m0fnu) if scale.dtype == torch.float32 else scale
    return all_gather_first_dim(_bytes_of(sent), group).view(sent.dtype).to(scale.dtype)


def side_by_side(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Rearrange the group's matrices from concatenation along dim 0 to concatenation along dim 1.

    Shapes: ``[group.size * n, m] -> [n, group.size * m]``.
    """
    return torch.cat(parts.chunk(group.size), dim=1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View an FP8 tensor as bytes, which every backend can send; other tensors are returned unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class _Kept(Enum):
    """Form in which the input is saved for the weight gradient."""

    NOTHING = "nothing"
    ROUNDED = "rounded"
    """In FP8, as the weight gradient's GEMM requires it, or as its parts are gathered."""
    TO_ROUND = "to round"
    """Unquantized, because the operation that made the input recomputes it. It is quantized again in the backward
    pass."""
    UNROUNDED = "unrounded"
    INNER = "inner"
    """As the input of its activation, which is computed and quantized again in the backward pass."""


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        region: InputRegion,
        tp: Group,
        adds_bias: bool,
        library: str,
        quantizers: Fp8Quantizers,
        records: bool,
        scatters: bool,
        overlap: LinearOverlap,
        activation: QuantizedActivation | None,
        delays_weight_grad: bool,
    ) -> torch.Tensor:
        group = tp if region is InputRegion.SEQUENCE and tp.size > 1 else None
        rows = x.reshape(-1, x.shape[-1])
        kept = _Kept.INNER
        if activation is None:
            kept = _what_to_keep(quantizers, rows, group, ctx.needs_input_grad[1])
        # A gathered input is transposed after the all-gather, if the recipe allows it.
        ctx.turns = not (quantizers.turns and group is not None)
        turns_now = kept is _Kept.ROUNDED and ctx.turns
        if activation is None:
            plain, turned = quantizers.matrix("input", rows, transpose=turns_now, records=records, group=group)
        else:
            plain, turned = quantizers.activated(rows, activation.kind, records=records), None
        quantized_weight = quantizers.weight(weight, transpose=False, records=records, scale=None)
        rounded = plain if turned is None else turned
        data = {_Kept.NOTHING: None, _Kept.ROUNDED: rounded.data}.get(kept, x)
        # A single scale is not saved through hooks, because offloading it to host memory is not worthwhile.
        has_one_scale = rounded.blocks == WHOLE
        ctx.single_scales = (rounded.scale, quantized_weight.scale) if has_one_scale else None
        ctx.save_for_backward(
            data,
            weight,
            rounded.scale if kept is _Kept.ROUNDED and not has_one_scale else None,
            quantized_weight.scale if quantizers.keeps_weight_scale and not has_one_scale else None,
        )
        ctx.region, ctx.tp, ctx.group, ctx.product_library = region, tp, group, library
        ctx.quantizers, ctx.records, ctx.kept, ctx.form = quantizers, records, kept, rounded.form
        ctx.x_shape, ctx.scatters, ctx.overlap = (*x.shape[:-1], weight.shape[1]), scatters, overlap
        ctx.activation, ctx.delays = activation, delays_weight_grad
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        bias = bias if adds_bias else None
        is_fused = overlap.forward and _fuses(overlap, plain, quantized_weight)
        shape = (-1, *x.shape[1:-1], weight.shape[0])
        if is_fused and scatters:
            assert bias is None, "a sum in symmetric memory has no place for it"
            return symmetric_memory.multiply_and_scatter_quantized(plain, quantized_weight, x.dtype, tp).view(shape)
        if is_fused and group is not None:
            result, _ = symmetric_memory.gather_and_multiply_quantized(plain, quantized_weight, x.dtype, group)
            return (result if bias is None else result.add_(bias)).view(shape)
        if group is not None:
            plain = gather_rows(plain, group)
        result = scaled_product(plain, quantized_weight, x.dtype, bias, library).view(shape)
        return reduce_scatter_first_dim(result, tp) if scatters else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, weight, *scales = ctx.saved_tensors
        saved_scale, weight_scale = ctx.single_scales or scales
        tp: Group = ctx.tp
        group: Group | None = ctx.group
        quantizers: Fp8Quantizers = ctx.quantizers
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        if needs_weight_grad and ctx.kept is _Kept.TO_ROUND:
            again = quantizers.input_again(saved.reshape(-1, saved.shape[-1]), saved_scale, ctx.turns, group)
            saved, saved_scale, ctx.form = again.data, again.scale, again.form
        gathering = None
        if group is not None and needs_weight_grad:
            gathering = Gathering(saved, group)

        rows = grad.reshape(-1, grad.shape[-1])
        in_fp8 = needs_weight_grad and quantizers.recipe.has_weight_gradients
        turns_now, gathers_grad = in_fp8 and not ctx.scatters, tp if ctx.scatters else None
        plain, turned = _quantized_gradient(grad) or quantizers.matrix(
            "grad", rows, transpose=turns_now, records=ctx.records, group=gathers_grad
        )
        x_grad, reducing, turned_weight = None, None, None
        if needs_x_grad:
            turned_weight = quantizers.weight(weight, transpose=True, records=False, scale=weight_scale)
        fused: Quantized | None = None
        if turned_weight is not None and ctx.overlap.backward and _fuses(ctx.overlap, plain, turned_weight):
            fused = turned_weight
        if fused is not None and ctx.scatters:
            x_grad, data = symmetric_memory.gather_and_multiply_quantized(plain, fused, grad.dtype, tp)
            plain = plain.form(data, plain.scale)
        elif fused is not None and group is not None:
            x_grad = symmetric_memory.multiply_and_scatter_quantized(plain, fused, grad.dtype, tp)
        elif ctx.scatters:
            data = gather_gradient(_bytes_of(plain.data), tp).view(plain.data.dtype)
            plain = plain.form(data, plain.scale)
        if ctx.scatters and in_fp8:
            turned = plain.transposed()
        if x_grad is not None:
            x_grad = x_grad.view(ctx.x_shape)
        elif turned_weight is not None:
            full = scaled_product(plain, turned_weight, grad.dtype, library=ctx.product_library)
            full = full.view(-1, *grad.shape[1:-1], full.shape[-1])
            x_grad, reducing = _reduce_input_gradient(full, ctx.x_shape, ctx.region, tp)
        activated: Quantized | None = None
        if ctx.activation is not None:
            x_grad, activated = _activation_gradient(x_grad, saved, ctx)

        weight_grad = None
        if needs_weight_grad:
            if gathering is not None:
                saved = gathering.wait()
            if turned is None:
                whole = saved.reshape(-1, ctx.x_shape[-1])
                weight_grad = _add_plain(ctx.main_grad, rows, whole, ctx.product_library, ctx.delays)
            else:
                x_turned = _turned_input(saved, saved_scale, ctx) if activated is None else activated
                weight_grad = _add_fp8(ctx.main_grad, turned, x_turned, weight.dtype, ctx.product_library, ctx.delays)
        bias_grad = bias_gradient(grad, ctx.bias_receiver) if needs_bias_grad else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, *(None,) * 10


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: InputRegion,
    tp: Group,
    quantizers: Fp8Quantizers,
    *,
    adds_bias: bool,
    library: str,
    scatters: bool,
    overlap: LinearOverlap = NO_OVERLAP,
    activation: QuantizedActivation | None = None,
    delays_weight_grad: bool = False,
) -> torch.Tensor:
    """Compute `tensor_parallel_linear` with all three GEMMs in FP8, or in NVFP4 by the quantizers.

    Under sequence parallelism the input is gathered in FP8, with its scales, in both passes. The gradient of an output
    that is scattered here is also gathered in FP8, which requires `Fp8Quantizers.gathers_gradients`. Communication
    overlaps with the GEMM of the output or of the input gradient in symmetric memory only, and with one scale per
    matrix or per row.

    With an ``activation`` the layer multiplies this activation of ``x``, which is the output of the layer of
    ``activation.quantizers``. Both layers are trained, and their quantizers have `Fp8Quantizers.knows_scales`.

    Shapes: as in `tensor_parallel_linear`. With an activation, ``x`` is ``[s, b, 2 in]`` of region SPLIT.
    """
    assert activation is None or region is InputRegion.SPLIT, "the input of an activation is not gathered"
    assert not scatters or quantizers.gathers_gradients, "this recipe gathers gradients before it rounds them"
    quantizers = quantizers.of_microbatch()
    records = torch.is_grad_enabled()
    arguments = (x, weight, bias, region, tp, adds_bias, library, quantizers, records, scatters, overlap)
    more = (activation, delays_weight_grad)
    result: torch.Tensor = _Float8Linear.apply(*arguments, *more)  # type: ignore[no-untyped-call]
    return result


def _fuses(overlap: LinearOverlap, left: Quantized, weight: Quantized) -> bool:
    """Return whether a GEMM runs together with its communication."""
    return overlap.uses_symmetric_memory and symmetric_memory.multiplies_quantized(left, weight)


def _what_to_keep(quantizers: Fp8Quantizers, rows: torch.Tensor, group: Group | None, needs_weight_grad: bool) -> _Kept:
    """Return the form in which an input is saved for the backward pass.

    Sequence parts that are not a multiple of the block length are quantized after the all-gather.
    """
    if not needs_weight_grad:
        return _Kept.NOTHING
    length = quantizers.recipe.blocks.columns
    fills = group is None or length == 0 or rows.shape[0] % length == 0
    if not (quantizers.recipe.has_weight_gradients and fills):
        return _Kept.UNROUNDED
    return _Kept.TO_ROUND if quantizers.input_is_recomputed else _Kept.ROUNDED


def _activation_gradient(grad: torch.Tensor | None, inner: torch.Tensor, ctx: Any) -> tuple[torch.Tensor, Quantized]:
    """Return the gradient of an activation's input, and the transpose of the activation.

    Shapes: ``grad: [..., in]``, ``inner: [..., 2 in] -> [..., 2 in], [in, rows]``.
    """
    assert grad is not None, "the layer before the activation is trained"
    activation: QuantizedActivation = ctx.activation
    plain, turned, activated = activation.quantizers.activation_gradient(
        grad.reshape(-1, grad.shape[-1]),
        inner.reshape(-1, inner.shape[-1]),
        activation.kind,
        ctx.quantizers,
        records=ctx.records,
    )
    return _leave_quantized(inner, plain, turned), activated


def _turned_input(saved: torch.Tensor, scale: torch.Tensor, ctx: Any) -> Quantized:
    """Return the transpose of the whole input in FP8 from its saved and gathered form.

    Shapes: ``-> [in, rows]``.
    """
    quantizers: Fp8Quantizers = ctx.quantizers
    if ctx.kept is _Kept.UNROUNDED:
        return quantizers.columns("input", saved.reshape(-1, saved.shape[-1]))
    group: Group | None = ctx.group
    form: Callable[[torch.Tensor, torch.Tensor], Quantized] = ctx.form
    if group is None:
        return form(saved, scale)
    if quantizers.turns:
        return form(saved.t(), scale)
    if quantizers.recipe.blocks.columns != 0:
        scale = side_by_side(gather_scales(scale, group), group)
    return form(side_by_side(saved, group), scale)


def _reduce_input_gradient(
    x_grad: torch.Tensor, shape: torch.Size, region: InputRegion, tp: Group
) -> tuple[torch.Tensor, PendingWork | None]:
    """Start the reduction of the input's gradient for its region; return its output tensor."""
    if region is InputRegion.REPLICATED:
        return x_grad, all_reduce(x_grad, tp, async_op=True)
    if region is InputRegion.SEQUENCE and tp.size > 1:
        part = x_grad.new_empty(shape)
        return part, reduce_scatter_into(part, x_grad.contiguous(), tp, async_op=True)
    return x_grad, None


def _add_plain(
    main_grad: MainGrad | None, grad: torch.Tensor, x: torch.Tensor, library: str, delays: bool
) -> torch.Tensor | None:
    if main_grad is None:
        return product(grad.t(), x, library)
    main_grad.add_matmul(grad.t(), x, library, delays=delays)
    return None


def _add_fp8(
    main_grad: MainGrad | None, grad: Quantized, x: Quantized, dtype: torch.dtype, library: str, delays: bool
) -> torch.Tensor | None:
    if main_grad is None:
        return scaled_product(grad, x, dtype, library=library)
    main_grad.add_by(partial(_add_gemm, grad, x, library), delays=delays)
    return None


def _add_gemm(grad: Quantized, x: Quantized, library: str, total: torch.Tensor, overwrite: bool) -> None:
    """Add ``grad @ x.T`` to ``total``, or overwrite it, by the GEMM itself if it can write its dtype."""
    # An addition reads the result in the dtype of the GEMM.
    out = total if overwrite else None
    result = scaled_product(grad, x, total.dtype, library=library, narrow=True, out=out)
    if not overwrite:
        total.add_(result)
    elif result is not total:
        total.copy_(result)
