"""What preprocessing reads, in which order it writes it, and corpora of every kind of file."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.cli import preprocess_data
from megatron.core.datasets.indexed_dataset import IndexedDataset, verify_checksums
from megatron.core.errors import DataError
from megatron.data.input_files import cut_text, find_input
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
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(parts[1], mtime=0))
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
    with pytest.raises(DataError, match="--lang klingon: nltk's data for this language is not on this node"):
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
        "Processed 12 documents (12.0 docs/s, 3.00 MB/s). 0:59:59 left.",
        "Processed 24 documents (12.0 docs/s, 3.00 MB/s). 0:59:58 left.",
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


TEXTS = [f"{n} {n + 1}\n{n % 7}" if n % 5 else "" for n in range(40)]
EXPECTED = [[list(map(int, text.split()))] if text else [] for text in TEXTS]


def write_jsonl(path: Path, key: str = "body") -> Path:
    path.write_bytes(b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(TEXTS)))
    return path


def write_compressed(folder: Path) -> list[Path]:
    data = write_jsonl(folder / "x").read_bytes()
    paths = []
    for suffix, compress in ((".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)):
        paths.append(folder / f"part.jsonl{suffix}")
        paths[-1].write_bytes(compress(data))
    return paths


def write_parquet(folder: Path) -> list[Path]:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: requirements/dev.txt has it")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(len(TEXTS))), "body": [text or None for text in TEXTS]})
    parquet.write_table(table, folder / "part.parquet", row_group_size=7)
    return [folder / "part.parquet"]


def write_arrow(folder: Path) -> list[Path]:
    """Write the folder that Hugging Face's datasets saves, its parts not in the order of their names."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: requirements/dev.txt has it")
    half = len(TEXTS) // 2
    for name, texts in (("b.arrow", TEXTS[:half]), ("a.arrow", TEXTS[half:])):
        batch = arrow.record_batch({"body": texts})
        make = arrow.ipc.new_stream if name == "b.arrow" else arrow.ipc.new_file
        with arrow.OSFile(str(folder / name), "wb") as sink, make(sink, batch.schema) as writer:
            writer.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}))
    (folder / "README.md").write_text("no ids")
    return [folder]


def write_texts(folder: Path) -> list[Path]:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.{'md' if number % 2 else 'txt'}").write_text(text)
    return [folder]


