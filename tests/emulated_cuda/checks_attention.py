"""Checks of attention for which only CUDA has kernels: values, dropout, and each rule of ``attention_rules.cpp``.

They run in a process whose torch has emulated devices: see ``tests/unit/emulated_cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.ops.attention_block import AttentionBlocks, BlockMask, merge_block
from megatron.core.ops.flash_implementation import FlashShape, activate_flash_implementation
from tests.emulated_cuda.activation import load_bindings
from tests.unit.core.ops.flash_implementation_stand_in import CALLS, Registered

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def is_without_reports() -> Iterator[None]:
    """Let no check leave a report behind."""
    yield
    torch.cuda.synchronize()
    assert load_bindings().reports() == []


def heads(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def step_by_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of ``[b, heads, s, d]`` on the CPU in float64."""
    query, key, value = (tensor.detach().cpu().double() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num() @ value


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_by_sdpa(backend: SDPBackend, is_causal: bool, key_heads: int) -> None:
    query, key, value = heads(2, 4, 24, 16), heads(2, key_heads, 24, 16), heads(2, key_heads, 24, 16)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=key_heads != 4)
    visible = torch.ones(24, 24, dtype=torch.bool).tril() if is_causal else None
    close(output, step_by_step(query, key, value, visible))
    output.float().square().sum().backward()
    twins = [tensor.detach().cpu().double().requires_grad_() for tensor in (query, key, value)]
    groups = 4 // key_heads
    spread = [twins[0], *(twin.repeat_interleave(groups, dim=1) for twin in twins[1:])]
    F.scaled_dot_product_attention(*spread, is_causal=is_causal).square().sum().backward()
    for tensor, twin in zip((query, key, value), twins):
        assert tensor.grad is not None
        assert twin.grad is not None
        torch.testing.assert_close(tensor.grad.cpu().double(), twin.grad, rtol=5e-2, atol=1e-1)
    # The kernel writes [b, s, heads, d].
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("window", [None, 5])
def test_the_flash_kernel_counts_from_the_last_key(window: int | None) -> None:
    query, key, value = heads(1, 8, 2, 16), heads(1, 24, 2, 16), heads(1, 24, 2, 16)
    left = -1 if window is None else window - 1
    output, row_sums, state, _, _ = aten._flash_attention_forward(
        *(query, key, value, None, None, 8, 24, 0.0, True, False), window_size_left=left, window_size_right=0
    )
    visible = torch.ones(8, 24, dtype=torch.bool).tril(16)
    if window is not None:
        visible &= torch.ones(8, 24, dtype=torch.bool).triu(16 - left)
    close(output.transpose(1, 2), step_by_step(*(t.transpose(1, 2) for t in (query, key, value)), visible))
    assert row_sums.shape == (1, 2, 8)
    assert row_sums.dtype is torch.float32
    grads = aten._flash_attention_backward(
        *(torch.ones_like(output), query, key, value, output, row_sums, None, None, 8, 24, 0.0, True, state, state),
        window_size_left=left,
        window_size_right=0,
    )
    # The weights of a query sum to 1, and so do the gradients of the values that it sees.
    torch.testing.assert_close(grads[2].float().sum(1), torch.full((1, 2, 16), 8.0, device="cuda"), rtol=2e-2, atol=0)


def test_a_query_that_sees_no_key() -> None:
    query, key, value = heads(1, 8, 2, 16), heads(1, 4, 2, 16), heads(1, 4, 2, 16)
    output, row_sums, *_ = aten._flash_attention_forward(query, key, value, None, None, 8, 4, 0.0, True, False)
    assert output[:, :4].eq(0).all()
    # flash_attn/src/softmax.h, normalize_softmax_lse
    assert row_sums[:, :, :4].isposinf().all()
    assert row_sums[:, :, 4:].isfinite().all()


class RegisteredForCuda(Registered):
    dispatch_key = "CUDA"


