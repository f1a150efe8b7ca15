"""Blocks of attention: kernels against the plain form, gradients against autograd, and merging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.ops import attention_block
from megatron.core.ops.attention_block import (
    MAX_SCORES,
    AttentionBlocks,
    BlockMask,
    merge_block,
    plain_block,
    plain_block_backward,
    takes_cudnn,
)
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.dropout import AttentionDropout, DropoutSamples

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 4, 8, 10


def make_tensors(groups: int, keys: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((HEADS, LENGTH), (groups, keys), (groups, keys), (HEADS, LENGTH))
    return [torch.randn(BATCH, h, s, HEAD_DIM, generator=generator, dtype=dtype) for h, s in shapes]


def weights_dropout(probability: float, iteration: int) -> AttentionDropout:
    states = DropoutSamples.at(12, iteration, 0, BATCH, "cpu").states
    return AttentionDropout(probability, states, torch.arange(LENGTH), range(HEADS), torch.arange(LENGTH))


def partly_blind(keys: int) -> torch.Tensor:
    """Return a mask in which some queries see nothing."""
    visible = torch.rand(BATCH, 1, LENGTH, keys, generator=torch.Generator().manual_seed(6)) > 0.4
    visible[0, 0, 2] = False
    visible[1] = False
    return visible


MASKS: dict[str, tuple[int, BlockMask]] = {
    "everything": (6, BlockMask()),
    "causal": (LENGTH, BlockMask(is_causal=True)),
    "partly-blind": (6, BlockMask(partly_blind(6))),
    "one-mask-for-all-sequences": (6, BlockMask(partly_blind(6)[:1])),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_kernels_equal_the_plain_form(name: str, groups: int) -> None:
    keys, mask = MASKS[name]
    query, key, value, grad = make_tensors(groups, keys)
    expected = plain_block(query, key, value, mask)
    output, logsumexp = AttentionBlocks().forward(query, key, value, mask)
    torch.testing.assert_close(output, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(logsumexp, expected[1], rtol=1e-12, atol=1e-13)
    # Rows that see nothing here see something elsewhere: their total is finite.
    total = torch.logaddexp(logsumexp, torch.full_like(logsumexp, 0.3))
    actual = AttentionBlocks().backward(grad, query, key, value, output, total, mask)
    wanted = plain_block_backward(grad, query, key, value, output, total, mask)
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("plain", [False, True])
def test_queries_that_see_nothing_give_zero_and_minus_infinity(plain: bool) -> None:
    query, key, value, _ = make_tensors(2, 6)
    output, logsumexp = AttentionBlocks(plain).forward(query, key, value, BlockMask(partly_blind(6)))
    assert not output[1].any()
    assert not output[0, :, 2].any()
    assert logsumexp[1].isneginf().all()
    assert logsumexp[0, :, 2].isneginf().all()
    assert logsumexp[2].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout": 0.3}])
@pytest.mark.parametrize("groups", [4, 2])
def test_plain_gradients_are_those_of_autograd(options: dict[str, Any], groups: int) -> None:
    dropout = weights_dropout(options["dropout"], LENGTH) if "dropout" in options else None
    mask = BlockMask(is_causal="is_causal" in options, dropout=dropout)
    query, key, value, grad = make_tensors(groups, LENGTH)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, logsumexp = plain_block(*leaves, mask)
    output.backward(grad)
    actual = plain_block_backward(grad, query, key, value, output.detach(), logsumexp.detach(), mask)
    for ours, leaf in zip(actual, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-11, atol=1e-13)


def test_dropout_keeps_the_mean_and_follows_its_keys() -> None:
    query, key, value, _ = make_tensors(4, LENGTH)
    exact, _ = plain_block(query, key, value, BlockMask())
    draws = [plain_block(query, key, value, BlockMask(dropout=weights_dropout(0.25, n)))[0] for n in range(400)]
    again, _ = AttentionBlocks().forward(query, key, value, BlockMask(dropout=weights_dropout(0.25, 7)))
    assert torch.equal(again, draws[7])
    assert not torch.equal(draws[7], draws[8])
    # The standard error of 400 draws: 0.05 of the spread of one.
    stacked = torch.stack(draws)
    error = (stacked.mean(dim=0) - exact).abs() / stacked.std(dim=0)
    assert error.max() < 0.05 * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [False, True])
def test_log_sum_exps_are_at_least_float32(dtype: torch.dtype, plain: bool) -> None:
    query, key, value, grad = make_tensors(2, LENGTH, dtype)
    output, logsumexp = AttentionBlocks(plain).forward(query, key, value, BlockMask())
    assert (output.dtype, logsumexp.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    grads = AttentionBlocks(plain).backward(grad, query, key, value, output, logsumexp, BlockMask())
    assert [tensor.dtype for tensor in grads] == [dtype] * 3


@pytest.mark.parametrize("splits", [(8,), (3, 5), (1, 6, 1)])
def test_merged_blocks_are_the_whole(splits: tuple[int, ...]) -> None:
    query, key, value, _ = make_tensors(2, LENGTH)
    visible = partly_blind(LENGTH)
    parts = zip(key.split(splits, 2), value.split(splits, 2), visible.split(splits, 3))
    blocks = [plain_block(query, k, v, BlockMask(mask)) for k, v, mask in parts]
    output, logsumexp = (tensor.clone() for tensor in blocks[0])
    for block in blocks[1:]:
        merge_block(output, logsumexp, *block)
    expected, total = plain_block(query, key, value, BlockMask(visible))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logsumexp, total, rtol=1e-12, atol=1e-14)
    assert not output.isnan().any()


CHUNKED = {**MASKS, "dropout": (LENGTH, BlockMask(dropout=weights_dropout(0.3, 5)))}


@pytest.mark.parametrize("name", CHUNKED)
def test_few_queries_at_a_time_give_the_same_block(name: str) -> None:
    keys, mask = CHUNKED[name]
    query, key, value, grad = make_tensors(2, keys)
    # Three queries of eight.
    few = AttentionBlocks(plain=True, max_scores=BATCH * HEADS * keys * 3 + 1)
    output, logsumexp = few.forward(query, key, value, mask)
    grads = few.backward(grad, query, key, value, output, logsumexp, mask)
    expected, total = plain_block(query, key, value, mask)
    torch.testing.assert_close(logsumexp, total, rtol=1e-12, atol=1e-13)
    wanted = plain_block_backward(grad, query, key, value, output, logsumexp, mask)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_scores_in_memory_do_not_grow_with_the_block() -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max([largest, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
            return result

    query, key, grad = (torch.empty(1, heads, 8192, 16, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 8))
    states, positions = DropoutSamples.at(12, 0, 0, 1, "meta").states, torch.arange(8192, device="meta")
    dropout = AttentionDropout(0.1, states, positions, range(8), positions)
    blocks, mask = AttentionBlocks(), BlockMask(is_causal=True, dropout=dropout)
    with Sizes():
        output, logsumexp = blocks.forward(query, key, key, mask)
        blocks.backward(grad, query, key, key, output, logsumexp, mask)
    assert 8192 * 8 <= largest <= MAX_SCORES


def test_a_block_of_everything_is_plain_attention() -> None:
    query, key, value, _ = make_tensors(2, LENGTH)
    sequence_first = [tensor.permute(2, 0, 1, 3) for tensor in (query, key, value)]
    expected = plain_attention(AttentionInputs(*sequence_first, CAUSAL)).permute(1, 2, 0, 3)
    output, _ = plain_block(query, key, value, BlockMask(is_causal=True))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)


def test_float16_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, 16), 100.0, dtype=torch.float16)
    for blocks in (AttentionBlocks(), AttentionBlocks(plain=True)):
        output, logsumexp = blocks.forward(query, query, query, BlockMask())
        torch.testing.assert_close(output, query, rtol=5e-3, atol=0.0)
        assert logsumexp.isfinite().all()


class CudnnTwin(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute what cuDNN's kernels compute, step by step, as their operators are called on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "_cudnn_attention" not in name:
            return func(*args, **(kwargs or {}))
        self.calls.append(name)
        if name == "_scaled_dot_product_cudnn_attention":
            # Trailing defaults are not handed on.
            query, key, value, bias, keeps_logsumexp, dropout, is_causal = (*args, *(0.0, False)[len(args) - 5 :])
            assert (bias, keeps_logsumexp, dropout) == (None, True, 0.0)
            output, logsumexp = plain_block(query, key, value, BlockMask(is_causal=is_causal))
            seed = torch.zeros((), dtype=torch.int64)
            lengths = (query.shape[2], key.shape[2])
            # cuDNN keeps a dimension that the flash kernels do not have.
            return output, logsumexp[..., None], None, None, *lengths, seed, seed, None
        grad, query, key, value, output, logsumexp, *_, num_queries, num_keys, dropout, is_causal = args
        assert (num_queries, num_keys, dropout) == (query.shape[2], key.shape[2], 0.0)
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert logsumexp.is_contiguous()
        mask = BlockMask(is_causal=is_causal)
        return plain_block_backward(grad, query, key, value, output, logsumexp[..., 0], mask)


@pytest.mark.parametrize("groups", [4, 1])
def test_blocks_of_cudnn_merge_to_the_whole_attention(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of keys, the last of them causal; the gradients of each need the log-sum-exp of all."""
    monkeypatch.setattr(attention_block, "takes_cudnn", lambda *call: True)
    query, key, value, grad = make_tensors(groups, 3 * LENGTH)
    whole = torch.ones(LENGTH, 3 * LENGTH, dtype=torch.bool).tril(2 * LENGTH)[None, None]
    expected, total = plain_block(query, key, value, BlockMask(whole))
    wanted = plain_block_backward(grad, query, key, value, expected, total, BlockMask(whole))
    parts = [(slice(n * LENGTH, (n + 1) * LENGTH), BlockMask(is_causal=n == 2)) for n in range(3)]
    blocks = AttentionBlocks()
    with CudnnTwin() as twin:
        found = [blocks.forward(query, key[:, :, keys], value[:, :, keys], mask) for keys, mask in parts]
        output, logsumexp = (each.clone() for each in found[0])
        for block in found[1:]:
            merge_block(output, logsumexp, *block)
        # Rows of a larger tensor, as the ring has them for half of the queries.
        wide = torch.stack((logsumexp, logsumexp), dim=-1)[..., 0]
        grads = [
            blocks.backward(grad, query, key[:, :, keys], value[:, :, keys], output, wide, mask) for keys, mask in parts
        ]
    assert [call.endswith("backward") for call in twin.calls] == [False] * 3 + [True] * 3
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(logsumexp, total, rtol=1e-12, atol=1e-13)
    together = sum(each[0] for each in grads), *(torch.cat([each[i] for each in grads], dim=2) for i in (1, 2))
    for ours, theirs in zip(together, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("choice", "mask", "expected"),
    [
        (SDPBackend.CUDNN_ATTENTION, BlockMask(is_causal=True), True),
        (SDPBackend.CUDNN_ATTENTION, BlockMask(), True),
        (SDPBackend.FLASH_ATTENTION, BlockMask(), False),
        (SDPBackend.CUDNN_ATTENTION, BlockMask(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)), False),
    ],
)
def test_a_block_takes_cudnn_where_torch_would(
    choice: SDPBackend, mask: BlockMask, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def choose(*call: Any, **options: Any) -> int:
        asked.append((call[3:], options))
        return int(choice.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    query, key, value, _ = make_tensors(2, LENGTH)
    assert not takes_cudnn(query, key, value, mask)
    assert not asked
    with FakeTensorMode():
        query, key, value = (torch.empty(each.shape, device="cuda") for each in (query, key, value))
        assert takes_cudnn(query, key, value, mask) is expected
    assert asked == ([] if mask.visible is not None else [((None, 0.0, mask.is_causal), {"enable_gqa": True})])


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_cuda_kernels_are_close_to_the_plain_form(is_causal: bool, groups: int) -> None:
    generator = torch.Generator().manual_seed(8)
    shapes = ((HEADS, 64), (groups, 64), (groups, 64), (HEADS, 64))
    query, key, value, grad = (
        torch.randn(BATCH, h, s, 32, generator=generator).to("cuda", torch.bfloat16) for h, s in shapes
    )
    mask = BlockMask(is_causal=is_causal)
    expected, total = plain_block(query, key, value, mask)
    output, logsumexp = AttentionBlocks().forward(query, key, value, mask)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(logsumexp, total, rtol=1e-2, atol=1e-2)
    actual = AttentionBlocks().backward(grad, query, key, value, output, logsumexp, mask)
    wanted = plain_block_backward(grad, query, key, value, expected, total, mask)
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


class FlashCalls(TorchDispatchMode):
    """Note the numbers and the truth values that the flash kernels are given, by the kernel's name."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash" in str(func):
            self.given[func._schema.name] = [each for each in args if isinstance(each, (bool, int, float))]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_keys", "is_causal"), [(64, True), (48, False)])
def test_blocks_on_cuda_are_computed_by_the_flash_kernels(
    num_keys: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fake tensors have no such choice.
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION.value)
    with FakeTensorMode(), FlashCalls() as calls:
        query, grad = (torch.empty(BATCH, 4, 64, 32, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        key, value = (torch.empty(BATCH, 2, num_keys, 32, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        mask = BlockMask(is_causal=is_causal)
        output, logsumexp = AttentionBlocks().forward(query, key, value, mask)
        grads = AttentionBlocks().backward(grad, query, key, value, output, logsumexp, mask)
    assert (output.shape, logsumexp.shape) == (query.shape, (BATCH, 4, 64))
    assert [each.shape for each in grads] == [query.shape, key.shape, value.shape]
    assert calls.given == {
        # Torch leaves out default values at the end.
        "aten::_scaled_dot_product_flash_attention": [0.0, True] if is_causal else [],
        "aten::_scaled_dot_product_flash_attention_backward": [64, num_keys, 0.0, is_causal],
    }


def test_what_flash_kernels_on_cuda_cannot_compute_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_block, "compute_capability", lambda device: (9, 0))
    can = {"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "has_mask": False, "has_dropout": False}
    others = ({"device_type": "meta"}, {"dtype": torch.float32}, {"head_dim": 60}, {"has_mask": True})
    assert AttentionBlocks().has_kernel(**can)  # type: ignore[arg-type]
    for other in (*others, {"has_dropout": True}):
        assert not AttentionBlocks().has_kernel(**{**can, **other}), other  # type: ignore[arg-type]
    for blocks in (AttentionBlocks(plain=True), AttentionBlocks(softcap=5.0)):
        assert not blocks.has_kernel(**can)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "head_dim", "expected"),
    [
        (None, 256, True),
        ((9, 0), 256, True),
        ((10, 3), 256, True),
        ((8, 0), 256, True),
        ((8, 6), 192, True),
        ((8, 6), 256, False),
        ((8, 9), 192, True),
        ((8, 9), 256, False),
        ((7, 5), 64, False),
    ],
)
def test_older_devices_have_no_flash_kernel_for_blocks(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, head_dim: int, expected: bool
) -> None:
    monkeypatch.setattr(attention_block, "compute_capability", lambda device: capability)
    has_kernel = AttentionBlocks().has_kernel("cuda", torch.float16, head_dim, has_mask=False, has_dropout=False)
    assert has_kernel is expected
