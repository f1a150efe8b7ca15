"""Where the input is cut, also behind what was done, and that little of large files is held in memory."""

from __future__ import annotations

import bz2
import io
import lzma
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.errors import DataError
from megatron.data import input_chunks
from megatron.data.input_chunks import Chunk, cut_input
from megatron.data.input_files import InputFile, find_input, read_table, read_tar

TEXTS = [f"{number} {'word ' * (number % 7)}" for number in range(90)]


def lines_of(texts: list[str]) -> bytes:
    return "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()


def tar_of(texts: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:03}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


PACKED = [
    pytest.param("x.jsonl.xz", lines_of, lzma.compress, id="jsonl.xz"),
    pytest.param("x.jsonl.bz2", lines_of, bz2.compress, id="jsonl.bz2"),
    pytest.param("x.tar", tar_of, bytes, id="tar"),
    pytest.param("x.tar.xz", tar_of, lzma.compress, id="tar.xz"),
    pytest.param("x.tar.bz2", tar_of, bz2.compress, id="tar.bz2"),
]
Pack = Callable[[list[str]], bytes]
Compress = Callable[[bytes], bytes]


def cut(files: list[InputFile], done: Chunk | None = None) -> list[Chunk]:
    return list(cut_input(files, 0 if done is None else done.number + 1, done))


@pytest.mark.parametrize(("name", "pack", "compress"), PACKED)
def test_packed_input_is_gone_on_with_behind_any_chunk(
    name: str, pack: Pack, compress: Compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_chunks, "CHUNK_BYTES", 300)
    path = tmp_path / name
    path.write_bytes(compress(pack(TEXTS)))
    files = find_input([str(path)])
    whole = cut(files)
    assert len(whole) > 5
    assert b"".join(chunk.data or b"" for chunk in whole) == lines_of(TEXTS)
    for done in whole:
        assert cut(files, done) == whole[done.number + 1 :]
    # Progress counts the bytes on disk, not those of the text.
    assert sum(chunk.source_bytes for chunk in whole) == path.stat().st_size
    path.write_bytes(compress(pack(["changed", *TEXTS[1:]])))
    with pytest.raises(DataError, match="does not contain the same text"):
        cut(files, whole[3])


@pytest.mark.parametrize(("name", "pack", "compress"), PACKED)
def test_packed_input_that_is_cut_short_is_named(name: str, pack: Pack, compress: Compress, tmp_path: Path) -> None:
    path = tmp_path / name
    packed = compress(pack(TEXTS))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=f"{name} cannot be read after"):
        cut(find_input([str(path)]))


@pytest.mark.parametrize("content", ["[1, 2]", "{bad", "{}", '{"_data_files": [3]}', '{"_data_files": []}'])
def test_a_state_that_is_no_data_sets_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(DataError, match=r"state\.json (is not the state.json|lists no data files)"):
        find_input([str(tmp_path)])


def test_standard_input_is_jsonl() -> None:
    assert find_input(["-"], kind="jsonl") == find_input(["-"])
    with pytest.raises(DataError, match="--input - is read as jsonl, but --input-format is tar"):
        find_input(["-"], kind="tar")


ROW_CHARACTERS, ROWS_OF_GROUP, GROUPS = 16_000, 64, 16


@pytest.mark.parametrize("rows_of_group", [ROWS_OF_GROUP, ROWS_OF_GROUP * GROUPS])
def test_a_parquet_file_is_in_memory_page_by_page(rows_of_group: int, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is absent")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw = random.Random(0)
    texts = [draw.randbytes(ROW_CHARACTERS // 2).hex() for _ in range(ROWS_OF_GROUP * GROUPS)]
    path = tmp_path / "rows.parquet"
    layout = {"row_group_size": rows_of_group, "write_batch_size": 16, "use_dictionary": False, "compression": "none"}
    parquet.write_table(arrow.table({"text": texts}), path, **layout)
    assert path.stat().st_size > len(texts) * ROW_CHARACTERS
    before = arrow.total_allocated_bytes()
    most, count = 0, 0
    for _ in read_table(str(path), "parquet", ["text"]):
        most, count = max(most, arrow.total_allocated_bytes() - before), count + 1
    assert count == len(texts)
    assert most < len(texts) * ROW_CHARACTERS // 2


def test_members_of_a_tar_are_forgotten() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(3000):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    packed.seek(0)
    tracemalloc.start()
    try:
        lines = read_tar(packed, ["text"])
        next(lines)
        before = tracemalloc.get_traced_memory()[0]
        assert sum(1 for _ in zip(lines, range(2000))) == 2000
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
