"""Boxes of ranks put together and compared: what differs is named, and nothing that is missing passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.sharding import Box, ParamSpec, even_shards, stacked_shards
from megatron.verification.run_cell import Fragment, assemble, compare, fragments_of, gradient_floor

WHOLE = np.arange(1.0, 36.0).reshape(5, 7)


def rows(start: int, end: int, rank: int, values: np.ndarray | None = None) -> Fragment:
    box = Box((start, 0), (end - start, 7))
    return Fragment("w", (5, 7), box, WHOLE[box.slices].copy() if values is None else values, rank)


def test_fragments_leave_padding_out_and_assemble_to_the_whole() -> None:
    # Five rows padded to six over three ranks: the last holds one real row and one of padding.
    fragments = []
    for rank in range(3):
        spec = ParamSpec("w", (5, 7), even_shards((5, 7), 0, rank, 3, padded_length=6))
        local = torch.full((2, 7), -99.0)
        real = torch.from_numpy(WHOLE[2 * rank : 2 * rank + 2]).float()
        local[: len(real)] = real
        fragments += fragments_of(spec, local, rank)
    assert [fragment.values.shape for fragment in fragments] == [(2, 7), (2, 7), (1, 7)]
    assert np.array_equal(assemble(fragments)["w"], WHOLE)


def test_stacked_pieces_go_to_their_own_places() -> None:
    whole = torch.arange(12.0)
    fragments = []
    for rank in range(2):
        spec = ParamSpec("gate_up", (12,), stacked_shards((12,), 0, rank, 2, 2))
        local = torch.cat((whole[3 * rank : 3 * rank + 3], whole[6 + 3 * rank : 9 + 3 * rank]))
        fragments += fragments_of(spec, local, rank, "renamed")
    assert np.array_equal(assemble(fragments)["renamed"], whole.numpy())


def test_elements_that_no_rank_holds_are_nan() -> None:
    assert np.isnan(assemble([rows(0, 2, 0)])["w"][2:]).all()


def test_equal_tensors_agree_with_a_difference_of_zero() -> None:
    assert compare([rows(0, 3, 0), rows(3, 5, 1)], {"w": WHOLE}, 0.0) == ([], 0.0)


def test_the_first_differing_element_is_named_by_its_place_in_the_whole() -> None:
    values = WHOLE[3:5].copy()
    values[1, 2] += 0.35
    values[1, 5] += 0.1
    (mismatch,), worst = compare([rows(0, 3, 0), rows(3, 5, 1, values)], {"w": WHOLE}, 1e-3)
    assert (mismatch.name, mismatch.rank, mismatch.index) == ("w", 1, (4, 2))
    assert (mismatch.actual, mismatch.expected) == (values[1, 2], WHOLE[4, 2])
    assert worst == mismatch.relative_difference == pytest.approx(0.35 / 35)
    assert mismatch.describe().startswith("w: rank 1, first differing element [4, 2]: 31.35")


def test_a_difference_is_relative_to_the_whole_tensor() -> None:
    values = WHOLE[:3].copy()
    values[0, 0] += 0.3
    fragments = [rows(0, 3, 0, values), rows(3, 5, 1)]
    assert compare(fragments, {"w": WHOLE}, 0.01)[0] == []
    assert compare(fragments, {"w": WHOLE}, 0.008)[0] != []


def test_a_small_tensor_is_held_against_the_floor() -> None:
    reference = {"w": WHOLE * 1e-20}
    fragments = [rows(0, 5, 0, WHOLE * 2e-20)]
    assert compare(fragments, reference, 1e-9)[0] != []
    assert compare(fragments, reference, 1e-9, floor=1e-3)[0] == []


def test_a_copy_that_differs_is_found_although_another_agrees() -> None:
    mismatches, _ = compare([rows(0, 5, 0), rows(0, 5, 1, WHOLE + 1)], {"w": WHOLE}, 1e-9)
    assert [mismatch.rank for mismatch in mismatches] == [1]


def test_nan_never_agrees() -> None:
    values = WHOLE.copy()
    values[2, 3] = np.nan
    (mismatch,), worst = compare([rows(0, 5, 2, values)], {"w": WHOLE}, 1e6)
    assert (mismatch.rank, mismatch.index, worst) == (2, (2, 3), np.inf)


def test_a_part_that_no_rank_holds_is_a_mismatch() -> None:
    (mismatch,), worst = compare([rows(0, 3, 0)], {"w": WHOLE}, 1e9)
    assert "held by no rank" in mismatch.name
    assert worst == np.inf


def test_a_tensor_that_the_reference_does_not_know_is_a_mismatch() -> None:
    (mismatch,), _ = compare([rows(0, 5, 0)], {}, 1e9)
    assert "unknown" in mismatch.name


def test_the_floor_is_a_share_of_the_largest_gradient() -> None:
    assert gradient_floor({"w": WHOLE, "bias": np.full(3, -70.0)}) == pytest.approx(0.07)
