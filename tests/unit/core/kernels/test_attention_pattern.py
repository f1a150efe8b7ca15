"""Which keys a query may look at, by position, and as the matrix that attention cores take."""

from __future__ import annotations

import torch

from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern

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
