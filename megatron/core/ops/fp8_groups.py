"""Groups of rows in FP8 with a scale per row, and grouped GEMMs of them in one launch each.

The rows of a group are quantized as in a separate matrix (see `megatron.core.ops.fp8_tensor`): a row has one scale, and
a column of a group has one scale in the transpose. torch's kernel takes E4M3 operands, and the groups that a GEMM sums
over must start at multiples of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.device import compute_capability
from megatron.core.ops.fp8_tensor import E4M3, _cast, scale_of
from megatron.core.ops.gated_activation import gated_kind_of
from megatron.core.ops.gemm import Groups, RowEnds, group_ends, has_grouped_kernel
from megatron.core.ops.token_rows import RowOrder, gather_rows, sum_rows, weighted_rows
from megatron.core.ops.triton_support import casts_on_triton

GRAIN = 16
"""Multiple of rows at which groups start."""
_MULTIPLIES_ROW_SCALES = ((9, 0),)
"""Compute capabilities for which torch has a grouped FP8 GEMM with a scale per row."""


@dataclass(frozen=True, eq=False)
class PaddedGroups:
    """Groups of rows, each padded to a multiple of `GRAIN` rows; only the device knows how many.

    ``order`` has the choice of each padded row, and the padded row of each choice; its number of rows is an upper
    limit. ``group_of`` has the group of each `GRAIN` padded rows, and after the last group the number of groups.
    ``pads_end`` says that the padded rows are the tokens in their order, and after them padding.

    Shapes: ``ends: [groups]``, ``order.choices: [n]``, ``group_of: [n / GRAIN]`` int32.
    """

    ends: RowEnds
    order: RowOrder
    group_of: torch.Tensor
    pads_end: bool

    @classmethod
    def of(cls, counts: Groups, num_rows: int, device: torch.device, order: RowOrder | None = None) -> PaddedGroups:
        """Return the padding of ``num_rows`` rows in groups, without waiting for the device.

        ``order`` has the choices of the rows. Without it each row is a token of its own.
        """
        ends = group_ends(counts, device).long()
        sizes = ends.diff(prepend=ends.new_zeros(1))
        padded_sizes = (sizes + (GRAIN - 1)) // GRAIN * GRAIN
        padded_ends = padded_sizes.cumsum(0)
        # Each group has fewer than GRAIN rows of padding.
        most = -(-num_rows // GRAIN) * GRAIN + len(ends) * GRAIN
        rows = torch.arange(num_rows, device=device)
        group = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        place = rows + (padded_ends - padded_sizes - ends + sizes)[group]
        pads_end = order is None and len(ends) == 1
        order = order or RowOrder(rows, rows.unsqueeze(1))
        count = order.slots.numel()
        choices = torch.full((most,), count, device=device).index_copy_(0, place, order.choices)
        if order.has_dropped_choices:
            slots = F.pad(place, (0, 1), value=most)[order.slots.clamp(max=num_rows)]
        else:
            slots = place[order.slots]
        padded = RowOrder(choices, slots, has_empty_rows=True, has_dropped_choices=order.has_dropped_choices)
        blocks = torch.arange(0, most, GRAIN, device=device)
        group_of = torch.searchsorted(padded_ends, blocks, right=True).int()
        return cls(RowEnds(padded_ends.int()), padded, group_of, pads_end)

    def sum_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's padded rows. Shapes: ``rows: [n, h] -> [tokens, h]``."""
        if self.pads_end:
            return rows[: len(self.order.slots)]
        if self.order.per_token == 1 and not self.order.has_dropped_choices:
            return rows.index_select(0, self.order.slots.flatten())
        return sum_rows(rows, self.order)

    def quantize(
        self,
        x: torch.Tensor,
        *,
        is_padded: bool = True,
        weights: torch.Tensor | None = None,
        plain: bool,
        transpose: bool,
    ) -> QuantizedGroups:
        """Quantize padded rows, of which the padding may have any values, or the rows of tokens, times ``weights``."""
        return quantize_groups(
            *(x, self.group_of, len(self.ends)),
            order=self.order,
            is_padded=is_padded,
            weights=weights,
            plain=plain,
            transpose=transpose,
        )


