"""Logits of whole rows: the same with and without the cache, which spares the columns that are already known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.errors import InputError
from megatron.core.inference.cached_forward import CachedForward
from megatron.core.process_group import single_rank_group
from tests.unit.core.inference.small_models import build, odd_config

ROWS = torch.randint(0, 101, (4, 30), generator=torch.Generator().manual_seed(1))


class Counted:
    """A model, and the number of columns of each of its passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
        self.model = build(odd_config(**changes), single_rank_group())
        self.columns: list[int] = []
        plain = self.model.forward

        def forward(tokens: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
            self.columns.append(tokens.shape[1])
            return plain(tokens, *arguments, **keywords)

        monkeypatch.setattr(self.model, "forward", forward)
        self._plain = plain

    def after(self, row: list[int]) -> torch.Tensor:
        """Return the logits ``[v]`` after a row alone, without the cache."""
        with torch.no_grad():
            found: torch.Tensor = self._plain(torch.tensor([row]), torch.arange(len(row))[None])
        return found[-1, 0, : self.model.config.vocab_size]


def logits(forward: CachedForward, tokens: torch.Tensor, mask: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return forward.logits(tokens, mask, positions, **how)


def test_rows_that_grow_repeat_and_change_places_need_only_their_new_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the beams of a search do; the second row has two columns of padding."""
    counted = Counted(monkeypatch)
    forward = CachedForward(counted.model)
    rows = [ROWS[0, :6].tolist(), [0, 0, *ROWS[1, :4].tolist()]]
    starts = [0, 2]
    for chosen in ((0, 1), (1, 0), (0, 0, 1), (2, 1), (1, 0)):
        rows = [[*rows[row], int(ROWS[2, len(rows[row])]) // 2 + number] for number, row in enumerate(chosen)]
        starts = [starts[row] for row in chosen]
        mask = (torch.arange(len(rows[0])) >= torch.tensor(starts)[:, None]).long()
        found = logits(forward, torch.tensor(rows), mask, num_last=1, keeps_cache=True)
        for row, start, ours in zip(rows, starts, found, strict=True):
            torch.testing.assert_close(ours[0], counted.after(row[start:]), rtol=1e-11, atol=1e-11)
    assert counted.columns == [7, 1, 1, 1, 1]


def test_the_cache_grows_beyond_its_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.inference.cached_forward._FIRST_ROOM", 2)
    counted = Counted(monkeypatch)
    forward = CachedForward(counted.model)
    for length in range(4, 30):
        found = logits(forward, ROWS[:, :length], num_last=1, keeps_cache=True)
    for row, ours in zip(ROWS, found, strict=True):
        torch.testing.assert_close(ours[0], counted.after(row[:29].tolist()), rtol=1e-11, atol=1e-11)
    assert counted.columns == [4] + [1] * 25


@pytest.mark.parametrize(
    ("second", "num_last", "columns"),
    [
        (ROWS[:2, :9], 1, 3),
        (ROWS[:2, :9], 3, 3),
        (ROWS[:2, :9], 4, 9),
        (ROWS[:2, :9], 0, 9),
        (ROWS[:2, :6], 1, 6),
        (ROWS[:2, :4], 1, 4),
        (ROWS[1:3, :9], 1, 9),
    ],
)
def test_other_rows_are_computed_whole(
    monkeypatch: pytest.MonkeyPatch, second: torch.Tensor, num_last: int, columns: int
) -> None:
    counted = Counted(monkeypatch)
    forward = CachedForward(counted.model)
    logits(forward, ROWS[:2, :6], num_last=1, keeps_cache=True)
    found = logits(forward, second, num_last=num_last, keeps_cache=True)
    expected = logits(CachedForward(build(odd_config(), single_rank_group())), second)
    torch.testing.assert_close(found, expected[:, -num_last:], rtol=1e-11, atol=1e-11)
    assert counted.columns == [6, columns]


def test_a_call_without_the_cache_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    forward = CachedForward(counted.model)
    logits(forward, ROWS[:2, :6], num_last=1, keeps_cache=True)
    logits(forward, ROWS[2:, :8])
    logits(forward, ROWS[:2, :7], num_last=1, keeps_cache=True)
    assert counted.columns == [6, 8, 1]


def test_masked_columns_are_looked_at_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by padding on the right, whose own logits transformers computes from the text before it."""
    forward = CachedForward(Counted(monkeypatch).model)
    mask = torch.tensor([[1] * 6 + [0] * 2, [0] * 2 + [1] * 6])
    one, other = (torch.where(mask == 1, ROWS[:2, :8], padding) for padding in (3, 77))
    left, right = (logits(forward, tokens, mask) for tokens in (one, other))
    torch.testing.assert_close(left[mask == 1], right[mask == 1], rtol=1e-11, atol=1e-11)
    assert left.isfinite().all()


def test_what_the_model_does_not_know_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CachedForward(Counted(monkeypatch).model)
    for token in (-1, 101):
        with pytest.raises(InputError, match=rf"^token {token} is outside the vocabulary; the model knows 0\.\.100$"):
            logits(forward, torch.tensor([[3, token]]))
    with pytest.raises(InputError, match=r"^position 37 is beyond the model's 37 learned positions; shorten the text$"):
        logits(forward, torch.zeros(1, 38, dtype=torch.long))
    rotary = CachedForward(Counted(monkeypatch, position_embedding_type="rope").model)
    assert logits(rotary, torch.zeros(1, 38, dtype=torch.long)).shape == (1, 38, 101)
