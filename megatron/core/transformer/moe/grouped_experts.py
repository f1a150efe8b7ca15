"""The experts of an MoE layer on this rank: feed-forward layers with grouped GEMMs, optionally in FP8.

A grouped linear layer has one weight per group of rows. In FP8 the operands of each expert are quantized like those of
a separate linear layer. With one E4M3 scale per row, one kernel quantizes all experts and one launch multiplies them,
if torch's kernel supports the GPU and the sizes. Otherwise experts are quantized and multiplied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.main_grad import Receiver, main_grad_of
from megatron.core.ops import (
    E4M3,
    ROWS,
    WHOLE,
    Blocks,
    Fp8Quantizers,
    Groups,
    PaddedGroups,
    Quantized,
    RowCounts,
    RowEnds,
    RowOrder,
    add_groups,
    grouped_gradient,
    grouped_product,
    has_grouped_kernel,
    has_scaled_groups,
    has_scaled_products,
    row_counts,
    scaled_product,
    unfinished_grouped_gradient,
)
from megatron.core.parallel_state import ExpertGroups
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import Box, ParamSpec, Shard, quantized_of
from megatron.core.tensor_parallel import make_parameter, saved_as_inputs
from megatron.core.transformer import DecoderConfig, activation_of
from megatron.core.transformer.moe.expert_dispatch import LateGradients, run_in_order
from megatron.core.transformer.moe.fp8_experts import ExpertWeights, float8_experts


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: RowCounts | RowEnds,
        adds_bias: bool,
        library: str,
        late: list[Callable[[], None]] | None,
    ) -> torch.Tensor:
        # A quantized weight is dequantized again in the backward pass.
        ctx.quantized = quantized_of(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.quantized is None else None)
        ctx.counts, ctx.product_library, ctx.late = counts, library, late
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        weight = weight if ctx.quantized is None else ctx.quantized.dense()
        output = grouped_product(x, weight, counts, library)
        if bias is not None and adds_bias:
            assert not isinstance(counts, RowEnds), "experts with biases read the counts"
            for group, of_group in zip(output.split_with_sizes(counts), bias):
                group += of_group
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        counts, library = ctx.counts, ctx.product_library
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        if ctx.quantized is not None and needs_x_grad:
            weight = ctx.quantized.dense()
        x_grad = grouped_product(grad, weight.transpose(1, 2), counts, library) if needs_x_grad else None
        weight_grad = None
        if needs_weight_grad and ctx.main_grad is not None:
            if isinstance(counts, RowEnds):
                add = partial(ctx.main_grad.add_by, partial(_add_gradients, grad.detach(), x.detach(), counts))
            else:
                add = partial(ctx.main_grad.add_grouped_matmul, grad, x, counts, library)
            if ctx.late is None:
                add()
            else:
                ctx.late.append(add)
        elif needs_weight_grad:
            weight_grad = grouped_gradient(grad, x, counts, library)
        bias_grad = None
        if needs_bias_grad:
            bias_grad = torch.stack([rows.sum(dim=0) for rows in grad.split_with_sizes(counts)])
        return x_grad, weight_grad, bias_grad, *(None,) * 4


def _add_gradients(grad: torch.Tensor, x: torch.Tensor, counts: RowEnds, total: torch.Tensor, overwrite: bool) -> None:
    """Add the gradient of each group's weight to ``total``, or overwrite it."""
    add_groups(total, unfinished_grouped_gradient(grad, x, counts), counts, overwrite=overwrite)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Groups,
    *,
    adds_bias: bool = True,
    library: str = "auto",
    late: list[Callable[[], None]] | None = None,
) -> torch.Tensor:
    """Grouped GEMM: multiply each contiguous group of rows by the weight of the group.

    With `RowEnds` there is no bias. If ``late`` is given, the backward pass appends the addition to the weight's main
    gradient to it, and the caller runs it later in the same backward pass.

    If the results of several ranks are to be summed, only one of the ranks ``adds_bias``. The bias has its gradient on
    all.

    Shapes: ``x: [n, in]``, ``weight: [groups, out, in]``, ``bias: [groups, out]``, counts that sum to n ``-> [n,
    out]``.
    """
    result: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, counts if isinstance(counts, RowEnds) else row_counts(counts), adds_bias, library, late
    )
    return result


