"""Keyed dropout: the rule word by word, its statistics, its gradient, and its keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.core.ops import dropout as dropout_module
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.ops.dot_product_attention import AttentionInputs, fused_attention, plain_attention
from megatron.core.ops.dropout import (
    AttentionDropout,
    DropoutKeys,
    DropoutSamples,
    RowKeys,
    drop_elements,
    keyed_dropout,
)

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_form_that_is_compiled_drops_the_same_elements(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, x = make_keys(7, 2), torch.randn(7, 2, 33, dtype=dtype, requires_grad=True)
    results = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=is_compiling: value)
        dropped = keyed_dropout(x, keys, 0.3)
        results.append((dropped.detach(), *torch.autograd.grad(dropped, x, torch.full_like(x, 3.0))))
    assert all(torch.equal(*pair) for pair in zip(*results))
    assert 0 < (results[1][0] == 0).sum() < x.numel()


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
        monkeypatch.setattr(dropout_module, "_CPU_BLOCK", size)
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


LENGTH, BATCH, WIDTH = 40, 6, 512
LAYERS = range(3)


def make_element_keys(seed: int = 1234, iteration: int = 7, first_sample: int = 0, batch: int = BATCH) -> DropoutKeys:
    samples = DropoutSamples.at(seed, iteration, first_sample, batch, "cpu")
    return DropoutKeys(samples, torch.arange(LENGTH), slice(None), LAYERS)


def all_masks(keys: DropoutKeys) -> list[torch.Tensor]:
    """Return the masks of every site of hidden states, ``[s, b, h]`` of 0 and 1."""
    sites = [keys.of_embedding]
    for layer in LAYERS:
        sites += [keys.after_attention(layer), keys.after_feed_forward(layer)]
    ones = torch.ones(LENGTH, keys.samples.states.shape[0], WIDTH)
    return [(drop_elements(ones, site, 0.5) == 0).float() for site in sites]


def test_no_two_rows_of_a_run_drop_alike() -> None:
    """Any two rows of 512 columns, of any seed, iteration, site, position and sample, agree in about a half."""
    runs = [
        make_element_keys(),
        make_element_keys(seed=1235),
        make_element_keys(iteration=8),
        make_element_keys(first_sample=BATCH),
    ]
    masks = torch.cat([mask.flatten(0, 1) for keys in runs for mask in all_masks(keys)]) * 2 - 1
    for part in masks.split(480):
        agreement = (part @ masks.t()) / WIDTH
        # The largest of the 22 million that are not a row with itself is expected near 0.24; 1 is equality.
        assert int((agreement > 0.999).sum()) == len(part)
        assert float(agreement[agreement < 0.999].abs().max()) < 0.31
    attention = [make_element_keys().of_attention(layer, 0.5, range(4)).row_keys for layer in LAYERS]
    pairs = {pair for keys in attention for pair in zip(keys.k0.flatten().tolist(), keys.k1.flatten().tolist())}
    assert len(pairs) == len(LAYERS) * BATCH * 4 * LENGTH


def test_layers_sites_iterations_and_samples_are_not_correlated() -> None:
    first, second = (torch.stack(all_masks(make_element_keys(iteration=iteration))) for iteration in (7, 8))
    limit = 5 / first[0].numel() ** 0.5
    for other in (first.roll(1, 0), first.roll(1, 1), first.roll(1, 2), second):
        correlations = ((first * 2 - 1) * (other * 2 - 1)).mean(dim=(1, 2, 3))
        assert float(correlations.abs().max()) < limit


def test_a_sample_drops_alike_in_whatever_micro_batch_it_is() -> None:
    """The samples 2 to 5 at once, or by twos, as data-parallel ranks or further micro-batches have them."""
    whole = make_element_keys(first_sample=2, batch=4)
    for first, part in ((2, slice(0, 2)), (4, slice(2, 4))):
        keys = make_element_keys(first_sample=first, batch=2)
        for ours, theirs in zip(keys.after_feed_forward(1), whole.after_feed_forward(1)):
            assert torch.equal(ours, theirs[:, part])
        ours, theirs = (k.of_attention(1, 0.1, range(3)).row_keys.k1 for k in (keys, whole))
        assert torch.equal(ours, theirs[part])


def test_a_stage_and_a_part_of_the_sequence_drop_what_the_whole_model_drops() -> None:
    whole = make_element_keys()
    part = replace(whole, positions=whole.positions[8:24], hidden=slice(4, 12), layers=range(1, 2))
    for ours, theirs in zip(part.after_attention(1), whole.after_attention(1)):
        assert torch.equal(ours, theirs[12:20])
    heads = part.of_attention(1, 0.1, range(2, 4)).row_keys.k0
    assert torch.equal(heads, whole.of_attention(1, 0.1, range(4)).row_keys.k0[:, 2:, 8:24])


def test_static_keys_take_over_those_of_another_micro_batch_in_their_own_memory() -> None:
    first, second = make_element_keys(), make_element_keys(iteration=8)
    static = first.static_copy()
    used = static.after_attention(1)
    static.overwrite(second)
    expected = make_element_keys(iteration=8).after_attention(1)
    for keys in (used, static.after_attention(1), second.after_attention(1)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(keys, expected, strict=True))
    assert torch.equal(static.of_router(1, 4, slice(None)), second.of_router(1, 4, slice(None)))
    assert all(
        torch.equal(a, b) for a, b in zip(first.after_attention(1), make_element_keys().after_attention(1), strict=True)
    )
    assert torch.equal(first.samples.states, make_element_keys().samples.states)


def test_an_adapter_has_keys_of_the_positions_that_it_sees() -> None:
    keys = replace(make_element_keys(), hidden=slice(10, 20))
    whole, part = keys.of_adapter(2, 3, is_whole=True), keys.of_adapter(2, 3, is_whole=False)
    assert whole.k0.shape == (LENGTH, BATCH)
    assert all(torch.equal(theirs[10:20], ours) for ours, theirs in zip(part, whole, strict=True))
    given = [keys.of_adapter(layer, number, is_whole=True).k0 for layer in LAYERS for number in range(8)]
    assert len({tuple(k0.flatten().tolist()) for k0 in given}) == len(LAYERS) * 8


def test_keys_are_those_of_every_release() -> None:
    """A run that goes on with another release drops what it would have dropped."""
    keys = make_element_keys()
    found = {
        "embedding": keys.of_embedding.k0,
        "attention": keys.after_attention(2).k1,
        "feed-forward": keys.after_feed_forward(1).k0,
        "weights": keys.of_attention(2, 0.1, range(1, 4)).row_keys.k1,
        "adapter": keys.of_adapter(1, 3, is_whole=True).k0,
    }
    assert {name: int(values.flatten()[-1]) for name, values in found.items()} == {
        "embedding": -1395184790,
        "attention": 1636725171,
        "feed-forward": 652004714,
        "weights": 822232286,
        "adapter": -1936997772,
    }
    assert keys.of_attention(2, 0.1, range(4)).seed == 1926738526258255187
    assert float(keys.of_router(1, 4, slice(None))[-1, -1]) == pytest.approx(-1.385017991)


def make_weights_dropout(**changes: int) -> AttentionDropout:
    return make_element_keys(**changes).of_attention(0, 0.3, range(4))


def test_attention_on_cpu_drops_the_same_weights_by_every_core() -> None:
    query = torch.randn(LENGTH, BATCH, 4, 6, dtype=torch.float64)
    dropout = make_weights_dropout()
    weights = torch.softmax(
        torch.einsum("qbnd,kbnd->bnqk", query, query)
        .div(6**0.5)
        .masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf),
        dim=-1,
    )
    expected = torch.einsum("bnqk,kbnd->qbnd", dropout.drop(weights), query)
    for core in (plain_attention, fused_attention):
        torch.testing.assert_close(
            core(AttentionInputs(query, query, query, CAUSAL, dropout)), expected, rtol=1e-10, atol=1e-12
        )


def test_seeds_of_library_kernels_differ_by_layer_rank_micro_batch_and_chunk() -> None:
    keys = make_element_keys()
    seeds = {keys.of_attention(layer, 0.1, range(2)).seed for layer in LAYERS}
    seeds |= {replace(keys, rank=rank).of_attention(0, 0.1, range(2)).seed for rank in (1, 2)}
    seeds |= {make_weights_dropout(iteration=8).seed, make_weights_dropout(first_sample=4).seed}
    dropout = make_weights_dropout()
    seeds |= {dropout.of_chunk(chunk, dropout.queries[:3], dropout.queries).seed for chunk in (0, 5)}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_numbers_in_place_of_logits_are_normal_and_differ_with_token_layer_and_step() -> None:
    keys, whole = make_element_keys(batch=64), slice(None)
    drawn = keys.of_router(1, 16, whole)
    assert drawn.shape == (LENGTH * 64, 16)
    assert drawn.unique().numel() > 0.99 * drawn.numel()
    wanted = torch.distributions.Normal(0.0, 1.0).icdf(torch.arange(1, 20) / 20)
    torch.testing.assert_close(drawn.flatten().quantile(torch.arange(1, 20) / 20), wanted, rtol=0, atol=0.03)
    others = [keys.of_router(2, 16, whole), make_element_keys(iteration=8, batch=64).of_router(1, 16, whole)]
    for other in (*others, drawn.roll(1, dims=0), drawn.roll(64, dims=0), drawn.roll(1, dims=1)):
        assert abs(float(torch.corrcoef(torch.stack((drawn.flatten(), other.flatten())))[0, 1])) < 0.03
    shares = drawn.topk(4).indices.flatten().bincount(minlength=16) / (len(drawn) * 4 / 16)
    assert 0.85 < float(shares.min()) < float(shares.max()) < 1.15


def test_numbers_in_place_of_logits_are_the_same_wherever_a_token_is() -> None:
    whole = make_element_keys().of_router(2, 5, slice(None)).view(LENGTH, BATCH, 5)
    some = replace(make_element_keys(first_sample=2, batch=3), positions=torch.arange(LENGTH).roll(7)[:9])
    found = some.of_router(2, 5, slice(4, 20))
    assert torch.equal(found, whole.roll(7, dims=0)[:9, 2:5].reshape(27, 5)[4:20])


def test_the_ends_of_the_draw_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_module, "_LARGEST_DRAWN", 1)
    drawn = make_element_keys().of_router(1, 16, slice(None))
    quartile = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.75)))
    assert drawn.unique().tolist() == pytest.approx([-quartile, quartile])
