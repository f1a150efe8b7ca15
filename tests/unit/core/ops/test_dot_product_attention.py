"""Attention kernels against each other and against attention written out; which keys a query may look at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention_backend import SDPA, AttentionCall, select_attention_core
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import (
    AttentionInputs,
    batched_attention,
    fused_attention,
    masked_attention,
    plain_attention,
    torch_flash_attention,
)
from megatron.core.ops.dropout import AttentionDropout, DropoutSamples

BATCH, HEADS, WIDTH = 3, 6, 10
CORES = (plain_attention, fused_attention, masked_attention)


def tensors(num_queries: int, num_keys: int, groups: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((num_queries, HEADS), (num_keys, groups), (num_keys, groups))
    return [
        torch.randn(length, BATCH, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for length, heads in shapes
    ]


def one_query_at_a_time(query: np.ndarray, key: np.ndarray, value: np.ndarray, sees: np.ndarray) -> np.ndarray:
    """``sees: [b, sq, sk]`` of bool."""
    output = np.zeros_like(query)
    heads_per_group = query.shape[2] // key.shape[2]
    for q in range(query.shape[0]):
        for b in range(query.shape[1]):
            for n in range(query.shape[2]):
                g = n // heads_per_group
                seen = sees[b, q]
                scores = key[seen, b, g] @ query[q, b, n] / math.sqrt(query.shape[3])
                weights = np.exp(scores - scores.max())
                output[q, b, n] = weights / weights.sum() @ value[seen, b, g]
    return output


DOCUMENT_IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 2, 3, 4, 4, 4, 4, 4]])


@pytest.mark.parametrize("groups", [HEADS, 3, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("core", CORES)
def test_kernels_equal_the_definition(core, packed: bool, groups: int) -> None:
    query, key, value = tensors(9, 9, groups)
    pattern = AttentionPattern(document_ids=DOCUMENT_IDS if packed else None)
    sees = np.broadcast_to(np.tril(np.ones((9, 9), bool)), (BATCH, 9, 9)).copy()
    if packed:
        ids = DOCUMENT_IDS.numpy()
        sees &= ids[:, :, None] == ids[:, None, :]
    output = core(AttentionInputs(query, key, value, pattern))
    assert output.dtype == torch.float64
    expected = one_query_at_a_time(query.numpy(), key.numpy(), value.numpy(), sees)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("value_width", [WIDTH, 7])
def test_batched_gemms_equal_unfused_attention_with_their_gradients(is_causal: bool, value_width: int) -> None:
    query, key, value = tensors(9, 9, HEADS)
    # Views of a fused projection, as in a layer.
    mixed = torch.cat((query, key, value[..., :value_width]), dim=-1).requires_grad_()
    widths, pattern = (WIDTH, WIDTH, value_width), AttentionPattern(is_causal=is_causal)
    grad = torch.randn(9, BATCH, HEADS, value_width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for core in (plain_attention, batched_attention):
        output = core(AttentionInputs(*mixed.split(widths, dim=-1), pattern))
        results.append((output.detach(), *torch.autograd.grad(output, mixed, grad)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("length", "options", "expected"),
    [
        (128, {}, "batched GEMMs"),
        (129, {}, SDPA),
        (1, {}, SDPA),
        (64, {"num_queries": 8}, SDPA),
        (64, {"has_groups": True}, SDPA),
        (64, {"has_dropout": True}, SDPA),
        (64, {"dtype": torch.bfloat16}, SDPA),
        (64, {"pattern": AttentionPattern(window=8)}, SDPA),
        (64, {"has_softcap": True}, "unfused, with all scores in memory"),
    ],
)
def test_cpus_compute_short_sequences_with_batched_gemms(length: int, options: dict[str, Any], expected: str) -> None:
    call = AttentionCall(**{
        "dtype": torch.float32, "head_dim": 64, "num_queries": length, "num_keys": length, "pattern": CAUSAL, **options
    })  # fmt: skip
    assert select_attention_core("auto", "cpu").choose(call).name == expected
    assert select_attention_core("fused", "cpu").choose(call).name != "batched GEMMs"


@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("core", CORES)
def test_last_queries_of_a_cached_sequence(core, num_queries: int) -> None:
    """New positions see every position before them, and themselves."""
    query, key, value = tensors(9, 9, 2)
    whole = core(AttentionInputs(query, key, value, CAUSAL))
    last = core(AttentionInputs(query[-num_queries:], key, value, CAUSAL))
    torch.testing.assert_close(last, whole[-num_queries:])


@pytest.mark.parametrize(
    ("num_queries", "has_mask", "is_causal"), [(9, False, True), (1, False, False), (4, True, False)]
)
def test_fused_attention_is_torchs_with_a_mask_only_where_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, num_queries: int, has_mask: bool, is_causal: bool
) -> None:
    calls: list[dict[str, Any]] = []

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options)
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", compute)
    query, key, value = tensors(num_queries, 9, 2)
    fused_attention(AttentionInputs(query, key, value, CAUSAL))
    (options,) = calls
    assert (options["attn_mask"] is not None, options["is_causal"]) == (has_mask, is_causal)
    assert (options["dropout_p"], options["enable_gqa"]) == (0.0, True)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(CAUSAL, (-1, 0)), (AttentionPattern(window=3), (2, 0)), (AttentionPattern(is_causal=False, window=3), (2, -1))],
)
def test_torchs_flash_kernel_is_given_lengths_and_windows(
    monkeypatch: pytest.MonkeyPatch, pattern: AttentionPattern, windows: tuple[int, int]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def compute(*given: Any, window_size_left: int, window_size_right: int) -> list[torch.Tensor]:
        calls.append((*(each.shape for each in given[:3]), *given[3:], window_size_left, window_size_right))
        return [given[0]]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", compute)
    query, key, value = tensors(4, 9, 2)
    assert torch.equal(torch_flash_attention(AttentionInputs(query, key, value, pattern)), query)
    shapes = ((BATCH, 4, HEADS, WIDTH), *[(BATCH, 9, 2, WIDTH)] * 2)
    assert calls == [(*shapes, None, None, 4, 9, 0.0, pattern.is_causal, False, *windows)]


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_fused_attention_equal_plain_ones(packed: bool, groups: int) -> None:
    pattern = AttentionPattern(document_ids=DOCUMENT_IDS if packed else None)
    weights = torch.randn(9, BATCH, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = []
    for core in CORES:
        leaves = [tensor.requires_grad_() for tensor in tensors(9, 9, groups)]
        (core(AttentionInputs(*leaves, pattern)) * weights).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    plain, *others = gradients
    for fused in others:
        for ours, wanted in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("core", CORES)
def test_low_precision_softmax_runs_in_float32(core) -> None:
    query, key, value = tensors(9, 9, 2, torch.bfloat16)
    output = core(AttentionInputs(query, key, value, CAUSAL))
    exact = plain_attention(AttentionInputs(query.double(), key.double(), value.double(), CAUSAL))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("core", CORES)
def test_float16_scores_do_not_overflow(core) -> None:
    """Query times key is above 65,504, float16's largest number, and stays so after the scaling."""
    query, key, value = (tensor.half() for tensor in tensors(9, 9, 2))
    query, key = query * 300, key * 300
    exact = plain_attention(AttentionInputs(query.double(), key.double(), value.double(), CAUSAL))
    output = core(AttentionInputs(query, key, value, CAUSAL))
    torch.testing.assert_close(output.double(), exact, rtol=0.002, atol=0.002)


