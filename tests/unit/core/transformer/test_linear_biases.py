"""ALiBi: slopes, and channels of queries and keys that give every kernel the biases, compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.ops.attention_backend import select_attention_core
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.alibi import alibi_slopes, extended_head_width
from megatron.core.transformer.linear_biases import LinearBiases

CP = single_rank_group(("cp",))
HEADS, WIDTH = 6, 20


def defined(inputs: AttentionInputs, slopes: tuple[float, ...], sees: torch.Tensor) -> torch.Tensor:
    """Return attention with the bias -slope x distance, in float64, one head after another."""
    query, key, value = (tensor.double() for tensor in inputs.heads)
    num_queries, num_keys = inputs.num_queries, inputs.num_keys
    positions = torch.arange(num_keys, dtype=torch.float64)
    distances = positions[None, :] - positions[num_keys - num_queries :, None]
    heads = []
    for head, slope in enumerate(slopes):
        group = head * key.shape[2] // len(slopes)
        scores = torch.einsum("qbd,kbd->bqk", query[:, :, head], key[:, :, group]) / query.shape[3] ** 0.5
        weights = (scores + slope * distances).masked_fill(~sees, -torch.inf).softmax(dim=-1)
        heads.append(torch.einsum("bqk,kbd->qbd", weights, value[:, :, group]))
    return torch.stack(heads, dim=2)


def inputs_of(num_queries: int, num_keys: int, groups: int, dtype: torch.dtype, **pattern: Any) -> AttentionInputs:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(length, 2, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for length, heads in ((num_queries, HEADS), (num_keys, groups), (num_keys, groups))
    )
    return AttentionInputs(query, key, value, replace(CAUSAL, **pattern))


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-number for number in range(1, 9))
    assert alibi_slopes(2) == (2.0**-4, 2.0**-8)
    # The slopes of four heads, then every second one of those of eight.
    assert alibi_slopes(6) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)
    assert len(set(alibi_slopes(112))) == 112


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("num_queries", [1, 5, 40])
def test_kernels_compute_the_definition(backend: str, groups: int, num_queries: int) -> None:
    slopes = alibi_slopes(HEADS)
    ids = torch.tensor([[0] * 11 + [1] * 29, [0] * 40])
    same = ids[:, :, None] == ids[:, None, :]
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    for pattern, sees in (({}, causal.expand(2, -1, -1)), ({"document_ids": ids}, causal & same)):
        inputs = inputs_of(num_queries, 40, groups, torch.float64, **pattern)
        output = select_attention_core(backend, "cpu")(LinearBiases(slopes, CP).extend(inputs))
        expected = defined(inputs, slopes, sees[:, 40 - num_queries :])
        torch.testing.assert_close(output[..., :WIDTH], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_keys", [700, 70_000])
def test_biases_of_low_precision_are_as_accurate_as_float32(dtype: torch.dtype, num_keys: int) -> None:
    """Queries and keys of 0 leave the biases alone: their dot products are slope x position, up to a common factor."""
    slopes = alibi_slopes(12)
    query, key = torch.zeros(1, 1, 12, WIDTH, dtype=dtype), torch.zeros(num_keys, 1, 12, WIDTH, dtype=dtype)
    wide = LinearBiases(slopes, CP).extend(AttentionInputs(query, key, key, CAUSAL))
    assert wide.query.dtype == wide.key.dtype == dtype
    new = wide.query.shape[3]
    name = str(dtype).removeprefix("torch.")
    assert new == extended_head_width(WIDTH, name, num_keys) == wide.key.shape[3]
    assert new % 8 == 0
    biases = torch.einsum("qbnd,kbnd->nk", wide.query.double(), wide.key.double()) / new**0.5
    expected = torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(num_keys, dtype=torch.float64)
    torch.testing.assert_close(biases, expected, rtol=2.0**-21, atol=1e-3 if dtype == torch.float16 else 0.0)


def test_gradients_are_those_of_the_definition() -> None:
    slopes, sees = alibi_slopes(HEADS), torch.ones(2, 16, 16, dtype=torch.bool).tril()
    gradients = []
    for is_defined in (False, True):
        inputs = inputs_of(16, 16, 2, torch.float64)
        for tensor in inputs.heads:
            tensor.requires_grad_()
        output = (
            defined(inputs, slopes, sees)
            if is_defined
            else plain_attention(LinearBiases(slopes, CP).extend(inputs))[..., :WIDTH]
        )
        output.square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs.heads])
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_channels_are_computed_once_for_a_length_in_training() -> None:
    biases = LinearBiases(alibi_slopes(HEADS), CP)
    with torch.inference_mode():
        biases.extend(inputs_of(8, 8, 2, torch.float32))
    inputs = inputs_of(8, 8, 2, torch.float32)
    inputs.query.requires_grad_()
    first, again = (biases._channels(8, 24, WIDTH, inputs.query) for _ in range(2))
    assert first is again
    assert not first[0].is_inference()
    biases.extend(inputs).query.sum().backward()
