"""How far the building of indices is told to be."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.core.datasets.index_builder import CountedIndexBuilder


class Builder:
    """Stand for an index builder: each index is its arguments."""

    name = "stand-in"

    def __getattr__(self, name: str) -> Any:
        return lambda *words: (name, *words)


def test_a_data_set_is_half_done_when_its_samples_are_found() -> None:
    told: list[tuple[str, int, int]] = []
    counted = CountedIndexBuilder(Builder(), lambda *words: told.append(words))
    lengths = documents = np.zeros(1, np.int32)
    counted.sample_index(lengths, documents, 4, 100)
    assert told == []
    counted.begin("train", 100)
    counted.next_data_set(61)
    counted.sample_index(lengths, documents, 4, 61)
    counted.next_data_set(59)
    counted.sample_index(lengths, documents, 4, 59)
    counted.next_data_set(0)
    counted.end()
    assert told == [("train", done, 100) for done in (0, 0, 30, 61, 90, 100, 100)]
    counted.next_data_set(5)
    counted.begin("valid", 7)
    assert told[7:] == [("valid", 0, 7)]


def test_the_indices_are_those_of_the_other_builder() -> None:
    counted = CountedIndexBuilder(Builder(), lambda *words: None)
    ids, weights, state = np.zeros(1, np.int32), np.ones(2), np.random.RandomState(3)
    assert counted.name == "stand-in"
    assert counted.document_index(ids, 2, state, True) == ("document_index", ids, 2, state, True)
    assert counted.document_index(ids, 2, state)[-1] is False
    assert counted.sample_index(ids, ids, 4, 9) == ("sample_index", ids, ids, 4, 9)
    assert counted.shuffle_index(5, 9, state) == ("shuffle_index", 5, 9, state)
    assert counted.blending_indices(weights, 8) == ("blending_indices", weights, 8)
    assert counted.exhaustive_blending_indices(ids) == ("exhaustive_blending_indices", ids)
