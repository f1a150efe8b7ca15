"""Vocabulary-parallel cross-entropy against torch's, and its reuse of the logits' memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops import cross_entropy
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.cross_entropy import (
    vocab_parallel_losses_and_normalizers,
    vocab_sharded_cross_entropy,
)

ALONE = single_rank_group()
LENGTH, BATCH = 7, 3


def logits_and_labels(width: int, vocab_size: int, dtype: torch.dtype = torch.float64, scale: float = 3.0):
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(LENGTH, BATCH, width, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, vocab_size, (LENGTH, BATCH), generator=generator)
    return logits.to(dtype), labels


def reference(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, weights: torch.Tensor):
    """Return torch's losses and gradient in float64 over the real columns only."""
    wide = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(wide[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    (losses * weights).sum().backward()
    return losses.detach(), wide.grad


def ours(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, weights: torch.Tensor):
    leaf = logits.detach().clone().requires_grad_()
    # A copy between, as in a model: the loss may overwrite it.
    losses = vocab_sharded_cross_entropy(leaf * 1, labels, vocab_size, ALONE)
    (losses * weights).sum().backward()
    return losses.detach(), leaf.grad


@pytest.mark.parametrize(("width", "vocab_size"), [(13, 13), (16, 13), (40, 1)])
@pytest.mark.parametrize("slab_elements", [1, 32, 100, 1 << 19])
def test_losses_and_gradients_equal_torch(
    monkeypatch: pytest.MonkeyPatch, width: int, vocab_size: int, slab_elements: int
) -> None:
    monkeypatch.setattr(cross_entropy, "_SLAB_ELEMENTS", slab_elements)
    logits, labels = logits_and_labels(width, vocab_size)
    weights = torch.rand(LENGTH, BATCH, dtype=torch.float64)
    losses, gradient = ours(logits, labels, vocab_size, weights)
    expected_losses, expected_gradient = reference(logits, labels, vocab_size, weights)
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, expected_losses, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    assert not gradient[..., vocab_size:].any()


def test_normalizers_and_their_gradients_equal_torch() -> None:
    logits, labels = logits_and_labels(16, 13)
    weights, further = torch.rand(2, LENGTH, BATCH, dtype=torch.float64)
    wide, leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    real = wide[..., :13]
    normalizers = real.logsumexp(dim=-1)
    chosen = real.gather(-1, labels[..., None]).squeeze(-1)
    ((normalizers - chosen) * weights + normalizers.square() * further).sum().backward()
    losses, found = vocab_parallel_losses_and_normalizers(leaf * 1, labels, 13, ALONE)
    (losses * weights + found.square() * further).sum().backward()
    torch.testing.assert_close(found, normalizers, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(leaf.grad, wide.grad, rtol=1e-12, atol=1e-13)


def test_slabs_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_SLAB_ELEMENTS", 50)
    rows = torch.arange(23)[:, None].expand(23, 12)
    seen = [rows[slab, 0] for slab in cross_entropy._slabs(rows)]
    assert [len(slab) for slab in seen] == [4, 4, 4, 4, 4, 3]
    assert torch.equal(torch.cat(seen), torch.arange(23))


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_low_precision_logits_lose_no_more_than_one_rounding(dtype: torch.dtype, epsilon: float) -> None:
    """The loss is computed in float32 from the rounded logits; each gradient element is rounded once."""
    logits, labels = logits_and_labels(16, 13, dtype)
    weights = torch.rand(LENGTH, BATCH, dtype=torch.float64)
    losses, gradient = ours(logits, labels, 13, weights)
    expected_losses, expected_gradient = reference(logits, labels, 13, weights)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-6)
    smallest = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1.01 * epsilon, atol=max(smallest, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_label_gradient_of_a_confident_token_survives_low_precision(dtype: torch.dtype) -> None:
    """p - 1 = -0.0009: p rounds to one in bfloat16, so the difference must be taken before the rounding."""
    logits = torch.zeros(1, 1, 10, dtype=dtype)
    logits[..., 4] = 9.25
    labels = torch.tensor([[4]])
    _, gradient = ours(logits, labels, 10, torch.ones(1, 1))
    _, expected = reference(logits, labels, 10, torch.ones(1, 1))
    assert expected[0, 0, 4] == pytest.approx(-0.00086, rel=0.02)
    torch.testing.assert_close(gradient.double(), expected, rtol=0.005, atol=0.0)


def test_large_logits_do_not_overflow() -> None:
    logits, labels = logits_and_labels(13, 13, torch.float32, scale=3e4)
    losses, gradient = ours(logits, labels, 13, torch.ones(LENGTH, BATCH))
    expected_losses, expected_gradient = reference(logits, labels, 13, torch.ones(LENGTH, BATCH))
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-4)


def test_padded_columns_never_enter_the_softmax() -> None:
    logits, labels = logits_and_labels(16, 13)
    losses, _ = ours(logits, labels, 13, torch.ones(LENGTH, BATCH))
    logits[..., 13:] = float("nan")
    again, gradient = ours(logits, labels, 13, torch.ones(LENGTH, BATCH))
    assert torch.equal(losses, again)
    assert torch.isfinite(gradient[..., :13]).all()


def test_not_a_number_is_seen_in_the_loss_of_its_own_token_only() -> None:
    logits, labels = logits_and_labels(13, 13)
    logits[2, 1, 5] = float("nan")
    losses, _ = ours(logits, labels, 13, torch.ones(LENGTH, BATCH))
    assert torch.isnan(losses[2, 1])
    assert torch.isnan(losses).sum() == 1


def test_logits_that_are_not_contiguous() -> None:
    logits, labels = logits_and_labels(16, 13)
    leaf = logits.transpose(0, 1).contiguous().requires_grad_()
    losses = vocab_sharded_cross_entropy((leaf * 1).transpose(0, 1), labels, 13, ALONE)
    losses.sum().backward()
    expected_losses, expected_gradient = reference(logits, labels, 13, torch.ones(LENGTH, BATCH))
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(leaf.grad, expected_gradient.transpose(0, 1))


def test_backward_writes_the_gradient_over_the_logits() -> None:
    leaf, labels = logits_and_labels(16, 13)
    leaf.requires_grad_()
    logits = leaf * 1
    memory = logits.data_ptr()
    received: list[int] = []
    logits.register_hook(lambda gradient: received.append(gradient.data_ptr()))
    vocab_sharded_cross_entropy(logits, labels, 13, ALONE).sum().backward()
    assert received == [memory]


def test_second_use_of_the_logits_is_refused_and_not_wrong() -> None:
    """Whoever still needs the overwritten logits for a gradient gets autograd's error, never silent nonsense."""
    leaf, labels = logits_and_labels(16, 13)
    leaf.requires_grad_()
    twice = vocab_sharded_cross_entropy(leaf * 1, labels, 13, ALONE).sum()
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice.backward()

    logits = leaf * 1
    first = vocab_sharded_cross_entropy(logits, labels, 13, ALONE).sum()
    second = vocab_sharded_cross_entropy(logits, labels, 13, ALONE).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()

    logits = leaf * 1
    squares = logits.square().sum()
    vocab_sharded_cross_entropy(logits, labels, 13, ALONE).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_evaluation_leaves_the_logits_alone() -> None:
    logits, labels = logits_and_labels(16, 13)
    before = logits.clone()
    with torch.no_grad():
        vocab_sharded_cross_entropy(logits, labels, 13, ALONE)
    assert torch.equal(logits, before)
