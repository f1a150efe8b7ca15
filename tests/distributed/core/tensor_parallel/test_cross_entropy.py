"""Vocabulary-parallel cross-entropy over several ranks against torch's in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import (
    vocab_parallel_losses_and_normalizers,
    vocab_sharded_cross_entropy,
)
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import tensor_parallel_group

LENGTH, BATCH, WIDTH = 5, 3, 8


def whole_logits(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(LENGTH, BATCH, 4 * WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (LENGTH, BATCH), generator=generator)
    # The first and the last real column are labels.
    labels[0, 0], labels[-1, -1] = 0, vocab_size - 1
    return logits.to(dtype), labels


def loss_and_gradient(vocab_size: int, dtype: torch.dtype, slab_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    cross_entropy._SLAB_ELEMENTS = slab_elements
    tp = tensor_parallel_group()
    logits, labels = whole_logits(vocab_size, dtype)
    shard = logits[..., tp.rank * WIDTH : (tp.rank + 1) * WIDTH].clone().requires_grad_()
    losses = vocab_sharded_cross_entropy(shard * 1, labels, vocab_size, tp)
    (losses * torch.arange(1, 1 + losses.numel()).view_as(losses)).sum().backward()
    assert shard.grad is not None
    return losses.detach(), shard.grad


@pytest.mark.default(4)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "slab_elements", "loss_tolerance", "gradient_tolerance"),
    [
        (32, torch.float64, 20, 1e-13, 1e-12),
        (27, torch.float64, 1 << 19, 1e-13, 1e-12),
        (24, torch.float64, 1, 1e-13, 1e-12),
        (9, torch.float64, 16, 1e-13, 1e-12),
        (27, torch.float32, 20, 1e-5, 1e-5),
        (27, torch.bfloat16, 20, 1e-5, 2**-8),
        (9, torch.float16, 20, 1e-5, 2**-10),
    ],
)
def test_four_ranks_equal_torch(
    vocab_size: int, dtype: torch.dtype, slab_elements: int, loss_tolerance: float, gradient_tolerance: float
) -> None:
    logits, labels = whole_logits(vocab_size, dtype)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none")
    expected = expected.view(LENGTH, BATCH)
    (expected * torch.arange(1, 1 + expected.numel()).view_as(expected)).sum().backward()
    assert wide.grad is not None
    results = run_distributed(4, loss_and_gradient, vocab_size, dtype, slab_elements)
    for losses, _ in results:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=loss_tolerance, atol=loss_tolerance)
    gradient = torch.cat([gradient for _, gradient in results], dim=-1).double()
    torch.testing.assert_close(gradient, wide.grad, rtol=gradient_tolerance, atol=1e-3 * gradient_tolerance)
    assert not gradient[..., vocab_size:].any()


def normalizers_and_gradient(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tp = tensor_parallel_group()
    logits, _ = whole_logits(vocab_size, torch.float64)
    shard = logits[..., tp.rank * WIDTH : (tp.rank + 1) * WIDTH].clone().requires_grad_()
    losses, normalizers = vocab_parallel_losses_and_normalizers(shard * 1, edges_of_shards(), vocab_size, tp)
    (losses.sum() + normalizers.square().sum()).backward()
    assert shard.grad is not None
    return normalizers.detach(), shard.grad


def edges_of_shards() -> torch.Tensor:
    """Return labels that are the first or the last column of a rank."""
    return torch.tensor([0, 7, 8, 15, 16]).repeat_interleave(BATCH).view(LENGTH, BATCH)


def test_normalizers_of_several_ranks_equal_torch() -> None:
    vocab_size = 17
    logits, _ = whole_logits(vocab_size, torch.float64)
    wide = logits.requires_grad_()
    expected = wide[..., :vocab_size].logsumexp(dim=-1)
    chosen = wide.gather(-1, edges_of_shards()[..., None]).squeeze(-1)
    ((expected - chosen).sum() + expected.square().sum()).backward()
    assert wide.grad is not None
    results = run_distributed(3, normalizers_and_gradient, vocab_size)
    for normalizers, _ in results:
        torch.testing.assert_close(normalizers, expected.detach(), rtol=1e-13, atol=1e-13)
    gradient = torch.cat([gradient for _, gradient in results], dim=-1)
    torch.testing.assert_close(gradient, wide.grad[..., : 3 * WIDTH], rtol=1e-12, atol=1e-13)