_MULTIPLE = 16
"""Multiple of rows required by FP8 GEMMs on a GPU; rows of zeros pad each group to it.

With blockwise scales along the rows, native FP8 GEMMs require whole blocks (`_summed_multiple`)."""
_Operands = list[tuple[Quantized, Quantized] | None]


class _Float8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: RowCounts,
        adds_bias: bool,
        library: str,
        quantizers: Sequence[Fp8Quantizers],
        records: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts, ctx.product_library, ctx.quantizers, ctx.records = counts, library, quantizers, records
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        output = x.new_empty(len(x), weight.shape[1])
        ctx.scales = []
        for number, (rows, into) in enumerate(zip(x.split_with_sizes(counts), output.split_with_sizes(counts))):
            if not len(rows):
                ctx.scales.append((None, None))
                continue
            own = quantizers[number]
            quantized = own.weight(weight[number], transpose=False, records=records, scale=None)
            plain, _ = own.matrix("input", _padded(rows, _MULTIPLE), transpose=False, records=records)
            into.copy_(scaled_product(plain, quantized, x.dtype, library=library)[: len(rows)])
            if bias is not None and adds_bias:
                into += bias[number]
            # The backward pass requantizes with the same scale, if there is one scale per tensor.
            ctx.scales.append((plain.scale, quantized.scale) if plain.blocks == WHOLE else (None, None))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        counts, library = ctx.counts, ctx.product_library
        quantizers: Sequence[Fp8Quantizers] = ctx.quantizers
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        in_fp8 = needs_weight_grad and quantizers[0].recipe.has_weight_gradients
        x_grad = grad.new_empty(len(grad), weight.shape[2]) if needs_x_grad else None
        operands: _Operands = []
        multiple = _summed_multiple(quantizers[0].recipe.blocks, grad.device.type) if in_fp8 else _MULTIPLE
        start = 0
        for number, rows in enumerate(grad.split_with_sizes(counts)):
            end = start + len(rows)
            if not len(rows):
                operands.append(None)
                continue
            own, (x_scale, weight_scale) = quantizers[number], ctx.scales[number]
            plain, turned = own.matrix("grad", _padded(rows, multiple), transpose=in_fp8, records=ctx.records)
            if x_grad is not None:
                quantized = own.weight(weight[number], transpose=True, records=False, scale=weight_scale)
                few = plain.first_rows(len(rows) + -len(rows) % _MULTIPLE)
                x_grad[start:end] = scaled_product(few, quantized, grad.dtype, library=library)[: len(rows)]
            if turned is not None:
                operands.append((turned, own.input_again(_padded(x[start:end], multiple), x_scale, True, None)))
            start = end
        weight_grad = None
        if in_fp8 and ctx.main_grad is not None:
            ctx.main_grad.add_computed(
                partial(_products, operands, weight.shape, ctx.main_grad.tensor.dtype, weight.device, library)
            )
        elif in_fp8:
            weight_grad = _products(operands, weight.shape, weight.dtype, weight.device, library)
        elif needs_weight_grad and ctx.main_grad is not None:
            ctx.main_grad.add_grouped_matmul(grad, x, counts, library)
        elif needs_weight_grad:
            weight_grad = grouped_gradient(grad, x, counts, library)
        bias_grad = None
        if needs_bias_grad:
            bias_grad = torch.stack([rows.sum(dim=0) for rows in grad.split_with_sizes(counts)])
        return x_grad, weight_grad, bias_grad, *(None,) * 5


def float8_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[int],
    quantizers: Sequence[Fp8Quantizers],
    *,
    adds_bias: bool,
    library: str,
) -> torch.Tensor:
    """Compute `grouped_linear` with all three GEMMs of each group in FP8.

    Each group has its own ``quantizers``. The backward pass saves the unquantized input.

    Shapes: as those of `grouped_linear`.
    """
    arguments = (x, weight, bias, row_counts(counts), adds_bias, library, quantizers, torch.is_grad_enabled())
    result: torch.Tensor = _Float8GroupedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _summed_multiple(blocks: Blocks, device: str) -> int:
    """Return the multiple of rows that the weight gradient's GEMM requires."""
    takes_blocks = device == "cuda" and has_scaled_products(blocks, blocks, device)
    return max(_MULTIPLE, blocks.columns) if takes_blocks else _MULTIPLE


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _products(
    operands: _Operands, shape: torch.Size, dtype: torch.dtype, device: torch.device, library: str
) -> torch.Tensor:
    """Return the gradient of all weights; the gradient of an expert without rows is zero."""
    total = torch.zeros(shape, dtype=dtype, device=device)
    for into, pair in zip(total, operands):
        if pair is not None:
            into.copy_(scaled_product(*pair, dtype, library=library))
    return total