@dataclass(frozen=True, eq=False)
class QuantizedGroups:
    """Groups of rows in E4M3 with a scale per row, their transposes with a scale per own row, or both.

    Shapes: ``data: [n, m]``, ``scale: [n]``, ``turned: [m, n]``, ``turned_scale: [groups, m]``.
    """

    data: torch.Tensor | None
    scale: torch.Tensor | None
    turned: torch.Tensor | None
    turned_scale: torch.Tensor | None

    @classmethod
    def of(
        cls, plain: tuple[torch.Tensor, torch.Tensor] | None, transpose: tuple[torch.Tensor, torch.Tensor] | None
    ) -> QuantizedGroups:
        """Return the groups with these data and scales."""
        return cls(*(plain or (None, None)), *(transpose or (None, None)))


def has_scaled_groups(x: torch.Tensor, *features: int) -> bool:
    """Return whether torch's grouped FP8 GEMM is one launch for rows like ``x`` with these numbers of features."""
    if any(size % GRAIN for size in features) or not has_grouped_kernel(x, *features):
        return False
    capability = compute_capability(x.device)
    return capability is None or capability in _MULTIPLIES_ROW_SCALES


def quantize_groups(
    x: torch.Tensor,
    group_of: torch.Tensor,
    num_groups: int,
    *,
    order: RowOrder | None = None,
    is_padded: bool = False,
    weights: torch.Tensor | None = None,
    plain: bool,
    transpose: bool,
) -> QuantizedGroups:
    """Quantize groups of rows, their transposes, or both; ``order`` and ``group_of`` as in `PaddedGroups`.

    With an ``order`` the rows of ``x`` are tokens, or with ``is_padded`` the padded rows, of which those without a
    choice count as zeros. Rows of tokens are multiplied by the ``weights`` of their choices, if given, and rounded to
    the dtype of ``x`` before.

    Shapes: ``x: [m, width]``, ``weights: [m, c]``, ``order.choices: [n]``, ``group_of: [n / GRAIN]``, without an order
    ``n = m``.
    """
    x = x.detach().contiguous()
    if casts_on_triton(x):
        from megatron.core.ops.triton import cast_groups

        weights = None if weights is None else weights.detach().contiguous()
        choices, per_token, count = None, 1, 0
        if order is not None:
            choices, per_token, count = order.choices, order.per_token, order.slots.numel()
        return QuantizedGroups.of(
            *cast_groups(
                x, choices, per_token, count, group_of, num_groups,
                is_padded=is_padded, weights=weights, plain=plain, transpose=transpose,
            )
        )  # fmt: skip
    rows = x
    if order is not None and not is_padded:
        rows = gather_rows(x, order) if weights is None else weighted_rows(x, weights, order)
    elif order is not None:
        rows = x.masked_fill((order.choices >= order.slots.numel())[:, None], 0.0)
    of_rows = group_of.repeat_interleave(GRAIN)
    rows = rows.masked_fill((of_rows >= num_groups)[:, None], 0.0)
    data = scale = turned = turned_scale = None
    if plain:
        scale = scale_of(rows.abs().amax(1), E4M3)
        data = _cast(rows, E4M3, scale[:, None])
    if transpose:
        blocks = rows.abs().view(-1, GRAIN, rows.shape[1]).amax(1).float()
        index = group_of.long()[:, None].expand_as(blocks)
        amax = blocks.new_zeros(num_groups + 1, rows.shape[1]).scatter_reduce_(0, index, blocks, "amax")
        scales = scale_of(amax, E4M3)
        turned_scale = scales[:num_groups]
        turned = _cast(rows, E4M3, scales[of_rows.long()]).t().contiguous()
    return QuantizedGroups(data, scale, turned, turned_scale)


Activation = Callable[[torch.Tensor], torch.Tensor]


def quantize_activated(
    x: torch.Tensor, groups: PaddedGroups, activation: Activation, *, plain: bool, transpose: bool
) -> QuantizedGroups:
    """Quantize an activation of padded rows, of which the padding may have any values.

    A Triton kernel computes and quantizes SwiGLU or GeGLU without writing it in 16 bits.

    Shapes: ``x: [n, 2 * width]`` if the activation is gated, else ``[n, width]``.
    """
    kind, order = _fused_kind(activation, x), groups.order
    if kind is None:
        return groups.quantize(activation(x.detach()), plain=plain, transpose=transpose)
    from megatron.core.ops.triton import cast_groups

    return QuantizedGroups.of(
        *cast_groups(
            x.detach().contiguous(), order.choices, 1, order.slots.numel(), groups.group_of, len(groups.ends),
            is_padded=True, kind=kind, plain=plain, transpose=transpose,
        )
    )  # fmt: skip


