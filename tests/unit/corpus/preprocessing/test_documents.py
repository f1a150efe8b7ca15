"""What is read of large files stays small, however many rows or members they have."""

from __future__ import annotations

import io
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from megatron.data.input_files import read_table, read_tar

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