class GroupedLinear(nn.Module):
    """One weight per expert of this rank, sharded along ``cut_dim`` (1: out, 2: in) over expert tensor parallelism.

    ``num_stacked`` is the number of equal tensors fused in the output features, each of which is sharded separately.
    With sharded input features the result is a partial sum, to which the first rank of the group adds the bias.

    Shapes: ``[n, in] -> [n, out]``, rows sorted by expert; a sharded feature dim is this rank's shard.
    """

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        groups: ExpertGroups,
        *,
        cut_dim: int,
        num_stacked: int = 1,
        has_bias: bool,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device | str,
        library: str,
    ) -> None:
        super().__init__()
        self.product_library, self.cut_dim = library, cut_dim
        self.quantizers: tuple[Fp8Quantizers, ...] | None = None
        """One per expert of this rank, in order, if GEMMs run in FP8; else None."""
        num_local = num_experts // groups.size
        self.expert_numbers = range(groups.rank * num_local, (groups.rank + 1) * num_local)
        """Global numbers of this rank's experts."""
        self.adds_bias = cut_dim == 1 or groups.tensor_rank == 0
        whole = (num_experts, *shape)
        local = [num_local, *shape]
        local[cut_dim] //= groups.tensor_size
        spec = ParamSpec(
            "weight",
            whole,
            expert_shards(whole, groups, cut_dim, num_stacked),
            init_std=init_std,
            fused_rows=(shape[0] // num_stacked,) * num_stacked if num_stacked > 1 else (),
            is_expert=True,
        )
        self.weight = make_parameter(tuple(local), spec, dtype, device)
        self.bias: nn.Parameter | None = None
        if has_bias:
            is_cut = cut_dim == 1
            bias_spec = ParamSpec(
                "bias",
                whole[:2],
                expert_shards(whole[:2], groups, 1 if is_cut else None, num_stacked),
                replica_index=0 if is_cut else groups.tensor_rank,
                num_replicas=1 if is_cut else groups.tensor_size,
                is_expert=True,
            )
            self.bias = make_parameter(tuple(local[:2]), bias_spec, dtype, device)

    def takes_row_ends(self, x: torch.Tensor) -> bool:
        """Return whether `forward` supports `RowEnds` for rows like ``x``.

        Biases, adapters and most FP8 recipes process one expert at a time, so the host must know its rows.
        """
        if self.quantizers is not None:
            return self.takes_scaled_groups(x)
        is_plain = self.bias is None and not any(self.children())
        return is_plain and has_grouped_kernel(x, *self.weight.shape[1:])

    def takes_scaled_groups(self, x: torch.Tensor) -> bool:
        """Return whether `float8_experts` supports this layer for rows like ``x``."""
        if self.quantizers is None or self.bias is not None or any(self.children()):
            return False
        recipe = self.quantizers[0].recipe
        has_scales = recipe.blocks == ROWS and recipe.has_weight_gradients and recipe.dtype("grad") is E4M3
        return has_scales and len(x) > 0 and has_scaled_groups(x, *self.weight.shape[1:])

    def forward(
        self,
        x: torch.Tensor,
        counts: Groups,
        *,
        late: list[Callable[[], None]] | None = None,
        gives_weights: bool = False,
    ) -> torch.Tensor | ExpertWeights:
        """Apply each expert's weight to its rows; ``counts`` are the rows per expert of this rank.

        With ``gives_weights`` return the weights for `float8_experts` instead, if `takes_scaled_groups`. The call makes
        sure that they are all-gathered.
        """
        if gives_weights:
            assert self.quantizers is not None
            return ExpertWeights(self.weight, self.quantizers[0])
        if self.quantizers is not None:
            assert not isinstance(counts, RowEnds), "FP8 reads the counts"
            return float8_grouped_linear(
                x,
                self.weight,
                self.bias,
                counts,
                self.quantizers,
                adds_bias=self.adds_bias,
                library=self.product_library,
            )
        return grouped_linear(
            x, self.weight, self.bias, counts, adds_bias=self.adds_bias, library=self.product_library, late=late
        )


class GroupedExperts(nn.Module):
    """Feed-forward layers ``h -> ffn -> h`` of this rank's experts, or its shards of them.

    With ``moe_latent_size`` that width replaces the hidden size h.

    Shapes: ``[n, h] -> [n, h]``, rows sorted by expert. If experts are sharded, results are partial sums.
    """

    def __init__(self, config: DecoderConfig, groups: ExpertGroups, device: torch.device | str) -> None:
        super().__init__()
        assert config.moe.num_experts is not None
        num_stacked = 2 if config.is_gated else 1
        dtype = dtype_from_name(config.params_dtype)
        self.activation = activation_of(config)
        self.recomputes_activation = "moe_act" in config.recomputed_modules
        self.linear_fc1 = GroupedLinear(
            config.moe.num_experts,
            (config.moe.moe_ffn_hidden_size * num_stacked, config.expert_input_size),
            groups,
            cut_dim=1,
            num_stacked=num_stacked,
            has_bias=config.add_bias_linear,
            init_std=config.init_method_std,
            dtype=dtype,
            device=device,
            library=config.cpu_gemm_backend,
        )
        self.linear_fc2 = GroupedLinear(
            config.moe.num_experts,
            (config.expert_input_size, config.moe.moe_ffn_hidden_size),
            groups,
            cut_dim=2,
            has_bias=config.add_bias_linear,
            init_std=config.output_init_method_std,
            dtype=dtype,
            device=device,
            library=config.cpu_gemm_backend,
        )

    def takes_row_ends(self, x: torch.Tensor) -> bool:
        """Return whether `forward` supports `RowEnds` for rows like ``x``."""
        return len(x) > 0 and all(linear.takes_row_ends(x) for linear in (self.linear_fc1, self.linear_fc2))

    def forward(
        self,
        x: torch.Tensor,
        counts: Groups,
        order: RowOrder | None = None,
        weights: torch.Tensor | None = None,
        *,
        late: LateGradients | None = None,
    ) -> torch.Tensor:
        """Return the experts' outputs; ``counts`` are the rows per expert.

        ``order`` and ``weights`` as in `run_in_order`: in FP8 the rows are quantized, and the results read, in this
        order without a copy. Weight gradients are deferred to ``late``, if it is given, for the part of the backward
        pass before ``x``.
        """
        late = late if x.requires_grad else None
        num_rows = len(x) if order is None else len(order.choices)
        if not num_rows or not all(linear.takes_scaled_groups(x) for linear in (self.linear_fc1, self.linear_fc2)):
            return run_in_order(lambda rows: self._feed_forward(rows, counts, late), x, order, weights)
        padded = PaddedGroups.of(counts, num_rows, x.device, order)
        first, second = (linear(x, counts, gives_weights=True) for linear in (self.linear_fc1, self.linear_fc2))
        result: torch.Tensor = float8_experts(x, first, second, self.activation, padded, weights, late=late)
        return result

    def _feed_forward(self, x: torch.Tensor, counts: Groups, late: LateGradients | None) -> torch.Tensor:
        inner = self.linear_fc1(x, counts, late=late)
        activated = self.activation(inner)
        is_again = self.recomputes_activation and self.training
        with saved_as_inputs(activated, self.activation, inner) if is_again else nullcontext():
            output: torch.Tensor = self.linear_fc2(activated, counts, late=late)
        return output


def expert_shards(
    shape: tuple[int, ...], groups: ExpertGroups, cut_dim: int | None, num_stacked: int
) -> tuple[Shard, ...]:
    """Return the shards of a tensor ``[experts, ...]`` that an expert-parallel rank holds.

    The sharded dim fuses ``num_stacked`` equal tensors, each split evenly over the expert tensor-parallel ranks.
    """
    num_local = shape[0] // groups.size
    offset, local_offset, shard = [0] * len(shape), [0] * len(shape), [num_local, *shape[1:]]
    offset[0] = groups.rank * num_local
    if cut_dim is None:
        return (Shard(Box(tuple(offset), tuple(shard)), tuple(local_offset)),)
    part = shape[cut_dim] // num_stacked
    length = shard[cut_dim] = part // groups.tensor_size
    shards = []
    for number in range(num_stacked):
        offset[cut_dim] = number * part + groups.tensor_rank * length
        local_offset[cut_dim] = number * length
        shards.append(Shard(Box(tuple(offset), tuple(shard)), tuple(local_offset)))
    return tuple(shards)
