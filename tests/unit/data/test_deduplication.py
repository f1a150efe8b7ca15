from __future__ import annotations

import random

import numpy as np
import pytest

from megatron.data.deduplication import SignatureMaker, shingles, similarity


def test_runs_of_words_without_case_and_punctuation() -> None:
    assert len(shingles("a b c d e f", 5)) == 2
    assert np.array_equal(shingles("a b c d e f", 5), shingles("A, b!  c d\ne-f", 5))
    assert not np.array_equal(shingles("a b c d e", 5), shingles("b a c d e", 5))
    assert len(shingles("a b", 5)) == 1
    assert len(shingles("a a a a a a a", 3)) == 1
    assert len(shingles(" … !", 5)) == 0
    assert len(shingles("你好世界今天天", 5)) == 3


def test_similarity_is_that_of_sets() -> None:
    a, b = shingles("a b c d e f", 2), shingles("b c d e f g h", 2)
    assert similarity(a, b) == pytest.approx(4 / 7)
    assert similarity(a, a) == 1
    assert similarity(a, shingles("", 2)) == 0


def test_sets_share_a_key_exactly_where_the_library_finds_them() -> None:
    datasketch = pytest.importorskip("datasketch", reason="the optional package datasketch is absent")
    draw = random.Random(4)
    base = [f"w{draw.randrange(90)}" for _ in range(120)]
    maker = SignatureMaker(0.7, 64)
    index = datasketch.MinHashLSH(num_perm=64, params=(maker.bands, maker.rows))
    keys, sketches = [], []
    for number in range(41):
        words = [word if draw.random() > number / 160 else f"x{draw.randrange(900)}" for word in base]
        hashes = shingles(" ".join(words), 3)
        sketch = datasketch.MinHash(64, seed=1, hashfunc=lambda value: int(value) >> 32, scheme="affine32")
        sketch.update_batch(hashes)
        index.insert(number, sketch)
        keys.append(set(maker.keys(hashes)))
        sketches.append(sketch)
    pairs = 0
    for number, sketch in enumerate(sketches):
        sharing = {other for other in range(41) if keys[number] & keys[other]}
        assert sharing == set(index.query(sketch))
        pairs += len(sharing)
    assert 41 < pairs < 41 * 41


def test_a_set_without_shingles_has_no_keys() -> None:
    pytest.importorskip("datasketch", reason="the optional package datasketch is absent")
    assert SignatureMaker(0.8, 128).keys(shingles("", 5)) == []
