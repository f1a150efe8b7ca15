"""Kernels of core/ops beside their plain twins: how far apart they are, and how long each takes.

A new kernel gets a line in ``kernel_pairs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron.cli.doctor.benchmarks import time_work
from megatron.core.device import Device
from megatron.core.ops.attention_backend import load_flash_attention, select_attention_core
from megatron.core.ops.attention_block import AttentionBlocks, BlockMask
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, fused_attention, plain_attention
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples, drop_hidden, keyed_dropout
from megatron.core.ops.fp8_groups import (
    GRAIN,
    PaddedGroups,
    QuantizedGroups,
    quantize_activated,
    quantize_activation_gradient,
)
from megatron.core.ops.fp8_tensor import E4M3, E5M2, quantize_whole
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.gemm import linear, row_counts
from megatron.core.ops.gemm_activation import FusedActivation
from megatron.core.ops.linear_attention import gated_delta_rule, selective_scan
from megatron.core.ops.triton_support import casts_on_triton, runs_on_triton
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.cross_entropy import vocab_sharded_cross_entropy
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.sharded_layers import tensor_parallel_linear, tensor_parallel_linear_with_activation
from megatron.core.transformer.mamba_mixer import GatedNorm
from megatron.core.transformer.mlp import ACTIVATIONS
from megatron.core.transformer.norm import ResidualNorm
from megatron.core.transformer.rotary_pos_embedding import (
    RotaryAngles,
    apply_rotary,
    split_and_rotate,
    split_projection,
)

ALLOWED = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative difference, in the norm of the whole tensor, of a result or a gradient from that of the twin."""

Kernel = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class KernelPair:
    """Name a kernel, its twin, and the shapes of what both take.

    Without ``has_gradient`` it is called outside autograd, by what computes the gradient itself.
    """

    name: str
    kernel: Kernel
    twin: Kernel
    shapes: tuple[tuple[int, ...], ...]
    has_gradient: bool = True


@dataclass(frozen=True)
class KernelSizes:
    """Hold the sizes that attention and products are compared at."""

    length: int = 2048
    batch: int = 2
    heads: int = 16
    groups: int = 4
    head_size: int = 128