def test_blocks_of_a_ring_on_an_implementation_in_torchs_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention._registry, "_FLASH_ATTENTION_IMPLS", {"FA4": RegisteredForCuda})
    query, key, value, grad = heads(2, 4, 24, 16), heads(2, 2, 48, 16), heads(2, 2, 48, 16), heads(2, 4, 24, 16)
    activate_flash_implementation("fa4", "cuda", FlashShape(torch.bfloat16, 16, 16))
    CALLS.clear()
    try:
        # The queries are the last 24 positions: one block of earlier keys, and one of their own.
        blocks = AttentionBlocks()
        parts = ((slice(24, 48), BlockMask(is_causal=True)), (slice(0, 24), BlockMask()))
        output, logsumexp = None, torch.empty(0)
        for keys, mask in parts:
            block = blocks.forward(query, key[:, :, keys], value[:, :, keys], mask)
            if output is None:
                output, logsumexp = block[0].float(), block[1].clone()
            else:
                merge_block(output, logsumexp, *block)
        assert output is not None
        whole = output.bfloat16()
        grads = [
            blocks.backward(grad, query, key[:, :, keys], value[:, :, keys], whole, logsumexp, mask)
            for keys, mask in parts
        ]
    finally:
        activate_flash_implementation("auto", "cuda", FlashShape(torch.bfloat16, 16, 16))
    assert [name for name, *_ in CALLS] == ["forward"] * 2 + ["backward"] * 2
    twins = [tensor.detach().cpu().double().requires_grad_() for tensor in (query, key, value)]
    spread = [twins[0], *(twin.repeat_interleave(2, dim=1) for twin in twins[1:])]
    visible = torch.ones(24, 48, dtype=torch.bool).tril(24)
    exact = F.scaled_dot_product_attention(*spread, attn_mask=visible)
    close(output, exact.detach())
    exact.backward(grad.cpu().double())
    expected = [twin.grad for twin in twins]
    assert expected[0] is not None
    torch.testing.assert_close((grads[0][0] + grads[1][0]).cpu().double(), expected[0], rtol=5e-2, atol=5e-2)
    for number, wanted in enumerate(expected[1:], 1):
        assert wanted is not None
        actual = torch.cat((grads[1][number], grads[0][number]), dim=2)
        torch.testing.assert_close(actual.cpu().double(), wanted, rtol=5e-2, atol=5e-2)


def test_backward_drops_what_forward_dropped() -> None:
    query, key = heads(1, 2, 16, 16), heads(1, 2, 16, 16)
    value = torch.eye(16, device="cuda").bfloat16().expand(1, 2, 16, 16).contiguous().requires_grad_()
    torch.cuda.manual_seed(3)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        weights = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert 0.2 < weights.eq(0).float().mean() < 0.8
    weights.sum().backward()
    assert value.grad is not None
    expected = weights.detach().float().sum(dim=2)[..., None].expand(1, 2, 16, 16)
    torch.testing.assert_close(value.grad.float(), expected, rtol=2e-2, atol=2e-2)
    torch.cuda.manual_seed(3)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5), weights)


def test_attention_with_a_bias() -> None:
    query, key, value = (heads(2, 2, 16, 8, dtype=torch.float32).requires_grad_() for _ in range(3))
    visible = torch.rand(16, 16) < 0.7
    visible.fill_diagonal_(True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible.cuda())
    torch.testing.assert_close(
        output.detach().cpu().double(), step_by_step(query, key, value, visible), rtol=1e-5, atol=1e-5
    )
    output.sum().backward()
    assert query.grad is not None
    bias = torch.zeros(2, 2, 16, 16, device="cuda", requires_grad=True)
    F.scaled_dot_product_attention(query.detach(), key, value, attn_mask=bias)[..., 0].sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad.sum(-1), torch.zeros(2, 2, 16, device="cuda"), rtol=0, atol=1e-5)


