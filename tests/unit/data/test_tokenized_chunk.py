"""Ids of texts become tokens, lengths and counts, and parts written anywhere in a file make the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data import work_folder
from megatron.data.tokenized_chunk import pack
from megatron.data.work_folder import ALIGNMENT, PlacedFile, aligned_buffer


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


def cut(num_bytes: int, draw: np.random.Generator) -> list[tuple[int, int]]:
    """Cut a file into parts of all sizes, many of them smaller than a page, one larger than the buffer."""
    sizes = [3 << 20]
    while sum(sizes) < num_bytes:
        sizes.append(int(draw.choice([0, 1, 2, 777, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 50_000, 500_001])))
    draw.shuffle(sizes)
    ends = np.cumsum(sizes).clip(max=num_bytes).tolist()
    return list(zip([0, *ends], ends))


def write_parts(path: Path, content: NDArray[np.uint8], draw: np.random.Generator) -> list[PlacedFile]:
    """Write the parts in any order, each by one of three writers as three processes would, and return those."""
    path.touch()
    buffer = aligned_buffer()
    files = [PlacedFile(path, buffer) for _ in range(3)]
    parts = cut(len(content), draw)
    draw.shuffle(parts)
    for number, (begin, end) in enumerate(parts):
        files[number % 3].write(content[begin:end].data, begin)
    return files


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_make_the_file(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    content = draw.integers(0, 256, 9_000_001, np.uint8)
    for file in write_parts(tmp_path / "0.tokens", content, draw):
        file.close()
    assert (tmp_path / "0.tokens").read_bytes() == content.tobytes()


def test_a_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_folder, "_DIRECT", 0)
    draw = np.random.default_rng(7)
    content = draw.integers(0, 256, 5_000_000, np.uint8)
    for file in write_parts(tmp_path / "0.tokens", content, draw):
        file.close()
    assert (tmp_path / "0.tokens").read_bytes() == content.tobytes()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct writes")
@pytest.mark.parametrize("answer", ["refused", "cut short"])
def test_a_file_system_that_takes_no_direct_write(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    num_direct = 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal num_direct
        flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8)
        if not flags & os.O_DIRECT:
            return real(descriptor, data, offset)
        num_direct += 1
        if answer == "refused":
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data[:ALIGNMENT], offset) - 5  # as if it had ended within a page

    monkeypatch.setattr(os, "pwrite", pwrite)
    draw = np.random.default_rng(8)
    content = draw.integers(0, 256, 5_000_000, np.uint8)
    for file in write_parts(tmp_path / "0.tokens", content, draw):
        file.close()
    assert (tmp_path / "0.tokens").read_bytes() == content.tobytes()
    assert num_direct == 3  # one a writer, none after it


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct writes")
def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "0.tokens").touch()
    file = PlacedFile(tmp_path / "0.tokens", aligned_buffer())
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        file.write(memoryview(bytes(3 * ALIGNMENT)), 0)
    file.close()
