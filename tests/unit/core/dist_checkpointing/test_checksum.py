"""The CRC-32 of a whole from those of its parts, against zlib's."""

from __future__ import annotations

import random
import zlib

import pytest

from megatron.core.dist_checkpointing.disk import join_checksums, partial_checksum


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 257, 4096, 100_003])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_join_to_the_checksum_of_the_whole(num_bytes: int, num_parts: int) -> None:
    rng = random.Random(num_bytes * 10 + num_parts)
    data = memoryview(rng.randbytes(num_bytes))
    cuts = sorted(rng.randrange(num_bytes + 1) for _ in range(20))
    runs = [(start, data[start:end]) for start, end in zip([0, *cuts], [*cuts, num_bytes])]
    parts = [partial_checksum(runs[part::num_parts], num_bytes) for part in range(num_parts)]
    assert join_checksums(parts, num_bytes) == f"{zlib.crc32(data):08x}"


def test_a_large_gap_is_crossed_without_its_bytes() -> None:
    gap = 3 * 2**20 + 7
    part = partial_checksum([(5, memoryview(b"abc")), (8 + gap, memoryview(b"de"))], gap + 12)
    assert join_checksums([part], gap + 12) == f"{zlib.crc32(bytes(5) + b'abc' + bytes(gap) + b'de' + bytes(2)):08x}"


@pytest.mark.parametrize("bit", range(0, 8 * 60, 7))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    data = bytearray(random.Random(3).randbytes(60))
    expected = f"{zlib.crc32(data):08x}"
    data[bit // 8] ^= 1 << bit % 8
    view = memoryview(data)
    parts = [partial_checksum([(start, view[start : start + 15])], 60) for start in range(0, 60, 15)]
    assert join_checksums(parts, 60) != expected