def chosen(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> SDPBackend:
    tensors = [heads(*shape, dtype=dtype) for shape in (shapes * 3)[:3]]
    return SDPBackend(torch._fused_sdp_choice(*tensors, **options))


def test_which_kernel_sdpa_takes() -> None:
    flash, efficient, math = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    mask = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    assert chosen((1, 2, 16, 64)) == flash
    assert chosen((1, 2, 16, 256)) == flash
    assert chosen((1, 2, 16, 264)) == efficient
    assert chosen((1, 2, 16, 64), dtype=torch.float32) == efficient
    assert chosen((1, 2, 16, 64), dtype=torch.float64) == math
    assert chosen((1, 2, 16, 64), attn_mask=mask) == efficient
    assert chosen((1, 2, 16, 6), dtype=torch.float32) == math
    assert chosen((1, 4, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64), enable_gqa=True) == flash
    assert chosen((1, 4, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64), enable_gqa=True, dtype=torch.float32) == math
    # Without dropout a causal rule of more keys than queries is another one for each kernel.
    assert chosen((1, 2, 16, 64), (1, 2, 24, 64), (1, 2, 24, 64), is_causal=True) == efficient


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0) -> object:
    return aten._flash_attention_forward(
        *(query, key, value, None, None, query.shape[1], key.shape[1], dropout, False, False)
    )


def efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None) -> object:
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
    return aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)


