"""The linear map of `tensor_parallel.linear` with its products in fp8, and with fp8 on the way between ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_into, all_reduce, reduce_scatter_into
from megatron.core.flight.communication import PendingWork
from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.kernels.float8.quantised import Quantised
from megatron.core.kernels.float8.scaled_product import scaled_product
from megatron.core.kernels.matrix_product import product
from megatron.core.main_grad import MainGrad, main_grad_of
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.mappings import InputRegion


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
        quantisers: Float8Quantisers,
        records: bool,
    ) -> torch.Tensor:
        group = tp if region is InputRegion.SEQUENCE and tp.size > 1 else None
        rows = x.reshape(-1, x.shape[-1])
        keeps_fp8 = _keeps_fp8(quantisers, rows, group)
        # What is gathered is turned where it arrives.
        turns_here = keeps_fp8 and not (quantisers.turns and group is not None)
        plain, turned = quantisers.matrix("input", rows, transpose=turns_here, records=records, group=group)
        kept = plain if turned is None else turned
        quantised_weight = quantisers.weight(weight, transpose=False, records=records, scale=None)
        ctx.save_for_backward(
            *((kept.data, kept.scale) if keeps_fp8 else (x, None)),
            weight,
            quantised_weight.scale if quantisers.keeps_weight_scale else None,
        )
        ctx.region, ctx.tp, ctx.group, ctx.product_library = region, tp, group, library
        ctx.quantisers, ctx.records, ctx.keeps_fp8, ctx.blocks = quantisers, records, keeps_fp8, kept.blocks
        ctx.x_shape = x.shape
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        if group is not None:
            plain = _gather_rows(plain, group)
        result = scaled_product(plain, quantised_weight, x.dtype, bias if adds_bias else None, library)
        return result.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, saved_scale, weight, weight_scale = ctx.saved_tensors
        tp: Group = ctx.tp
        group: Group | None = ctx.group
        quantisers: Float8Quantisers = ctx.quantisers
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        gathering = None
        if group is not None and needs_weight_grad:
            gathering = _Gathering(saved, group)

        rows = grad.reshape(-1, grad.shape[-1])
        in_fp8 = needs_weight_grad and quantisers.recipe.has_weight_gradients
        plain, turned = quantisers.matrix("grad", rows, transpose=in_fp8, records=ctx.records)
        x_grad, reducing = None, None
        if needs_x_grad:
            turned_weight = quantisers.weight(weight, transpose=True, records=False, scale=weight_scale)
            full = scaled_product(plain, turned_weight, grad.dtype, library=ctx.product_library)
            x_grad, reducing = _reduce_input_gradient(full.view(*grad.shape[:-1], -1), ctx.x_shape, ctx.region, tp)

        weight_grad = None
        if needs_weight_grad:
            if gathering is not None:
                saved = gathering.wait()
            if turned is None:
                weight_grad = _add_plain(ctx.main_grad, rows, saved.reshape(-1, ctx.x_shape[-1]), ctx.product_library)
            else:
                x_turned = _turned_input(saved, saved_scale, ctx)
                weight_grad = _add_fp8(ctx.main_grad, turned, x_turned, weight.dtype, ctx.product_library)
        bias_grad = rows.sum(dim=0) if needs_bias_grad else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, None, None, None, None, None, None


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: InputRegion,
    tp: Group,
    quantisers: Float8Quantisers,
    *,
    adds_bias: bool,
    library: str,
) -> torch.Tensor:
    """Do what `tensor_parallel_linear` does, with the three products in fp8.

    Under sequence parallelism the input travels in fp8, with its scales, in both passes.

    Shapes: as those of `tensor_parallel_linear`.
    """
    result: torch.Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, region, tp, adds_bias, library, quantisers, torch.is_grad_enabled()
    )
    return result


class _Gathering:
    """Gather a saved input's parts, its bytes as they are, while the host goes on."""

    def __init__(self, saved: torch.Tensor, group: Group) -> None:
        part = saved.contiguous()
        self._dtype = part.dtype
        part = _bytes_of(part)
        self._whole = part.new_empty((part.shape[0] * group.size, *part.shape[1:]))
        self._work: PendingWork | None = all_gather_into(self._whole, part, group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the parts one after the other along dim 0."""
        if self._work is not None:
            self._work.wait()
        return self._whole if self._whole.dtype == self._dtype else self._whole.view(self._dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp8 as bytes, which every backend sends; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _keeps_fp8(quantisers: Float8Quantisers, rows: torch.Tensor, group: Group | None) -> bool:
    """Return whether the backward pass can use an input that is kept in fp8.

    Parts of a sequence that do not fill the blocks along it are quantised when they are joined.
    """
    if not quantisers.recipe.has_weight_gradients:
        return False
    length = quantisers.recipe.blocks.columns
    return group is None or length == 0 or rows.shape[0] % length == 0


def _gather_rows(part: Quantised, group: Group) -> Quantised:
    """Return the matrix whose rows the group's ranks hold."""
    data = all_gather_first_dim(_bytes_of(part.data), group).view(part.data.dtype)
    scale = part.scale if part.blocks.rows == 0 else _gather_scales(part.scale, group)
    return Quantised(data, scale, part.blocks)


def _gather_scales(scale: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather powers of two along dim 0: their exponents travel."""
    exponents = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    return all_gather_first_dim(exponents, group).view(torch.float8_e8m0fnu).float()


def _turned_input(saved: torch.Tensor, scale: torch.Tensor, ctx: Any) -> Quantised:
    """Return the whole input's transpose in fp8 from what was kept of it, gathered.

    Shapes: ``-> [in, rows]``.
    """
    quantisers: Float8Quantisers = ctx.quantisers
    if not ctx.keeps_fp8:
        return quantisers.columns("input", saved.reshape(-1, saved.shape[-1]))
    group: Group | None = ctx.group
    if group is None:
        return Quantised(saved, scale, ctx.blocks)
    if quantisers.turns:
        return Quantised(saved.t(), scale, ctx.blocks)
    if ctx.blocks.columns != 0:
        scale = _side_by_side(_gather_scales(scale, group), group)
    return Quantised(_side_by_side(saved, group), scale, ctx.blocks)


def _side_by_side(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the group's matrices beside each other that lie one below the other.

    Shapes: ``[group.size * n, m] -> [n, group.size * m]``.
    """
    return torch.cat(parts.chunk(group.size), dim=1)


def _reduce_input_gradient(
    x_grad: torch.Tensor, shape: torch.Size, region: InputRegion, tp: Group
) -> tuple[torch.Tensor, PendingWork | None]:
    """Start to sum the input's gradient as its region asks for it; return where the sum will be."""
    if region is InputRegion.REPLICATED:
        return x_grad, all_reduce(x_grad, tp, async_op=True)
    if region is InputRegion.SEQUENCE and tp.size > 1:
        part = x_grad.new_empty(shape)
        return part, reduce_scatter_into(part, x_grad.contiguous(), tp, async_op=True)
    return x_grad, None


def _add_plain(main_grad: MainGrad | None, grad: torch.Tensor, x: torch.Tensor, library: str) -> torch.Tensor | None:
    if main_grad is None:
        return product(grad.t(), x, library)
    main_grad.add_matmul(grad.t(), x, library)
    return None


def _add_fp8(
    main_grad: MainGrad | None, grad: Quantised, x: Quantised, dtype: torch.dtype, library: str
) -> torch.Tensor | None:
    if main_grad is None:
        return scaled_product(grad, x, dtype, library=library)
    main_grad.add_computed(partial(scaled_product, grad, x, main_grad.tensor.dtype, library=library))
    return None
