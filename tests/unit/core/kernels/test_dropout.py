"""Keyed dropout: the rule word by word, its statistics, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.ops import dropout as module
from megatron.core.ops.dropout import RowKeys, drop_elements, keyed_dropout

WORD = 0xFFFFFFFF


def make_keys(*shape: int, seed: int = 3) -> RowKeys:
    generator = torch.Generator().manual_seed(seed)
    k0, k1 = torch.randint(-(1 << 31), 1 << 31, (2, *shape), generator=generator, dtype=torch.int32)
    return RowKeys(k0, k1)


def is_kept(k0: int, k1: int, column: int, probability: float) -> bool:
    """Follow the rule in numbers of Python, which do not wrap around."""
    x = (k0 + (column + 1) * 0x9E3779B1) & WORD
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & WORD
    x ^= x >> 15
    x ^= k1 & WORD
    x = (x * 0x735A2D97) & WORD
    x ^= x >> 15
    return (x >> 8) >= round(probability * 2**24)


def test_the_lowest_bits_of_a_word_count() -> None:
    """Among 2^19 words some are so near the threshold that bits of the last shift decide."""
    keys, count, probability = make_keys(1), 2**19, 0.3
    x = (np.uint64(int(keys.k0) & WORD) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B1)) & WORD
    x ^= x >> np.uint64(16)
    x = (x * np.uint64(0x21F0AAAD)) & WORD
    x ^= x >> np.uint64(15)
    x ^= np.uint64(int(keys.k1) & WORD)
    x = (x * np.uint64(0x735A2D97)) & WORD
    x ^= x >> np.uint64(15)
    output = drop_elements(torch.ones(1, count), keys, probability)
    assert np.array_equal(output.numpy()[0] != 0, (x >> np.uint64(8)) >= round(probability * 2**24))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("columns", [None, [5, 0, -1, 70_000, 2**31 - 1, 8]])
def test_the_rule(probability: float, columns: list[int] | None) -> None:
    keys, numbers = make_keys(7, 5), columns or list(range(6))
    given = None if columns is None else torch.tensor(columns)
    output = drop_elements(torch.ones(7, 5, 6, dtype=torch.float64), keys, probability, given)
    for row in range(7):
        for sample in range(5):
            k0, k1 = int(keys.k0[row, sample]), int(keys.k1[row, sample])
            expected = [is_kept(k0, k1, c, probability) / (1 - probability) for c in numbers]
            assert output[row, sample].tolist() == pytest.approx(expected, rel=1e-15)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, keys = torch.randn(23, 3, 11), make_keys(23, 3)
    whole = drop_elements(x, keys, 0.3)
    for size in (1, 40, 121):
        monkeypatch.setattr(module, "_CPU_BLOCK", size)
        assert torch.equal(drop_elements(x, keys, 0.3), whole), size
    assert torch.equal(drop_elements(x.transpose(0, 1), RowKeys(keys.k0.t(), keys.k1.t()), 0.3), whole.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_dropped_alike_and_only_keys_are_kept(dtype: torch.dtype) -> None:
    x = torch.randn(9, 4, 13).to(dtype).requires_grad_()
    kept: list[tuple[torch.dtype, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = keyed_dropout(x, make_keys(9, 4), 0.4)
    assert kept == [(torch.int32, 36)] * 2
    output.backward(torch.ones_like(output))
    assert output.dtype == dtype
    assert x.grad is not None
    factor = (torch.ones((), dtype=dtype) * (1 / 0.6)).item()
    assert torch.equal(x.grad, (output != 0).to(dtype) * factor)
    assert 0 < int((output == 0).sum()) < output.numel()


def test_no_rows_give_no_rows() -> None:
    assert drop_elements(torch.ones(0, 3, 4), make_keys(0, 3), 0.1).shape == (0, 3, 4)


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5])
def test_rates_and_independence(probability: float) -> None:
    """Chi-square of counts a row and a column, and of pairs of neighbors, within 5 standard deviations."""
    rows, columns = 1500, 1024
    dropped = (drop_elements(torch.ones(rows, columns), make_keys(rows), probability) == 0).double()
    variance = probability * (1 - probability)
    assert abs(float(dropped.mean()) - probability) < 5 * (variance / dropped.numel()) ** 0.5
    for sums, count in ((dropped.sum(dim=0), rows), (dropped.sum(dim=1), columns)):
        chi_square = float(((sums - count * probability) ** 2).sum() / (count * variance))
        assert abs(chi_square - len(sums)) < 5 * (2 * len(sums)) ** 0.5
    centered = (dropped - probability) / variance**0.5
    for pairs in (
        centered[1:] * centered[:-1],
        centered[:, 1:] * centered[:, :-1],
        centered[:, 2:] * centered[:, :-2],
        centered[:, 512:] * centered[:, :512],
    ):
        assert abs(float(pairs.mean())) < 5 / pairs.numel() ** 0.5