@pytest.mark.parametrize("core", CORES)
def test_dropout_keeps_the_expected_value(core) -> None:
    query, key, value = tensors(9, 9, 2)
    outputs = []
    for iteration in range(400):
        states = DropoutSamples.at(1, iteration, 0, BATCH, "cpu").states
        dropout = AttentionDropout(0.3, states, torch.arange(9), range(HEADS), seed=iteration)
        outputs.append(core(AttentionInputs(query, key, value, CAUSAL, dropout)))
    outputs = torch.stack(outputs)
    assert outputs.std(dim=0).max() > 0.1
    error = outputs.mean(dim=0) - plain_attention(AttentionInputs(query, key, value, CAUSAL))
    assert (error.abs() / (outputs.std(dim=0) / 20).clamp_min(1e-3)).mean() < 1.5


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_both_directions(core, packed: bool) -> None:
    query, key, value = tensors(9, 9, 2)
    ids = DOCUMENT_IDS.numpy() if packed else np.zeros((BATCH, 9))
    pattern = AttentionPattern(is_causal=False, document_ids=DOCUMENT_IDS if packed else None)
    expected = one_query_at_a_time(query.numpy(), key.numpy(), value.numpy(), ids[:, :, None] == ids[:, None, :])
    np.testing.assert_allclose(
        core(AttentionInputs(query, key, value, pattern)).numpy(), expected, rtol=1e-12, atol=1e-13
    )


CPU = torch.device("cpu")


def test_visible_keys_are_earlier_ones_of_the_same_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])
    queries, keys = torch.tensor([1, 3]), torch.tensor([0, 1, 2])
    visible = AttentionPattern(document_ids=documents).visible(queries, keys)
    assert visible is not None
    assert visible.shape == (2, 1, 2, 3)
    assert visible[0, 0].tolist() == [[True, True, False], [False, False, True]]
    assert visible[1, 0].tolist() == [[True, True, False], [True, True, True]]
    causal = CAUSAL.visible(queries, keys)
    assert causal is not None
    assert causal[0, 0].tolist() == visible[1, 0].tolist()