def triple(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return heads(*shape, dtype=dtype), heads(*shape, dtype=dtype), heads(*shape, dtype=dtype)


def misplaced() -> torch.Tensor:
    return heads(16 * 2 * 8 + 4).view(-1)[4:].view(1, 16, 2, 8)


Fault = tuple[Callable[[], object], str]
FAULTS: dict[str, Fault] = {
    "flash: dtype": (
        lambda: flash(*triple(1, 16, 2, 8, dtype=torch.float32)),
        "FlashAttention only support fp16 and bf16 data type",
    ),
    "flash: dtypes differ": (
        lambda: flash(heads(1, 16, 2, 8), heads(1, 16, 2, 8).half(), heads(1, 16, 2, 8)),
        "query and key must have the same dtype",
    ),
    "flash: width": (lambda: flash(*triple(1, 16, 2, 12)), "head_size that is a multiple of 8"),
    "flash: widest head": (lambda: flash(*triple(1, 16, 2, 264)), "head dimension at most 256"),
    "flash: last dimension": (
        lambda: flash(heads(1, 16, 2, 16)[..., ::2], heads(1, 16, 2, 8), heads(1, 16, 2, 8)),
        "Input tensor must have contiguous last dimension",
    ),
    "flash: heads": (
        lambda: flash(heads(1, 16, 4, 8), heads(1, 16, 3, 8), heads(1, 16, 3, 8)),
        "Number of heads in key/value must divide number of heads in query",
    ),
    "flash: values": (
        lambda: flash(heads(1, 16, 2, 16), heads(1, 16, 2, 16), heads(1, 16, 2, 8)),
        "v must have shape",
    ),
    "flash: place": (lambda: flash(misplaced(), heads(1, 16, 2, 8), heads(1, 16, 2, 8)), "misaligned address"),
    "flash: rows": (
        lambda: flash(heads(1, 16, 2, 12)[..., :8], heads(1, 16, 2, 8), heads(1, 16, 2, 8)),
        "misaligned address",
    ),
    "flash: device": (
        lambda: flash(heads(1, 16, 2, 8), heads(1, 16, 2, 8).cpu(), heads(1, 16, 2, 8)),
        "Expected all tensors to be on the same device",
    ),
    "flash: dropout": (lambda: flash(*triple(1, 16, 2, 8), dropout=1.0), "p_dropout"),
    "efficient: dtype": (
        lambda: efficient(*triple(1, 2, 16, 8, dtype=torch.float64)),
        "should be in kFloat, kHalf or kBFloat16",
    ),
    "efficient: width": (lambda: efficient(*triple(1, 2, 16, 12)), "last dimension of inputs to be divisible by 8"),
    "efficient: groups": (
        lambda: efficient(heads(1, 4, 16, 8), heads(1, 2, 16, 8), heads(1, 2, 16, 8)),
        "takes no groups of heads",
    ),
    "efficient: place": (
        lambda: efficient(misplaced().transpose(1, 2), heads(1, 2, 16, 8), heads(1, 2, 16, 8)),
        "query is not correctly aligned",
    ),
    "efficient: rows of the bias": (
        lambda: efficient(*triple(1, 2, 15, 8), heads(1, 2, 15, 15)),
        "attn_bias is not correctly aligned",
    ),
    "efficient: dtype of the bias": (
        lambda: efficient(*triple(1, 2, 16, 8), heads(1, 2, 16, 16).float()),
        "invalid dtype for bias",
    ),
    "cuDNN: widest head": (lambda: cudnn(*triple(1, 2, 16, 136)), "heads of at most 128"),
    "cuDNN: dtype": (lambda: cudnn(*triple(1, 2, 16, 64, dtype=torch.float32)), "takes float16 and bfloat16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rules_of_attention(fault: str) -> None:
    run, message = FAULTS[fault]
    with pytest.raises(RuntimeError, match=message):
        run()


def test_rules_of_the_flash_kernels_backward() -> None:
    query, key, value = triple(1, 16, 2, 8)
    output, row_sums, state, *_ = aten._flash_attention_forward(
        *(query, key, value, None, None, 16, 16, 0.0, True, False)
    )

    def backward(grad: torch.Tensor, row_sums: torch.Tensor) -> object:
        return aten._flash_attention_backward(
            *(grad, query, key, value, output, row_sums, None, None, 16, 16, 0.0, True, state, state)
        )

    with pytest.raises(RuntimeError, match="query and dout must have the same dtype"):
        backward(output.float(), row_sums)
    with pytest.raises(RuntimeError, match="softmax_lse must be a contiguous tensor of float32"):
        backward(output, row_sums.transpose(1, 2).contiguous().transpose(1, 2))


def test_a_graph_with_attention_draws_new_dropout_at_each_replay() -> None:
    query, key, value = triple(1, 2, 16, 8)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(output, first)


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = (heads(1, 2, 128, 16, dtype=torch.float32).requires_grad_() for _ in range(3))
    documents = torch.arange(128, device="cuda") // 50

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (documents[q] == documents[k])

    mask = create_block_mask(rule, 1, None, 128, 128, device="cuda")
    output = torch.compile(flex_attention, fullgraph=True)(query, key, value, block_mask=mask)
    ids = documents.cpu()
    visible = torch.ones(128, 128, dtype=torch.bool).tril() & (ids[:, None] == ids)
    expected = step_by_step(query, key, value, visible)
    torch.testing.assert_close(output.detach().cpu().double(), expected, rtol=1e-5, atol=1e-5)
    output.sum().backward()
    assert query.grad is not None
    with pytest.raises(NotImplementedError, match="at least 16 but got E=8 and Ev=8"):
        flex_attention(*triple(1, 2, 128, 8))
    with pytest.raises(ValueError, match=r"mixed query, key, and value dtype|same dtype"):
        flex_attention(query, key.bfloat16(), value)
    with pytest.raises(AssertionError, match="Query length must be greater than 0"):
        flex_attention(heads(1, 2, 0, 16), heads(1, 2, 16, 16), heads(1, 2, 16, 16))
    blocks = create_block_mask(rule, 1, None, 120, 120, device="cuda", BLOCK_SIZE=8)
    with pytest.raises(ValueError, match="must be divisible by BLOCK_M and BLOCK_N"):
        flex_attention(*triple(1, 2, 120, 16), block_mask=blocks)