def write_tar(folder: Path) -> list[Path]:
    with tarfile.open(folder / "part-000.tar", "w") as archive:
        for number, text in enumerate(TEXTS):
            as_json = json.dumps({"body": text}).encode()
            for suffix, content in (("cls", b"3"), ("body", text.encode())) if number % 2 else (("json", as_json),):
                member = tarfile.TarInfo(f"train/{number:04}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return [folder / "part-000.tar"]


@pytest.mark.default(1)
@pytest.mark.parametrize("write", [write_compressed, write_parquet, write_arrow, write_texts, write_tar])
def test_every_kind_of_file_gives_the_same_tokens_whatever_the_workers(write, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    inputs = write(tmp_path / "corpus")
    outputs = []
    for workers in (1, 3):
        prefix = tmp_path / f"out{workers}"
        done = preprocess(prefix, *NULL, "--text-key", "body", "--workers", workers, "--input", *inputs)
        assert (done.returncode, done.stderr) == (0, b"")
        assert documents(Path(f"{prefix}_body_document")) == EXPECTED * (
            len(inputs) if write is write_compressed else 1
        )
        outputs.append([Path(f"{prefix}_body_document{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert outputs[0] == outputs[1]


@pytest.mark.full
def test_rows_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that holds no ids stops the first run; the second one goes on behind what was done, and says the same."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: requirements/dev.txt has it")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": [*TEXTS, "no id", *TEXTS]}), tmp_path / "x.parquet")
    flags = [*NULL, "--input", tmp_path / "x.parquet"]
    for _ in range(2):
        stopped = preprocess(tmp_path / "out", *flags)
        assert stopped.returncode == 2
        assert f"{tmp_path}/x.parquet:41: NullTokenizer reads token ids".encode() in stopped.stderr
    assert b"Resuming in" in stopped.stdout
    assert preprocess(tmp_path / "out", *flags, "--restart", "--on-error", "skip").returncode == 0
    assert documents(tmp_path / "out_text_document") == EXPECTED * 2


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "1"}\n{"text": "2"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + b'{"text": "3"}\n', mtime=0))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf4")
    inputs = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]
    assert preprocess(tmp_path / "out", *NULL, "--input", *inputs).returncode == 0
    assert list(itertools.chain(*documents(tmp_path / "out_text_document"))) == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "1"}\n'.encode("utf-16"),
            ("x.jsonl is encoded in UTF-16, but UTF-8 is expected; convert it: iconv -f"),
        ),
        ('{"text": "1"}\n'.encode("utf-16-le"), "x.jsonl is encoded in UTF-16LE"),
        (b'{"text": "caf\xe9"}\n', "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"),
        (
            b"Once upon a time\n",
            "x.jsonl:1: not a JSON line: Expecting value: line 1 column 1 (char 0); if it is plain text",
        ),
        (b'[\n{"text": "1"}', "x.jsonl, item 1: not a JSON array: expected ,, found the end of the file"),
        (b"PAR1 and no more", "x.jsonl cannot be read as parquet"),
    ],
)
def test_what_is_no_jsonl_is_named_with_the_way_on(content: bytes, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    flags = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out"), *NULL, "--workers", "1"]
    assert preprocess_data.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_json_array_is_read_item_by_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array = json.dumps([{"text": str(number)} for number in range(5)], indent=1).encode()
    (tmp_path / "a.json").write_bytes(array)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(array, mtime=0))
    words = [*NULL, "--workers", "1", "--output-prefix", str(tmp_path / "out"), "--input"]
    assert preprocess_data.main([*words, str(tmp_path / "b.json.gz"), "--input-format", "jsonl"]) == 2
    assert "pass --input-format json to read a JSON array" in capsys.readouterr().err
    both = [str(tmp_path / name) for name in ("a.json", "b.json.gz")]
    assert preprocess_data.main([*words, *both]) == 0
    expected = [[number] for number in range(5)]
    assert list(itertools.chain(*documents(tmp_path / "out_text_document"))) == [*expected, *expected]
    assert preprocess_data.main([*words, both[0], "--overwrite"]) == 0
    assert list(itertools.chain(*documents(tmp_path / "out_text_document"))) == expected


LINE = b'{"text": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", b"Once upon a time\n", "text"),
        ("a.txt", b"[Illustration]\n", "text"),
        ("a.txt", b"\xef\xbb\xbf \n" + LINE, "jsonl"),
        ("a.txt.gz", gzip.compress(LINE, mtime=0), "jsonl"),
        ("a.md", b"[" + LINE + b"]", "json"),
        ("corpus", b"Once upon a time\n", "text"),
        ("corpus", gzip.compress(b"Once upon a time\n", mtime=0), "text"),
        ("corpus.dat", LINE, "jsonl"),
        ("corpus.dat", b"", "jsonl"),
        ("a.json", b"Once upon a time\n", "jsonl"),
        ("a.json", b'["1"]', "json"),
        ("a.json.bz2", bz2.compress(b"[" + LINE + b"]"), "json"),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)[:10], "jsonl"),
    ],
)
def test_the_content_tells_json_from_text(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (file,) = find_input([str(tmp_path / name)])
    assert file.kind == kind
    assert file.is_cut == (kind == "text")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("".join(f"{'word ' * (5 + i % 9)}\n{'end. ' * 6}\n \n" for i in range(600)), r"\n \n$"),
        ("".join(f"{'word ' * (5 + i % 9)}\n" for i in range(600)), r"\n$"),
        ("word " * 5000, " $"),
        ("\u5b57" * 20_000, "\u5b57$"),
    ],
)
def test_a_text_is_cut_into_documents_of_similar_length(text: str, end: str) -> None:
    documents = list(cut_text(text))
    assert "".join(documents) == text
    assert len(documents) == 100
    assert all(re.search(end, document) for document in documents)
    assert max(map(len, documents)) <= 1.6 * len(text) / 100
    assert [len(list(cut_text("a" * length))) for length in (0, 1, 150, 151, 1000)] == [0, 1, 1, 2, 10]


