"""Part 4: the rate of each attention kernel, forward and backward, at 1k, 4k and 8k positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.ops.attention_backend import AttentionCall, select_attention_core
from megatron.core.ops.attention_block import AttentionBlocks, BlockMask
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionCore, AttentionInputs
from tests.gpu.window.clock import KernelClock
from tests.gpu.window.shapes import AttentionShape, attention_shapes
from tests.gpu.window.window import Unsupported, Window

Attend = Callable[..., torch.Tensor]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def run(window: Window) -> None:
    """Time the kernels."""
    clock = KernelClock(window.place, small=window.small)
    shapes = attention_shapes(small=window.small)
    calls = [
        (f"attention, {kind}, {shape.name}", shape, attend, has_sinks)
        for shape in shapes
        for kind, attend, has_sinks in _kinds(window, shape)
    ]
    for shape in shapes:
        name = f"attention block of a context-parallel ring, {shape.name}"
        if window.is_time_for(name):
            with window.attempt(name):
                _time_block(window, clock, name, shape)
    # FlexAttention is compiled, which takes long: it comes last.
    for name, shape, attend, has_sinks in sorted(calls, key=lambda call: "FlexAttention" in call[0]):
        if window.is_time_for(name):
            with window.attempt(name):
                _time(window, clock, name, shape, attend, has_sinks)


def _kinds(window: Window, shape: AttentionShape) -> Iterator[tuple[str, Attend, bool]]:
    """Yield each kind of attention with what computes it, and whether it has sinks."""
    causal = AttentionPattern()
    length = shape.length
    ids = (torch.arange(length, device=window.place) >= length // 2).long().expand(shape.batch, length)
    for name, backend in BACKENDS.items():
        yield f"{name} causal", partial(_by_backend, backend), False
    chosen = select_attention_core("auto", window.place)
    capped = select_attention_core("auto", window.place, 30.0)
    patterns = {
        "as chosen, causal": (chosen, causal, False),
        "as chosen, two documents": (chosen, AttentionPattern(document_ids=ids), False),
        "as chosen, window of a quarter": (chosen, AttentionPattern(window=length // 4), False),
        "as chosen, capped scores": (capped, causal, False),
        "as chosen, sinks": (chosen, causal, True),
    }
    for name, (core, pattern, has_sinks) in patterns.items():
        call = AttentionCall(
            *(torch.bfloat16, shape.head_size, length, length, pattern),
            has_groups=shape.groups != shape.heads,
            has_softcap=core is capped,
            has_sinks=has_sinks,
        )
        yield f"{name} ({core.choose(call).name})", partial(_by_core, core, pattern), has_sinks


def _by_core(
    core: AttentionCore, pattern: AttentionPattern, *heads: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return core(AttentionInputs(*heads, pattern, sinks=sinks))


def _by_backend(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            enable_gqa=key.shape[2] != query.shape[2],
        )
    return context.permute(2, 0, 1, 3)


def _inputs(window: Window, shape: AttentionShape) -> list[torch.Tensor]:
    generator = torch.Generator(window.place).manual_seed(6)
    return [
        torch.randn(
            (shape.length, shape.batch, heads, shape.head_size),
            generator=generator,
            device=window.place,
            dtype=torch.bfloat16,
        )
        for heads in (shape.heads, shape.groups, shape.groups)
    ]


def _time(
    window: Window, clock: KernelClock, name: str, shape: AttentionShape, attend: Attend, has_sinks: bool
) -> None:
    if window.is_emulated and "FlexAttention" in name:
        raise Unsupported("the emulator does not compile, which FlexAttention needs")
    leaves = [tensor.requires_grad_() for tensor in _inputs(window, shape)]
    if has_sinks:
        sinks = torch.zeros(shape.heads, device=window.place, dtype=torch.bfloat16).requires_grad_()
        attend = partial(attend, sinks=sinks)
        leaves.append(sinks)
    with torch.no_grad():
        milliseconds = clock.milliseconds(lambda: attend(*leaves[:3]))
    _write(window, f"{name}, forward", shape, milliseconds, 2)
    # A compiled backward pass frees its saved tensors. Each timed backward pass therefore has its own forward pass.
    results = [attend(*leaves[:3]) for _ in range(clock.num_calls)]
    grad = torch.randn_like(results[0])
    milliseconds = clock.milliseconds(lambda: torch.autograd.grad(results.pop(), leaves, grad))
    _write(window, f"{name}, backward", shape, milliseconds, 5)


def _time_block(window: Window, clock: KernelClock, name: str, shape: AttentionShape) -> None:
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in _inputs(window, shape))
    blocks, mask = AttentionBlocks(), BlockMask(is_causal=True)
    output, logsumexp = blocks.forward(query, key, value, mask)
    milliseconds = clock.milliseconds(lambda: blocks.forward(query, key, value, mask))
    _write(window, f"{name}, forward", shape, milliseconds, 2)
    grad = torch.randn_like(output)
    milliseconds = clock.milliseconds(lambda: blocks.backward(grad, query, key, value, output, logsumexp, mask))
    _write(window, f"{name}, backward", shape, milliseconds, 5)


def causal_flops(shape: AttentionShape, matmuls: int) -> float:
    """Return the FLOPs of some matmuls of queries and keys, masked scores left out."""
    return 2.0 * matmuls * shape.batch * shape.heads * shape.head_size * shape.length**2 / 2


def _write(window: Window, name: str, shape: AttentionShape, milliseconds: float, matmuls: int) -> None:
    """Write a time; the rate counts all causal scores, also if a window or documents hide some."""
    rate = causal_flops(shape, matmuls) / max(milliseconds, 1e-9) / 1e9
    window.value(name, milliseconds, "ms", key=_key(name), causal_tflops=rate)


def _key(name: str) -> str:
    """Return the name of the prediction: the kernel that was chosen is not part of it."""
    before, bracket, after = name.partition(" (")
    return before + after.partition(")")[2] if bracket else name