def quantize_activation_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    groups: PaddedGroups,
    activation: Activation,
    *,
    plain: bool,
    transpose: bool,
    activated: bool,
) -> tuple[QuantizedGroups, QuantizedGroups]:
    """Quantize the gradient of padded rows given that of their activation, and with ``activated`` the activation.

    Of the activation only the transpose is quantized. For SwiGLU and GeGLU one Triton kernel finds the scales of all
    results, and a second one writes them.

    Shapes: ``grad: [n, width]``, ``x`` as in `quantize_activated`.
    """
    kind, order, nothing = _fused_kind(activation, grad, x), groups.order, QuantizedGroups.of(None, None)
    if kind is None:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = activation(leaf)
            (x_grad,) = torch.autograd.grad(result, leaf, grad)
        again = groups.quantize(result, plain=False, transpose=True) if activated else nothing
        return groups.quantize(x_grad, plain=plain, transpose=transpose), again
    from megatron.core.ops.triton import cast_gated_gradients

    first, second, third = cast_gated_gradients(
        grad.detach().contiguous(), x.detach().contiguous(), order.choices, order.slots.numel(),
        groups.group_of, len(groups.ends), kind, plain=plain, transpose=transpose, activated=activated,
    )  # fmt: skip
    return QuantizedGroups.of(first, second), QuantizedGroups.of(None, third)


def _fused_kind(activation: Activation, *tensors: torch.Tensor) -> str | None:
    """Return the kind of a gated activation that Triton kernels quantize here, or None."""
    kind = gated_kind_of(activation)
    if kind is None or not all(map(casts_on_triton, tensors)):
        return None
    from megatron.core.ops.triton import GATED_KINDS

    return kind if kind in GATED_KINDS else None


def quantize_weights(weight: torch.Tensor, *, plain: bool, transpose: bool) -> QuantizedGroups:
    """Quantize the weight of each group along its rows, its transpose, or both.

    Shapes: ``[groups, out, in]``; of the result ``data: [groups * out, in]``, ``turned: [in, groups * out]``.
    """
    num_groups, out, _ = weight.shape
    blocks = torch.arange(num_groups, device=weight.device, dtype=torch.int32).repeat_interleave(out // GRAIN)
    return quantize_groups(weight.flatten(0, 1), blocks, num_groups, plain=plain, transpose=transpose)


def grouped_scaled_product(
    rows: QuantizedGroups, weights: QuantizedGroups, ends: RowEnds, *, transpose: bool
) -> torch.Tensor:
    """Multiply each group of rows by the transpose of its weight, or with ``transpose`` by the weight.

    Shapes: ``rows: [n, in], weights: [groups, out, in] -> [n, out]``; with ``transpose`` ``[n, out] -> [n, in]``;
    bfloat16.
    """
    assert rows.data is not None
    assert rows.scale is not None
    num_groups = len(ends)
    if transpose:
        assert weights.turned is not None
        assert weights.turned_scale is not None
        # [in, groups, out] -> [groups, out, in], whose out is contiguous
        width = len(weights.turned)
        matrix, scale = weights.turned.view(width, num_groups, -1).permute(1, 2, 0), weights.turned_scale
    else:
        assert weights.data is not None
        assert weights.scale is not None
        width = weights.data.shape[1]
        matrix, scale = weights.data.view(num_groups, -1, width).transpose(1, 2), weights.scale.view(num_groups, -1)
    result: torch.Tensor = torch._scaled_grouped_mm(
        rows.data, matrix, rows.scale, scale, offs=ends.ends, out_dtype=torch.bfloat16
    )
    return result


def unfinished_scaled_gradient(grad: QuantizedGroups, x: QuantizedGroups, ends: RowEnds) -> torch.Tensor:
    """Compute ``grad[group].T @ x[group]``, with uninitialized memory for groups without rows.

    Shapes: ``grad: [n, out]``, ``x: [n, in] -> [groups, out, in]`` bfloat16.
    """
    assert grad.turned is not None
    assert grad.turned_scale is not None
    assert x.turned is not None
    assert x.turned_scale is not None
    result: torch.Tensor = torch._scaled_grouped_mm(
        grad.turned,
        x.turned.t(),
        grad.turned_scale.flatten(),
        x.turned_scale.flatten(),
        offs=ends.ends,
        out_dtype=torch.bfloat16,
    )
    return result