def kernel_pairs(device: Device, dtype: torch.dtype, sizes: KernelSizes) -> Iterator[KernelPair]:
    """Yield the pairs that this device has in this number format."""
    length, batch, heads, groups, width = sizes.length, sizes.batch, sizes.heads, sizes.groups, sizes.head_size
    shapes = ((length, batch, heads, width), (length, batch, groups, width), (length, batch, groups, width))
    causal = AttentionPattern()
    is_second = torch.arange(length, device=device.torch_device) >= length // 3
    packed = AttentionPattern(document_ids=is_second.long().expand(batch, length))

    def attention(core: Kernel, pattern: AttentionPattern) -> Kernel:
        return lambda query, key, value: core(AttentionInputs(query, key, value, pattern))

    for name, pattern in (("causal", causal), ("documents", packed)):
        plain = attention(plain_attention, pattern)
        yield KernelPair(f"fused attention, {name}", attention(fused_attention, pattern), plain, shapes)
    chosen = select_attention_core("auto", device.torch_device)
    for name, pattern in (("causal", causal), ("documents", packed), ("window", AttentionPattern(window=length // 4))):
        plain = attention(plain_attention, pattern)
        yield KernelPair(f"attention as chosen, {name}", attention(chosen, pattern), plain, shapes)
    capped = select_attention_core("auto", device.torch_device, 30.0)
    yield KernelPair(
        "attention as chosen, capped scores",
        attention(capped, causal),
        attention(partial(plain_attention, softcap=30.0), causal),
        shapes,
    )
    if device.is_cuda and dtype is not torch.float32 and load_flash_attention() is not None:
        flash = attention(select_attention_core("flash", "cuda"), causal)
        yield KernelPair("flash-attn, causal", flash, attention(plain_attention, causal), shapes)
    yield from _layer_pairs(device, sizes)

    def block(blocks: AttentionBlocks) -> Kernel:
        mask = BlockMask(is_causal=True)
        return lambda query, key, value: blocks.forward(query, key, value, mask)[0]

    by_heads = tuple((b, n, s, d) for s, b, n, d in shapes)
    yield KernelPair(
        "attention block, causal", block(AttentionBlocks()), block(AttentionBlocks(plain=True)), by_heads, False
    )
    features = heads * width
    linear_shapes = ((length, batch, features), (features // 2, features), (features // 2,))
    yield KernelPair("linear map", linear, lambda x, weight, bias: x @ weight.t() + bias, linear_shapes, False)


def _layer_pairs(device: Device, sizes: KernelSizes) -> Iterator[KernelPair]:
    """Yield what Triton computes where it is found, beside the same in single operations of torch."""
    length, batch, heads, groups, width = sizes.length, sizes.batch, sizes.heads, sizes.groups, sizes.head_size
    hidden, place = (length, batch, heads * width), device.torch_device
    for kind, gate in (("swiglu", F.silu), ("geglu", partial(F.gelu, approximate="tanh"))):

        def twin(x: torch.Tensor, gate: Kernel = gate) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return gate(first) * second

        yield KernelPair(kind, partial(gated_activation, kind=kind), twin, (hidden,))
    # One that is not fused writes the activation, or the gradient, before it is quantized: the numbers are the same.
    rows = (length * batch, hidden[-1])
    yield KernelPair("swiglu in FP8", swiglu_in_float8, partial(swiglu_in_float8, fuses=False), (rows,), False)
    shapes = rows, (rows[0], rows[1] // 2)
    yield KernelPair(
        "gradient of swiglu in FP8",
        swiglu_gradient_in_float8,
        partial(swiglu_gradient_in_float8, fuses=False),
        shapes,
        False,
    )
    if casts_on_triton(torch.empty(1, dtype=torch.bfloat16, device=place)):
        yield KernelPair(
            "swiglu and its gradient in FP8 with one scale",
            swiglu_with_one_scale,
            partial(swiglu_with_one_scale, fuses=False),
            shapes,
            False,
        )
    yield KernelPair(
        "weighted rows in FP8",
        weighted_in_float8,
        partial(weighted_in_float8, fuses=False),
        (rows, (rows[0], 1)),
        False,
    )
    half = torch.arange(length, device=place)[:, None, None, None] / 1e4 ** torch.linspace(
        0, 1, width // 2, device=place
    )
    turns = torch.cat((half, half), dim=-1)
    angles = RotaryAngles(turns.cos(), turns.sin(), interleaved=False)
    mixed = (length, batch, groups, heads // groups + 2, width)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(split_and_rotate(x, angles), dim=2)

    def rotated_apart(x: torch.Tensor) -> torch.Tensor:
        query, key, value = split_projection(x)
        return torch.cat((apply_rotary(query, angles), apply_rotary(key, angles), value), dim=2)

    yield KernelPair("projection cut and rotated", rotated, rotated_apart, (mixed,))

    def cut(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not runs_on_triton(x, bias):
            return cut_apart(x, bias)
        return torch.cat(split_projection(x + bias.detach().view(mixed[2:]), bias), dim=2)

    def cut_apart(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.cat(split_projection(x + bias.view(mixed[2:])), dim=2)

    yield KernelPair("projection with a bias cut", cut, cut_apart, (mixed, (prod(mixed[2:]),)))
    gelu = partial(F.gelu, approximate="tanh")

    def activated(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not runs_on_triton(x, bias):
            return gelu(x + bias)
        from megatron.core.ops.triton.activation import activate_with_bias

        return activate_with_bias(x + bias.detach(), bias, gelu, "gelu_tanh")

    yield KernelPair("gelu behind a bias", activated, lambda x, bias: gelu(x + bias), (hidden, hidden[-1:]))
    width_inside, features = 4 * hidden[-1], hidden[-1]
    layer = (hidden, (width_inside, features), (width_inside,), (features, width_inside))
    for kind, function in ACTIVATIONS.items():
        if kind == "relu":
            continue
        yield KernelPair(
            f"GEMMs with {kind}",
            partial(fed_forward, FusedActivation(function, kind, sums_rows=True)),
            lambda x, first, bias, second, function=function: F.linear(function(F.linear(x, first, bias)), second),
            layer,
        )
    samples = DropoutSamples.at(1, 0, 0, batch, place)
    keys = DropoutKeys(samples, torch.arange(length, device=place), slice(None), range(1)).after_attention(0)
    yield KernelPair(
        "dropout added to a stream",
        lambda x, branch: drop_hidden(branch, keys, 0.1, x),
        lambda x, branch: x + keyed_dropout(branch, keys, 0.1),
        (hidden, hidden),
    )
    by_head, by_group = (batch, length, heads, width), (batch, length, groups, width)
    # In float64 torch computes both.
    wide = torch.float64
    of_scan = (by_head, by_head[:3], by_group, by_group, by_head[2:3])
    starts = (torch.arange(length, device=place) % (length // 3) == 2).expand(batch, length)
    state = (batch, heads, width, width)
    yield KernelPair("scan", scan, partial(scan, dtype=wide), of_scan)
    packed_scan = partial(scan, starts=starts)
    yield KernelPair("scan of documents", packed_scan, partial(packed_scan, dtype=wide), (*of_scan, state))
    inner = (batch, length, heads * width)
    yield KernelPair("gated norm", gated_norm, partial(gated_norm, dtype=wide), (inner, inner))
    for kind in ("LayerNorm", "RMSNorm"):

        def added(x: torch.Tensor, branch: torch.Tensor, kind: str = kind) -> torch.Tensor:
            norm = ResidualNorm(
                *(kind, hidden[-1], 1e-5, single_rank_group()),
                partial_gradient=False,
                centered_weight=False,
                dtype=x.dtype,
                device=place,
            )
            for parameter, value in ((norm.weight, 1.0), (norm.bias, 0.0)):
                if parameter is not None:
                    torch.nn.init.constant_(parameter, value)
            return torch.cat(norm(x, branch, keys, 0.1))

        def added_apart(x: torch.Tensor, branch: torch.Tensor, kind: str = kind) -> torch.Tensor:
            total = x + keyed_dropout(branch, keys, 0.1)
            normalize = F.layer_norm if kind == "LayerNorm" else F.rms_norm
            return torch.cat((total, normalize(total, hidden[-1:], eps=1e-5)))

        yield KernelPair(f"dropout, sum and {kind}", added, added_apart, (hidden, hidden))
    labels = torch.arange(length * batch, device=place).view(length, batch) % (4 * width)
    yield KernelPair(
        "cross-entropy",
        # The kernel overwrites its logits with their gradient.
        lambda x: vocab_sharded_cross_entropy(x * 1, labels, 4 * width, single_rank_group()),
        lambda x: F.cross_entropy(x.float().flatten(0, 1), labels.flatten(), reduction="none").view(length, batch),
        ((length, batch, 4 * width),),
    )
    by_sequence = (batch, length, heads, width)
    for name, decays in (("gated delta rule", by_sequence[:3]), ("Kimi delta attention", by_sequence)):
        shapes = (by_sequence, by_sequence, by_sequence, decays, by_sequence[:3])
        # In float64 torch computes it.
        yield KernelPair(name, delta_rule, partial(delta_rule, dtype=wide), shapes)
        packed_rule = partial(delta_rule, starts=starts)
        yield KernelPair(f"{name} of documents", packed_rule, partial(packed_rule, dtype=wide), (*shapes, state))


def fed_forward(
    activation: FusedActivation, x: torch.Tensor, first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Return the output of a feed-forward layer whose GEMMs compute the activation."""
    tp = single_rank_group()
    inner, activated = tensor_parallel_linear_with_activation(x, first, bias, InputRegion.REPLICATED, tp, activation)
    return tensor_parallel_linear(activated, second, None, InputRegion.SPLIT, tp, inner=inner, activation=activation)


def swiglu_in_float8(x: torch.Tensor, *, fuses: bool = True) -> torch.Tensor:
    """Return SwiGLU in E4M3 with a scale per row, then its transpose, dequantized; without fusion it is written first.

    Shapes: ``[n, 2f] -> [2n, f]``.
    """
    groups, activation = _groups_of(x), partial(gated_activation, kind="swiglu")
    inner, parts = _padded(x, groups), {"plain": True, "transpose": True}
    if fuses:
        return _dequantized(groups, quantize_activated(inner, groups, activation, **parts))
    return _dequantized(groups, groups.quantize(activation(inner), **parts))


def swiglu_gradient_in_float8(x: torch.Tensor, grad: torch.Tensor, *, fuses: bool = True) -> torch.Tensor:
    """Return the gradient of SwiGLU's input like `swiglu_in_float8`. Shapes: ``[n, 2f], [n, f] -> [2n, 2f]``."""
    groups, activation = _groups_of(x), partial(gated_activation, kind="swiglu")
    inner, outer, parts = _padded(x, groups), _padded(grad, groups), {"plain": True, "transpose": True}
    if fuses:
        found, _ = quantize_activation_gradient(outer, inner, groups, activation, **parts, activated=True)
        return _dequantized(groups, found)
    with torch.enable_grad():
        leaf = inner.requires_grad_()
        (inner_grad,) = torch.autograd.grad(activation(leaf), leaf, outer)
    return _dequantized(groups, groups.quantize(inner_grad, **parts))


def swiglu_with_one_scale(x: torch.Tensor, grad: torch.Tensor, *, fuses: bool = True) -> torch.Tensor:
    """Return SwiGLU in E4M3, its transpose, the gradient of its input in E5M2, and its transpose, dequantized.

    Each has one scale, which is known before. Without fusion SwiGLU and the gradient are written first.

    Shapes: ``[n, 2f], [n, f] -> [n, 6f]``.
    """
    from megatron.core.ops.triton import cast_gated_gradient_with_scale, cast_gated_with_scale

    scale, grad_scale = (torch.full((1, 1), power, device=x.device) for power in (2.0**-4, 2.0**-12))
    if fuses:
        plain = cast_gated_with_scale(x, "swiglu", scale, None)
        of_grad, grad_turned, turned = cast_gated_gradient_with_scale(grad, x, "swiglu", E5M2, grad_scale, None, scale)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            activated = gated_activation(leaf, "swiglu")
            (x_grad,) = torch.autograd.grad(activated, leaf, grad)
        (plain, turned), (of_grad, grad_turned) = (
            (part.data for part in quantize_whole(matrix.detach(), dtype, by, None, transpose=True) if part is not None)
            for matrix, dtype, by in ((activated, E4M3, scale), (x_grad, E5M2, grad_scale))
        )
    matrices = (plain, scale), (turned.t(), scale), (of_grad, grad_scale), (grad_turned.t(), grad_scale)
    return torch.cat([data.float() * by for data, by in matrices], dim=1)


def weighted_in_float8(x: torch.Tensor, weights: torch.Tensor, *, fuses: bool = True) -> torch.Tensor:
    """Return weighted rows of tokens like `swiglu_in_float8`. Shapes: ``[n, m], [n, 1] -> [2n, m]``."""
    groups = _groups_of(x)
    if fuses:
        return _dequantized(groups, groups.quantize(x, is_padded=False, weights=weights, plain=True, transpose=True))
    return _dequantized(groups, groups.quantize(_padded(x * weights, groups), plain=True, transpose=True))


def _groups_of(x: torch.Tensor) -> PaddedGroups:
    """Return three groups of the rows, one of them empty, with padding."""
    few = len(x) // 3
    return PaddedGroups.of(row_counts((few, 0, len(x) - few)), len(x), x.device)


def _padded(x: torch.Tensor, groups: PaddedGroups) -> torch.Tensor:
    rows = x.new_full((len(groups.order.choices), x.shape[1]), torch.nan)
    return rows.index_copy(0, groups.order.slots.flatten(), x.detach())


def _dequantized(groups: PaddedGroups, found: QuantizedGroups) -> torch.Tensor:
    assert found.data is not None
    assert found.scale is not None
    assert found.turned is not None
    assert found.turned_scale is not None
    slots = groups.order.slots.flatten()
    group = groups.group_of.repeat_interleave(GRAIN)[slots].long()
    plain = found.data.float()[slots] * found.scale[slots, None]
    return torch.cat((plain, found.turned.float().t()[slots] * found.turned_scale[group]))


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the gated delta rule of normalized queries and keys, computed with inputs of a dtype.

    Documents begin at ``starts``, and ``state`` is the one before the first token.
    """
    q, k, log_decay = F.normalize(q, dim=-1), F.normalize(k, dim=-1), F.logsigmoid(decay.float())
    inputs = _of_dtype((q, k, v, log_decay, beta.sigmoid(), state), dtype)
    output, _ = gated_delta_rule(*inputs, starts)
    return output.to(v.dtype)


def _of_dtype(inputs: Sequence[torch.Tensor | None], dtype: torch.dtype | None) -> list[Any]:
    return [x if x is None or dtype is None else x.to(dtype) for x in inputs]


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return Mamba-2's selective scan, computed with inputs of a dtype; ``state`` and ``starts`` as in `delta_rule`."""
    inputs = x, F.softplus(dt.float() - 3.0), -torch.arange(1.0, 1.0 + len(D), device=D.device), B, C, D, state
    output, _ = selective_scan(*_of_dtype(inputs, dtype), starts)
    return output.to(x.dtype)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return Mamba-2's gated norm with one group and a weight of 1, computed with inputs of a dtype."""
    config: Any = SimpleNamespace(
        hybrid=SimpleNamespace(mamba_norm="after-gate", mamba_num_groups=1), norm_epsilon=1e-5
    )
    norm = GatedNorm(config, x.shape[-1], single_rank_group(), dtype or x.dtype, x.device)
    assert norm.weight is not None
    torch.nn.init.ones_(norm.weight)
    output: torch.Tensor = norm(*(each.to(dtype or x.dtype) for each in (x, gate)))
    return output.to(x.dtype)


def compare(pair: KernelPair, device: Device, dtype: torch.dtype, *, is_timed: bool = True) -> dict[str, Any]:
    """Return how far the results and the gradients of a pair are apart, and the milliseconds of both, as a row.

    Without ``is_timed`` there are no times: those of an interpreter or an emulator say nothing.
    """
    generator = torch.Generator().manual_seed(8)
    inputs = [torch.randn(shape, generator=generator).to(device.torch_device, dtype) for shape in pair.shapes]
    result, gradients = run_with_gradients(pair.kernel, inputs, pair.has_gradient)
    expected, wanted = run_with_gradients(pair.twin, inputs, pair.has_gradient)
    return {
        "name": f"{pair.name}, {str(dtype).removeprefix('torch.')}",
        "shapes": [list(shape) for shape in pair.shapes],
        "difference": _relative(result, expected),
        "gradient_difference": max((_relative(*both) for both in zip(gradients, wanted)), default=0.0),
        "allowed": ALLOWED[dtype],
        "kernel_ms": 1e3 * time_work(lambda: pair.kernel(*inputs), device) if is_timed else None,
        "twin_ms": 1e3 * time_work(lambda: pair.twin(*inputs), device) if is_timed else None,
    }


def compare_all(
    pairs: Iterable[KernelPair],
    device: Device,
    dtype: torch.dtype,
    add: Callable[[str, dict[str, Any]], None],
    *,
    is_timed: bool = True,
) -> dict[str, str]:
    """Compare pairs one by one, add a row of ``kernels`` or of ``errors`` for each, and return what is wrong by name.

    A pair that raises costs its own row and no other one.
    """
    wrong = {}
    for pair in pairs:
        name = f"{pair.name}, {str(dtype).removeprefix('torch.')}"
        try:
            row = compare(pair, device, dtype, is_timed=is_timed)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises belongs into the report
            wrong[name] = f"{type(error).__name__}: {error}"
            add("errors", {"name": name, "reason": wrong[name]})
            continue
        add("kernels", row)
        off = max(row["difference"], row["gradient_difference"])
        if not off <= row["allowed"]:
            wrong[name] = f"off by {off:.1e}, and {row['allowed']:.0e} is allowed"
    return wrong


def run_with_gradients(
    kernel: Kernel, inputs: list[torch.Tensor], has_gradient: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [tensor.clone().requires_grad_(has_gradient) for tensor in inputs]
    result = kernel(*leaves)
    if has_gradient:
        # A gradient that is the same everywhere would hide what only differs from place to place, and one whose sums
        # over tokens cancel would lose the digits that are compared.
        grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result.device, result.dtype)
        torch.autograd.backward(result, grad)
    return result.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float(((actual - expected).norm() / expected.norm()).item())