def test_a_single_text_is_cut_and_several_are_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [number % 100 for number in range(3000)]
    (tmp_path / "a.txt").write_text("\n\n".join(map(str, ids)))
    (tmp_path / "b.txt").write_text("7")
    words = [*NULL, "--workers", "1", "--overwrite", "--output-prefix", str(tmp_path / "out"), "--input"]
    assert preprocess_data.main([*words, str(tmp_path / "a.txt")]) == 0
    found = list(itertools.chain(*documents(tmp_path / "out_text_document")))
    number = len(found)
    assert 40 < number <= 100
    assert list(itertools.chain(*found)) == ids
    assert f"a.txt: 1 text, cut into {number} documents, at blank lines if it has enough\n" in capsys.readouterr().out
    assert preprocess_data.main([*words, str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 0
    assert list(itertools.chain(*documents(tmp_path / "out_text_document"))) == [ids, [7]]
    assert "cut into" not in capsys.readouterr().out


def test_the_member_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1")
    (tmp_path / "b.txt").write_bytes(b"2 \xe9")
    done = preprocess(tmp_path / "out", *NULL, "--input", tmp_path / "*.txt")
    assert done.returncode == 2
    assert f"error: {tmp_path}/b.txt: not UTF-8 text; byte 0xe9 is invalid (perhaps".encode() in done.stderr
    assert b"iconv -f WINDOWS-1252" in done.stderr


def test_folders_that_cannot_be_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"contains the splits train; select one: --input .*/train"):
        find_input([str(tmp_path)])
    with pytest.raises(DataError, match="contains no file of a known format"):
        find_input([str(tmp_path / "train")])
    (tmp_path / "train" / "x.txt").write_text("1")
    with pytest.raises(DataError, match=r"x.txt is a text file, but --json-keys has 2 keys"):
        find_input([str(tmp_path / "train")], ["a", "b"])
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        find_input([str(tmp_path / "x.parquet")])


def test_a_column_that_is_not_there_is_named(tmp_path: Path, capsys) -> None:
    (path,) = write_parquet(tmp_path)
    assert preprocess_data.main(["--input", str(path), "--output-prefix", str(tmp_path / "out"), *NULL]) == 2
    assert f"{path}: no column 'text' (found: id, body); change --json-keys" in capsys.readouterr().err


def test_the_data_set_of_a_folder_of_texts_has_a_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write_texts(tmp_path / "texts")
    assert preprocess(tmp_path / "out", *NULL, "--input", tmp_path / "texts").returncode == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == len(TEXTS)


def test_no_file_of_a_folder_is_passed_over_in_silence(tmp_path: Path, capsys) -> None:
    for name in ("corpus/a.jsonl", "corpus/b.csv", "corpus/wiki_00", "elsewhere/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "1 2"}\n')
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    corpus = tmp_path / "corpus"
    files = [Path(file.path) for file in find_input([str(corpus)])]
    assert files == [corpus / "a.jsonl", corpus / "link" / "c.jsonl"]
    assert f"Skipping 2 files of {corpus} " in (said := capsys.readouterr().out)
    assert f"({corpus / 'b.csv'}, {corpus / 'wiki_00'}): pass them in --input" in said
    assert len(find_input([str(corpus)], kind="jsonl")) == 4
    assert capsys.readouterr().out == ""


def test_an_empty_file_is_called_empty(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    assert (
        preprocess_data.main([*NULL, "--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "o")]) == 2
    )
    assert "x.jsonl contains no line or row; change --input" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [(b"PK\x03\x04\0\0", "is a zip archive"), (b"%PDF-1.7\n", "is a PDF")])
def test_what_holds_no_text_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        find_input([str(tmp_path / "x.jsonl")])
