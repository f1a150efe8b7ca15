from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.cli import inspect_dataset
from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    checksums_path,
    write_checksums,
)
from megatron.data.dataset_inspection import count_tokens, describe_ends, describe_lengths, document_lengths

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "60")
BLOCK = 64


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 7 documents of 11 sequences, two documents empty, most ending with 0, in blocks of 64 bytes."""
    monkeypatch.setattr(indexed_dataset, "CHECKSUM_BLOCK_BYTES", BLOCK)
    prefix = tmp_path / "data"
    draw = np.random.default_rng(3)
    with IndexedDatasetBuilder(prefix, "u2") as builder:
        for lengths in ([1], [3, 40], [], [2], [17, 5, 9], [], [64, 1, 70, 4]):
            tokens = draw.integers(1, 60, sum(lengths))
            if len(tokens) > 1:
                tokens[-1] = 0
            builder.add_document(tokens, lengths)
        builder.finalize()
    write_checksums(prefix)
    return prefix


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    status = inspect_dataset.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert captured.err.count("\n") == (status != 0)
    return status, captured.out.splitlines(), captured.err


def test_statistics_are_those_of_counting(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    lengths = document_lengths(dataset)
    assert lengths.tolist() == [1, 43, 0, 2, 31, 0, 139]
    described = describe_lengths(lengths)
    bins = [(entry.low, entry.high, entry.documents, entry.tokens) for entry in described.histogram if entry.documents]
    assert bins == [(0, 0, 2, 0), (1, 1, 1, 1), (2, 3, 1, 2), (16, 31, 1, 31), (32, 63, 1, 43), (128, 255, 1, 139)]
    assert (described.empty, described.maximum, described.percentiles[50]) == (2, 139, 2)
    assert described.mean == pytest.approx(216 / 7)
    tokens = [token for sequence in range(len(dataset)) for token in dataset[sequence].tolist()]
    counted = count_tokens(dataset)
    assert {token: count for token, count in enumerate(counted.counts) if count} == Counter(tokens)
    assert counted.top(3) == sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))[:3]
    assert counted.num_from(30) == sum(token >= 30 for token in tokens)
    shares = np.array(list(Counter(tokens).values())) / len(tokens)
    assert counted.entropy_bits == pytest.approx(-(shares * np.log2(shares)).sum())
    ends = describe_ends(dataset)
    assert ends is not None
    assert (ends.token, ends.documents, ends.filled) == (0, 4, 5)


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8"])
def test_ids_that_cannot_be_are_counted(tmp_path: Path, dtype: str) -> None:
    ids = [7, 7, 250] if dtype == "u1" else [7, 7, 250, -1, 1 << 24]
    with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
        builder.add_document(ids)
        builder.finalize()
    counted = count_tokens(IndexedDataset(tmp_path / "data"))
    assert counted.top(9) == [(7, 2), (250, 1)]
    assert counted.outside == len(ids) - 3
    assert counted.num_from(250) == len(ids) - 2


def test_what_is_printed(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--documents", 3, "--samples", 2, "--max-tokens", 5, "--top-tokens", 1, "--json", tmp_path / "s.json")
    status, lines, _ = run(capsys, f"{prefix}.idx", *flags, *NULL)
    assert status == 0
    text = "\n".join(lines)
    assert lines[0] == str(prefix)
    assert "  tokens     216 (uint16, 0.00 MB)" in lines
    assert "  documents  7 (2 of them empty)" in lines
    assert "  sequences  11 (1.57 per document)" in lines
    assert "  checksums  data.checksums.json" in lines
    assert "    mean 30.9, smallest 0, largest 139" in lines
    assert "16 to            31             1 documents  14.35 % of tokens ####################" in text
    assert '  ends       4 of 5 documents that are not empty end with 0 "0"' in lines
    assert "vocabulary 61 ids (NullTokenizer); 0 tokens are outside this vocabulary" in text
    dataset = IndexedDataset(prefix)
    at = lines.index("  document 3: 2 tokens in 1 sequences")
    assert lines[at + 1] == f'    "{dataset[3][0]} {dataset[3][1]}"'
    assert text.count("  document ") == 3
    (content,) = json.loads((tmp_path / "s.json").read_text())
    assert (content["tokens"], content["documents"]["empty"]) == (216, 2)
    assert run(capsys, prefix, "--documents", 6, "--max-tokens", 5, "--index-only")[1][-2:] == [
        "  document 6: 139 tokens in 4 sequences, the first 5 shown",
        f"    {' '.join(str(token) for token in dataset[7][:5])}",
    ]
    assert run(capsys, prefix, "--samples", 2)[1] == run(capsys, prefix, "--samples", 2)[1]


def test_an_intact_data_set_is_said_to_be(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, prefix, "--verify") == (0, [f"{prefix} is intact"], "")
    checksums_path(prefix).unlink()
    status, lines, _ = run(capsys, prefix, "--verify")
    assert (status, len(lines)) == (0, 2)
    assert lines[0].endswith("does not exist: only the structure was verified, not the tokens")
    assert run(capsys, prefix, "--write-checksums")[0] == 0
    assert run(capsys, prefix, "--verify")[1] == [f"{prefix} is intact"]


def test_every_flipped_byte_is_named(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = IndexedDataset(prefix)
    starts, ends = dataset.sequence_pointers, dataset.sequence_pointers + 2 * dataset.sequence_lengths
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for position in range(0, len(whole), 3):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
            status, lines, error = run(capsys, prefix, "--verify")
            assert status == 2
            assert f"damaged: {prefix} (" in error
            start = position // BLOCK * BLOCK
            assert lines[0].startswith(f"damaged: {path}: bytes {start} to {min(start + BLOCK, len(whole))}: CRC-32 ")
            if suffix == ".bin":
                named = [int(word) for word in lines[0].split("(sequences ")[1].split(",")[0].split(" to ")]
                inside = [i for i in range(len(starts)) if starts[i] < start + BLOCK and ends[i] > start]
                assert named == [inside[0], inside[-1]]
                assert len(lines) == 1
        path.write_bytes(whole)


def test_several_damages_are_all_named(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    for position in (5, 70, 431):
        data[position] ^= 16
    path.write_bytes(data)
    status, lines, error = run(capsys, prefix, "--verify")
    assert status == 2
    assert [line.split(": ")[2] for line in lines] == ["bytes 0 to 64", "bytes 64 to 128", "bytes 384 to 432"]
    assert "(sequences 9 to 10, documents 6 to 6)" in lines[2]
    assert "(3 faults)" in error
    path.write_bytes(data[:300])
    status, lines, _ = run(capsys, prefix, "--verify")
    assert status == 2
    assert any("missing: the file ends after 300 of 432 bytes" in line for line in lines)


def test_tokens_outside_the_vocabulary_are_faults(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, prefix, "--verify", *NULL)[0] == 0
    status, lines, _ = run(capsys, prefix, "--verify", "--tokenizer-type", "NullTokenizer", "--vocab-size", "40")
    assert status == 2
    assert "tokens are outside the tokenizer's 41 ids" in lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["absent"], "does not exist"),
        (["absent", "--verify"], "does not exist"),
        (["data", "--documents", "7"], "--documents 7 is out of range"),
        (["data", "--samples", "-1", "--max-tokens", "-2"], "--samples -1 is negative; --max-tokens -2 is negative"),
        (["data", "--tokenizer-type", "Nonsense"], "Nonsense"),
        (["data", "--json", "absent/file"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = run(capsys, *flags)
    assert status == 2
    assert message in error


def test_damaged_checksums_and_indices_are_one_line(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checksums_path(prefix).write_text("{")
    status, _, error = run(capsys, prefix, "--verify")
    assert (status, "checksums.json is damaged" in error) == (2, True)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[34] ^= 1
    Path(f"{prefix}.idx").write_bytes(index)
    status, _, error = run(capsys, prefix)
    assert (status, "is damaged at sequence 1" in error) == (2, True)


def test_an_empty_data_set_has_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", "i4") as builder:
        builder.finalize()
    write_checksums(tmp_path / "data")
    assert run(capsys, tmp_path / "data", "--samples", 3)[0] == 0
    assert run(capsys, tmp_path / "data", "--verify")[0] == 0
