"""What preprocessing reads, and in which order it writes it."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, verify_checksums
from megatron.core.errors import DataError
from megatron.data.input_files import find_input
from megatron.data.leader import Progress
from megatron.data.tokenized_chunk import load_splitter

TOOL = Path(__file__).parents[3] / "tools" / "preprocess_data.py"
DRIVER = Path(__file__).with_name("preprocess_small_chunks.py")
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]


def preprocess(
    prefix: Path, *flags: object, stdin: bytes | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run with chunks of 300 bytes."""
    arguments = [sys.executable, str(DRIVER), "300", "--output-prefix", str(prefix), *map(str, flags)]
    environment = os.environ | (environment or {})
    return subprocess.run(arguments, input=stdin, capture_output=True, timeout=60, env=environment)


def documents(prefix: Path) -> list[list[list[int]]]:
    """Read each document as a list of sequences."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [[dataset[i].tolist() for i in range(*pair)] for pair in itertools.pairwise(bounds)]


def write_ids(path: Path, texts: list[str]) -> bytes:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(data)
    return data


@pytest.fixture
def texts() -> list[str]:
    draw = np.random.default_rng(3)
    return [" ".join(map(str, draw.integers(0, 127, draw.integers(0, 30)))) for _ in range(101)]


@pytest.mark.full
def test_plain_compressed_and_piped_files_give_the_same(tmp_path: Path, texts: list[str]) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    data = write_ids(tmp_path / "all.jsonl", texts)
    cuts = [data.index(b"\n", 900) + 1, data.index(b"\n", 2500) + 1]
    parts = [data[: cuts[0]], data[cuts[0] : cuts[1]].rstrip(b"\n"), data[cuts[1] :]]
    (tmp_path / "a.jsonl").write_bytes(parts[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(parts[1]))
    frames = [zstandard.compress(parts[2][:500]), zstandard.compress(parts[2][500:])]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(frames))
    assert preprocess(tmp_path / "whole", *NULL, "--input", tmp_path / "all.jsonl").returncode == 0
    ways: list[tuple[list[object], bytes | None]] = [
        ([tmp_path / "[abc].jsonl*"], None),
        ([tmp_path / "a.jsonl", "-", tmp_path / "c.*"], parts[1]),
        (["-"], data),
    ]
    for number, (inputs, stdin) in enumerate(ways):
        prefix = tmp_path / f"way{number}"
        done = preprocess(prefix, *NULL, "--workers", 3, "--input", *inputs, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, b"")
        for suffix in (".bin", ".idx"):
            ours, whole = (Path(f"{p}_text_document{suffix}").read_bytes() for p in (prefix, tmp_path / "whole"))
            assert ours == whole


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_file_is_named(tmp_path: Path, texts: list[str], suffix: str) -> None:
    data = write_ids(tmp_path / "all.jsonl", texts)
    compress = gzip.compress if suffix == ".gz" else pytest.importorskip("zstandard").compress
    source = tmp_path / f"half.jsonl{suffix}"
    source.write_bytes(compress(data)[:-40])
    done = preprocess(tmp_path / "out", *NULL, "--input", source)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {source}".encode())
    assert done.stderr.count(b"\n") == 1
    assert not list(tmp_path.glob("out_*"))


def test_lines_of_several_files_are_numbered_in_their_own(tmp_path: Path, texts: list[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(
            write_ids(tmp_path / "x", texts[:40]) + b'{"text": "999"}\n\n{"t": 1}\n'
        )
    done = preprocess(tmp_path / "out", *NULL, "--input", tmp_path / "[ab].jsonl", "--on-error", "skip", "--workers", 2)
    assert done.returncode == 0
    messages = [line.partition(": ")[0] for line in done.stderr.decode().splitlines()]
    assert messages == [f"{tmp_path / name}.jsonl:{line}" for name in ("a", "b") for line in (41, 43)]
    assert b"80 documents" in done.stdout
    assert b"4 lines skipped" in done.stdout
    expected = [[list(map(int, text.split()))] if text else [] for text in texts[:40] * 2]
    assert documents(tmp_path / "out_text_document") == expected


def test_partitions_lay_documents_out_as_megatron_does(tmp_path: Path, texts: list[str]) -> None:
    write_ids(tmp_path / "all.jsonl", texts)
    flags = [*NULL, "--append-eod", "--partitions", 3, "--input", tmp_path / "all.jsonl"]
    assert preprocess(tmp_path / "out", *flags, "--workers", 2).returncode == 0
    order = [text for partition in range(3) for text in texts[partition::3]]
    expected = [[[*map(int, text.split()), 127]] if text else [] for text in order]
    assert documents(tmp_path / "out_text_document") == expected
    assert list(verify_checksums(tmp_path / "out_text_document")) == []
    assert preprocess(tmp_path / "kept", *flags, "--keep-sequential-samples", "--no-checksums").returncode == 0
    expected = [[[*map(int, text.split()), 127]] if text else [] for text in texts]
    assert documents(tmp_path / "kept_text_document") == expected
    assert not (tmp_path / "kept_text_document.checksums.json").exists()


@pytest.mark.full
def test_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk", reason="nltk is not installed")
    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (folder / name).write_text("")  # what a model knows that has seen no text
    source = tmp_path / "x.jsonl"
    source.write_text(json.dumps({"text": "Hello there. It is me.\n\nWho? You."}) + "\n")
    vocab, merges = write_byte_vocabulary(tmp_path)
    flags = ["--input", source, "--vocab-file", vocab, "--merge-file", merges, "--append-eod", "--split-sentences"]
    done = preprocess(tmp_path / "out", *flags, environment={"NLTK_DATA": str(tmp_path / "nltk")})
    assert (done.returncode, done.stderr) == (0, b"")
    (found,) = documents(tmp_path / "out_text_sentence")
    assert [len(ids) for ids in found] == [len(one) for one in ("Hello there.", "It is me.", "Who?", "You.!")]
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    kept = load_splitter("english", keep_newlines=True)("Hello there. It is me.\n\nWho? You.")
    assert kept == ["Hello there. ", "It is me.\n\n", "Who? ", "You."]
    with pytest.raises(DataError, match="--lang klingon: nltk's data of that language is not on this machine"):
        load_splitter("klingon", keep_newlines=False)


def write_byte_vocabulary(folder: Path) -> tuple[Path, Path]:
    """Write a vocabulary of single bytes."""
    from megatron.core.tokenizers.gpt2_bpe_tokenizer import byte_characters

    vocabulary = {character: number for number, character in enumerate(byte_characters())} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder / "vocab.json", folder / "merges.txt"


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "x.jsonl.zst"
    source.write_bytes(b"")
    for package in ("zstandard", "nltk", "nltk.tokenize.punkt"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match="pip install zstandard"):
        find_input([str(source)])
    with pytest.raises(DataError, match="pip install nltk"):
        load_splitter("english", False)


def test_progress_says_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    progress = Progress(7_200_000_000, 10, lambda: now)
    for _ in range(4):
        now += 0.5
        progress.add(6, 1_500_000, 1_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Processed 12 documents (12.0 docs/s, 3.00 MB/s), 0:59:59 left.",
        "Processed 24 documents (12.0 docs/s, 3.00 MB/s), 0:59:58 left.",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_workers", "num_ids", "suffix"),
    [(4, 257, ""), (4, 70_000, ".gz"), (8, 70_000, "")],
    ids=["four", "four-int32-packed", "eight-int32"],
)
def test_memory_is_bounded(num_workers: int, num_ids: int, suffix: str, tmp_path: Path) -> None:
    """Hardly any word comes twice, which is what makes the memory of an engine grow."""
    vocab, merges = write_byte_vocabulary(tmp_path)
    ids = json.loads(vocab.read_text())
    vocab.write_text(json.dumps(ids | {f"<{number}>": number for number in range(len(ids), num_ids)}))
    draw = np.random.default_rng(1)
    source = tmp_path / f"big.jsonl{suffix}"
    with gzip.open(source, "wt", 1, "ascii") if suffix else open(source, "w", encoding="ascii") as file:
        for _ in range(1600):
            letters = draw.integers(97, 123, 250_000, dtype=np.uint8)
            letters[draw.integers(0, len(letters), len(letters) // 8)] = 32
            file.write(json.dumps({"text": letters.tobytes().decode("ascii")}) + "\n")
    arguments = [sys.executable, str(TOOL), "--input", str(source), "--output-prefix", str(tmp_path / "out")]
    arguments += ["--vocab-file", str(vocab), "--merge-file", str(merges), "--workers", str(num_workers)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            leader = psutil.Process(process.pid)
            tree = [leader, *leader.children()]
            peak = max(peak, sum(one.memory_full_info().pss for one in tree))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.1)
    assert process.returncode == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1600
    assert 100 << 20 < peak < (1 << 30) + max(num_workers - 4, 0) * 205 * (1 << 20), peak >> 20
