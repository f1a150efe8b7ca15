"""Data sets are merged, and token files of other programs become data sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.cli import merge_datasets
from megatron.cli.merge_datasets import main, merge
from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    checksums_path,
    verify_checksums,
)
from megatron.core.errors import DataError
from megatron.data import token_shards
from tests.unit.core.datasets.oracles import copy_documents


def write_parts(folder: Path, modes: bool, dtypes: tuple[str, ...] = ("u2", "u2", "u2", "u2")) -> list[Path]:
    """Write data sets of 0 to 12 documents of several sequences each."""
    folder.mkdir()
    draw = np.random.default_rng(2)
    prefixes = []
    for number, (dtype, num_documents) in enumerate(zip(dtypes, (7, 0, 12, 1))):
        prefixes.append(folder / f"part{number}")
        with IndexedDatasetBuilder(prefixes[-1], dtype, modes) as builder:
            for _ in range(num_documents):
                lengths = draw.integers(0, 9, draw.integers(0, 4)).tolist()
                tokens = draw.integers(0, 1000, sum(lengths))
                builder.add_document(tokens, lengths, [length % 3 for length in lengths] if modes else ())
            builder.finalize()
    return prefixes


@pytest.mark.parametrize("modes", [False, True])
def test_the_same_as_adding_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: bool) -> None:
    prefixes = write_parts(tmp_path / "parts", modes)
    with IndexedDatasetBuilder(tmp_path / "expected", "u2", modes) as builder:
        for prefix in prefixes:
            copy_documents(prefix, builder)
        builder.finalize()
    for piece_length in (5, 1 << 20):
        for module in (indexed_dataset, merge_datasets):
            monkeypatch.setattr(module, "PIECE_LENGTH", piece_length)
        merge(tmp_path / "parts", tmp_path / "merged", multimodal=modes)
        for suffix in (".bin", ".idx"):
            merged, expected = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("merged", "expected"))
            assert merged == expected
        assert list(verify_checksums(tmp_path / "merged")) == []
    merge(tmp_path / "parts", tmp_path / "merged", with_checksums=False)
    assert not checksums_path(tmp_path / "merged").exists()


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    write_parts(tmp_path / "dtypes", False, ("u2", "u2", "i4", "u2"))
    with pytest.raises(
        DataError,
        match=r"part2 contains int32 tokens, but .*part0 contains uint16",
    ):
        merge(tmp_path / "dtypes", tmp_path / "out")
    write_parts(tmp_path / "plain", False)
    with pytest.raises(DataError, match=r"--multimodal: .*part0 has no sequence modes"):
        merge(tmp_path / "plain", tmp_path / "out", multimodal=True)
    with pytest.raises(DataError, match="cannot be written"):
        merge(tmp_path / "plain", tmp_path / "missing" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dtypes", "plain"]


END = 50256
# The third shard begins within a document.
SHARDS = [np.array([5, 6, END, 7]), np.array([8, END]), np.array([9, 10, END, END, 11])]
DOCUMENTS = [[5, 6, END], [7, 8, END], [9, 10, END], [END], [11]]


def write_nanogpt(path: Path, tokens: NDArray[np.int64]) -> None:
    path.with_suffix(".bin").write_bytes(tokens.astype("<u2").tobytes())


def write_llm_c(path: Path, tokens: NDArray[np.int64]) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.with_suffix(".bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def write_olmo(path: Path, tokens: NDArray[np.int64]) -> None:
    """OLMo's files have the name of NumPy's, and no header."""
    path.with_suffix(".npy").write_bytes(tokens.astype("<u2").tobytes())


def write_numpy(path: Path, tokens: NDArray[np.int64]) -> None:
    np.save(path.with_suffix(".npy"), tokens.astype("<u4"))


def write_litdata(path: Path, tokens: NDArray[np.int64]) -> None:
    """Two items a shard, as optimize() writes them; the index lists the shards so far."""
    items = [part.astype("<i4").tobytes() for part in (tokens[:1], tokens[1:])]
    offsets = np.cumsum([16, *map(len, items)]).astype("<u4")
    file = path.with_suffix(".bin")
    file.write_bytes(np.array([2], "<u4").tobytes() + offsets.tobytes() + b"".join(items))
    index = path.parent / "index.json"
    content = json.loads(index.read_text()) if index.exists() else {"chunks": []}
    content["chunks"].append({"filename": file.name, "chunk_size": 2})
    content["config"] = {"compression": None, "data_format": ["no_header_tensor:16"]}
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c, write_olmo, write_numpy, write_litdata])
@pytest.mark.parametrize("piece_tokens", [2, 1 << 20])
def test_documents_are_cut_behind_their_ends_across_shards(
    write: Callable[[Path, NDArray[np.int64]], None],
    piece_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_shards, "_PIECE_TOKENS", piece_tokens)
    (tmp_path / "shards").mkdir()
    for number, tokens in enumerate(SHARDS):
        write(tmp_path / "shards" / f"part{number}", tokens)
    words = ["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "out"), "--eod-id", str(END)]
    assert main(words) == 0
    dataset = IndexedDataset(tmp_path / "out")
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == list(range(6))
    assert dataset.dtype == np.dtype("<i4" if write in (write_numpy, write_litdata) else "<u2")
    assert list(verify_checksums(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("write", "flags", "message"),
    [
        (write_nanogpt, [], "or pass --eod-id for nanoGPT or llm.c token files"),
        (
            write_litdata,
            [],
            ("does not mark where documents end; pass the id of the end-of-document token with --eod-id"),
        ),
        (write_nanogpt, ["--eod-id", "3"], "is 3; change --eod-id or --token-dtype"),
        (
            write_nanogpt,
            ["--eod-id", "3", "--token-dtype", "int64"],
            ("part0.bin has 10 bytes, which is not a multiple of the size of a int64"),
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    write: Callable[[Path, NDArray[np.int64]], None], flags: list[str], message: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "part0", np.arange(5, 10))
    assert main(["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]


def test_a_shard_that_is_cut_short_is_named(tmp_path: Path, capsys) -> None:
    write_llm_c(tmp_path / "x", SHARDS[0])
    file = tmp_path / "x.bin"
    file.write_bytes(file.read_bytes()[:-2])
    assert main(["--input", str(file), "--output-prefix", str(tmp_path / "out"), "--eod-id", str(END)]) == 2
    assert f"{file} contains 6 bytes, but its header says 8; copy it again" in capsys.readouterr().err


def test_pairs_beside_token_files_are_named(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_nanogpt(folder / "a", SHARDS[0])
    arguments = ["--eod-id", str(END), "--input", str(folder)]
    assert main([*arguments, "--output-prefix", str(folder / "b")]) == 0
    capsys.readouterr()
    assert main([*arguments, "--output-prefix", str(tmp_path / "out")]) == 0
    assert f"Skipping 1 .bin/.idx pairs in {folder}" in capsys.readouterr().out
    assert len(IndexedDataset(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (b"\x93NUMPYjunkjunk", ["--eod-id", "4"], "a.npy cannot be read as a NumPy file"),
        (b"1234", ["--eod-id", "4", "--multimodal"], "--multimodal has no effect on token files without .idx"),
        (b"1234", ["--token-dtype", "int64"], "--token-dtype int64 has no effect without --eod-id; add --eod-id"),
        (None, ["--eod-id", "4"], "contains no token files (.npy, or .bin without .idx)"),
        (None, ["--eod-id", "4", "--input", "/dev/null"], "/dev/null is neither a file nor a folder"),
    ],
)
def test_input_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys, content: bytes | None, flags: list[str], message: str
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    if content is not None:
        (folder / "a.npy").write_bytes(content)
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "out"), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
