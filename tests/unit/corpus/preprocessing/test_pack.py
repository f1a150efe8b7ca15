"""Ids of texts become the tokens, lengths and counts of a data set."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.tokenized_chunk import pack


@pytest.mark.parametrize("eod_id", [None, 7])
@pytest.mark.parametrize("seed", range(40))
def test_ids_are_packed_wherever_there_is_room(seed: int, eod_id: int | None) -> None:
    draw = np.random.default_rng(seed)
    num_texts = draw.integers(0, 4, draw.integers(0, 12))
    sizes = [int(draw.choice([0, 1, 2, 30])) for _ in range(num_texts.sum())]
    ids = [draw.integers(0, 1000, size, np.uint32) for size in sizes]
    tokens: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    place = 0
    for number in num_texts.tolist():
        filled = [one.tolist() for one in ids[place : place + number] if len(one)]
        place += number
        if filled and eod_id is not None:
            filled[-1].append(eod_id)
        tokens += [token for one in filled for token in one]
        lengths += [len(one) for one in filled]
        counts.append(len(filled))
    for num_free in {0, 1, max(len(tokens) - 1, 0), len(tokens), len(tokens) + 1, 1000}:
        room = np.full(3 + num_free, 9, np.uint16)
        stream = pack(iter(ids), num_texts, eod_id, room, 3)
        assert stream.tokens.dtype == np.uint16
        assert (stream.tokens.tolist(), stream.lengths.tolist(), stream.counts.tolist()) == (tokens, lengths, counts)
        assert room[:3].tolist() == [9, 9, 9]
        if stream.begin is not None:
            assert stream.begin == 3
            assert room[3 : 3 + len(tokens)].tolist() == tokens
        assert stream.begin is not None or num_free <= len(tokens)