def test_matrices() -> None:
    causal = CAUSAL.matrix(2, 4, CPU)
    assert causal is not None
    assert causal[0, 0].tolist() == [[True, True, True, False], [True] * 4]
    assert AttentionPattern(is_causal=False).matrix(2, 4, CPU) is None
    given = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    assert AttentionPattern(mask=given).matrix(2, 4, CPU) is given


def test_a_window_narrows_every_rule() -> None:
    window = CAUSAL.within(2)
    matrix = window.matrix(2, 4, CPU)
    assert matrix is not None
    assert matrix[0, 0].tolist() == [[False, True, True, False], [False, False, True, True]]
    assert not window.is_plain_causal
    given = torch.tensor([[True, False, True, False], [True, True, True, True]])[None, None]
    masked = AttentionPattern(mask=given).within(2).matrix(2, 4, CPU)
    assert masked is not None
    assert masked[0, 0].tolist() == [[False, False, True, False], [False, False, True, True]]
    documents = AttentionPattern(document_ids=torch.tensor([[0, 0, 1, 1]]))
    assert documents.within(2) is documents.within(2)
    within = documents.within(2).matrix(4, 4, CPU)
    assert within is not None
    assert within[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_part_sees_what_it_sees_within_the_whole() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]])
    positions = torch.arange(8)
    for whole in (
        AttentionPattern(document_ids=documents),
        AttentionPattern(document_ids=documents, window=2),
        AttentionPattern(is_causal=False, document_ids=documents),
        AttentionPattern(is_causal=False, window=3),
        AttentionPattern(window=3),
    ):
        queries, keys = range(4, 6), range(2, 6 if whole.is_causal else 8)
        part = whole.part(queries, keys)
        matrix = part.matrix(2, len(keys), CPU)
        assert matrix is not None
        expected = whole.visible(positions[4:6], positions[keys.start : keys.stop])
        assert expected is not None
        assert torch.equal(matrix, expected)
        assert (whole.part(queries, keys) is part) == (whole.document_ids is not None or whole.is_causal)
    # Causality alone is what the kernels know.
    assert CAUSAL.part(range(2, 4), range(4)) is CAUSAL


def test_layers_share_the_matrix_of_packed_documents() -> None:
    pattern = AttentionPattern(document_ids=torch.tensor([[0, 0, 1]]))
    matrix = pattern.matrix(3, 3, CPU)
    assert matrix is not None
    assert matrix.shape == (1, 1, 3, 3)
    assert matrix[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    assert pattern.matrix(3, 3, CPU) is matrix


CUDA_BATCH, CUDA_HEADS, GROUPS, CUDA_WIDTH, LENGTH = 2, 4, 2, 64, 384
STARTS = torch.zeros(CUDA_BATCH, LENGTH, dtype=torch.int64)
STARTS[0, [5, 130, 131, 300]] = 1
DOCUMENTS = AttentionPattern(document_ids=STARTS.cumsum(dim=1))
CASES = {
    "causal": (CAUSAL, LENGTH, None),
    "end of more keys": (CAUSAL, 128, None),
    "documents": (DOCUMENTS, LENGTH, None),
    "documents of the end": (DOCUMENTS, 128, None),
    "window": (AttentionPattern(window=100), LENGTH, None),
    "window at the end": (AttentionPattern(window=100), 128, None),
    "window of documents": (DOCUMENTS.within(100), LENGTH, None),
    "capped scores": (CAUSAL, LENGTH, 5.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_close_to_plain_attention(name: str, backend: str, dtype: torch.dtype) -> None:
    pattern, num_queries, softcap = CASES[name]
    if pattern.document_ids is not None:
        pattern = AttentionPattern(document_ids=pattern.document_ids.cuda(), window=pattern.window)
    generator = torch.Generator().manual_seed(8)
    shapes = ((num_queries, CUDA_HEADS), (LENGTH, GROUPS), (LENGTH, GROUPS))
    leaves = [
        torch.randn(length, CUDA_BATCH, heads, CUDA_WIDTH, generator=generator).to("cuda", dtype).requires_grad_()
        for length, heads in shapes
    ]
    weights = torch.randn(num_queries, CUDA_BATCH, CUDA_HEADS, CUDA_WIDTH, generator=generator).to("cuda", dtype)
    output = select_attention_core(backend, "cuda", softcap)(AttentionInputs(*leaves, pattern))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain_attention(AttentionInputs(*exact, pattern), softcap)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(output, leaves, weights)
    for ours, wanted in zip(grads, torch.autograd.grad(expected, exact, weights.double()), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2 * tolerance, atol=2 * tolerance)
