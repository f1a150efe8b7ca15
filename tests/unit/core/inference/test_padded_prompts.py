from __future__ import annotations

import torch

from megatron.core.inference.prompt_batch import batches_of_like_length, pad_left
from megatron.core.ops.attention_pattern import CAUSAL

CPU = torch.device("cpu")


def test_rows_end_in_one_column_and_count_from_their_own_beginning() -> None:
    prompts = pad_left([[5, 6, 7], [8], [9, 10, 11, 12, 13]], CPU)
    assert prompts.tokens.tolist() == [[0, 0, 5, 6, 7], [0, 0, 0, 0, 8], [9, 10, 11, 12, 13]]
    assert prompts.starts.tolist() == [2, 4, 0]
    assert prompts.has_padding
    assert prompts.positions(0, 5).tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert prompts.positions(5, 7).tolist() == [[3, 4], [1, 2], [5, 6]]


def test_no_real_column_looks_at_padding_and_none_looks_at_nothing() -> None:
    prompts = pad_left([[5, 6], [7, 8, 9]], CPU)
    mask = prompts.pattern(0, 3).mask
    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert mask[1, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    later = prompts.pattern(4, 5).mask
    assert later is not None
    assert later[:, 0].tolist() == [[[False, True, True, True, True]], [[True] * 5]]


def test_a_stretch_has_the_rows_of_the_whole_mask() -> None:
    prompts = pad_left([[1] * 3, [1] * 7, [1]], CPU)
    whole, stretch = prompts.pattern(0, 7).mask, prompts.pattern(2, 5).mask
    assert whole is not None
    assert stretch is not None
    assert torch.equal(stretch, whole[:, :, 2:5, :5])


def test_prompts_of_equal_length_need_no_mask() -> None:
    assert pad_left([[1, 2], [3, 4]], CPU).pattern(0, 2) is CAUSAL


def test_prompts_of_like_length_run_together() -> None:
    prompts = [[0] * length for length in (9, 1, 8, 2, 2, 30)]
    assert list(batches_of_like_length(prompts, 2)) == [[1, 3], [2, 4], [0, 5]]
    assert list(batches_of_like_length(prompts, 32)) == [[0, 1, 2, 3, 4, 5]]
    assert list(batches_of_like_length([], 4)) == []
