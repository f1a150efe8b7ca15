from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.cli import clean_dataset

TOOL = Path(__file__).parents[3] / "tools" / "clean_dataset.py"
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "97")
Refusal = Callable[..., str]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_texts(path: Path, *texts: str) -> Path:
    return write_lines(path, *({"text": text} for text in texts))


def clean(folder: Path, *arguments: object) -> list[dict[str, str]]:
    """Clean FOLDER/in.jsonl, or --input, and return what was kept."""
    output = folder / "out.jsonl"
    flags = [str(argument) for argument in arguments]
    source = [] if "--input" in flags else ["--input", str(folder / "in.jsonl")]
    assert clean_dataset.main([*source, "--output", str(output), "--workers", "1", *flags]) == 0
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def texts(records: list[dict[str, str]]) -> list[str]:
    return [record["text"] for record in records]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Give a call that expects one line, exit status 2 and no output file."""

    def refuse(*arguments: object) -> str:
        before = sorted(tmp_path.iterdir())
        flags = ["--output", tmp_path / "out.jsonl", "--workers", "1", *arguments]
        assert clean_dataset.main([str(flag) for flag in flags]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before
        return error

    return refuse


def test_a_folder_of_texts_becomes_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes("naïve\ntwo lines\n".encode())
    (folder / "a.TXT").write_bytes("\ufeffwith a mark".encode())
    (folder / "c.md.gz").write_bytes(gzip.compress(b"compressed"))
    (folder / "deep" / "utf16.txt").write_bytes("sixteen 你好".encode("utf-16"))
    (folder / "empty.txt").write_bytes(b" \n")
    (folder / "lines.jsonl").write_bytes(b'{"text":"a line",  "n":1e2}\r\n\n{"text":"another"}')
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_bytes(b"hidden")
    kept = clean(tmp_path, "--input", folder)
    assert kept == [
        {"text": "with a mark", "source": "a.TXT"},
        {"text": "naïve\ntwo lines\n", "source": "b.txt"},
        {"text": "compressed", "source": "c.md.gz"},
        {"text": "a line", "n": 100.0},
        {"text": "another"},
        {"text": "sixteen 你好", "source": "deep/utf16.txt"},
    ]
    assert b'{"text":"a line",  "n":1e2}\n' in (tmp_path / "out.jsonl").read_bytes()  # copied as it was
    printed = capsys.readouterr().out
    assert "skipped 1 files of other kinds" in printed
    assert "Read 7 documents" in printed
    assert "dropped 1 (14.29 %, 0.00 MB): no text" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "texts"]


def test_an_output_in_the_folder_that_is_read_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert texts(clean(tmp_path, "--input", tmp_path, "--dropped-output", tmp_path / "dropped.jsonl")) == ["a"]
    assert "other kinds" not in capsys.readouterr().out
    assert clean_dataset.main(["--input", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]) == 2


def test_zstandard_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the optional package zstandard is absent")
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "one"}\n') + zstandard.compress(b'{"text": "two"}\n'))
    assert texts(clean(tmp_path, "--input", path)) == ["one", "two"]
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    assert clean_dataset.main(["--input", str(path), "--output", str(tmp_path / "new.jsonl"), "--workers", "1"]) == 2


def test_texts_in_another_encoding(tmp_path: Path, refused: Refusal) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"first\nna\xefve")
    assert f"{path}:2: not utf-8 text" in refused("--input", path)
    assert "--input-encoding nonsense is not known" in refused("--input", path, "--input-encoding", "nonsense")
    assert texts(clean(tmp_path, "--input", path, "--input-encoding", "cp1252")) == ["first\nnaïve"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not a JSON line"),
        (b'{"text": "caf\xe9"}', "not a JSON line"),
        (b"[" * 100_000, "not a JSON line"),
        (b"[1]", "a JSON object is expected, but the line contains list"),
        (b'{"body": "x"}', "no key 'text' (found: body); change --text-key"),
        (b'{"text": 7}', "'text' contains int; a string is expected"),
        (b'{"text": "x", "url": 7}', "'url' contains int; a string is expected"),
        (b'{"text": "\\ud83d"}', "'text' contains half a surrogate pair; add --fix-encoding"),
        (b'{"text": "' + b"x" * 200_000 + b'"}', "longer than --max-document-bytes 100001"),
    ],
)
def test_a_bad_line_is_named_or_skipped(
    tmp_path: Path, refused: Refusal, capsys: pytest.CaptureFixture[str], line: bytes, message: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}\n')
    flags = ("--input", path, "--max-document-bytes", "100001")
    error = refused(*flags)
    assert f"{path}:3: " in error
    assert message in error
    assert texts(clean(tmp_path, *flags, "--on-error", "skip")) == ["good", "last"]
    captured = capsys.readouterr()
    assert f"skipped {path}:3: " in captured.err
    assert "skipped 1 that could not be read" in captured.out


def test_flags_without_effect_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    flags = ["--similarity", "0.3", "--vocab-file", "v", "--url-key", "u", "--min-language-probability", "0.5"]
    clean(tmp_path, "--input", source, *flags)
    assert capsys.readouterr().err.splitlines() == [
        "--vocab-file has no effect without --min-tokens",
        "--min-language-probability has no effect without --language",
        "--url-key has no effect without --url-blacklist",
        "--similarity has no effect without --deduplicate near",
    ]


def test_wrong_usage_is_said_in_one_line(tmp_path: Path, refused: Refusal) -> None:
    path = write_texts(tmp_path / "in.jsonl", "a")
    error = refused("--input", path, "--workers", "0", "--similarity", "1.5", "--min-tokens", "-1")
    assert "--workers 0 is not positive; --min-tokens -1 is negative; --similarity 1.5" in error
    assert "no file matches" in refused("--input", tmp_path / "absent*")
    assert "more than once" in refused("--input", path, path)
    assert "must be different" in refused("--input", path, "--report", tmp_path / "out.jsonl")
    assert "--vocab-file" in refused("--input", path, "--min-tokens", "3")  # GPT-2's without its files
    assert f"it is in {tmp_path}" in refused("--input", tmp_path, path)
    empty = tmp_path / "folder"
    empty.mkdir()
    assert "contains no file" in refused("--input", empty)
    output = write_texts(empty / "old.jsonl", "b")
    assert "is one of the input files" in refused("--input", empty, "--output", output)


@pytest.mark.parametrize(
    ("flags", "package"),
    [
        (("--fix-encoding",), "ftfy"),
        (("--language", "en"), "py3langid"),
        (("--deduplicate", "near"), "datasketch"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.langid", None)
    error = refused("--input", write_texts(tmp_path / "in.jsonl", "a"), *flags)
    assert f"{flags[0]} " in error
    assert f"pip install {package}" in error


def test_encodings_are_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ftfy", reason="the optional package ftfy is absent")
    write_lines(
        tmp_path / "in.jsonl",
        {"id": 1, "text": "schÃ¶n, dass die StraÃŸe", "url": "u"},
        {"id": 2, "text": "plain"},
        {"id": 3, "text": "half \ud83d pair"},
    )
    kept = clean(tmp_path, "--fix-encoding")
    assert kept[0] == {"id": 1, "text": "schön, dass die Straße", "url": "u"}
    assert texts(kept)[1:] == ["plain", "half \ufffd pair"]
    assert "repaired the encoding of 2" in capsys.readouterr().out


def test_short_documents_go(tmp_path: Path) -> None:
    lengths = [0, 1, 6, 7, 8, 13, 14, 15, 400]
    write_texts(tmp_path / "in.jsonl", *(" ".join(["5"] * length) for length in lengths))
    kept = clean(tmp_path, "--min-tokens", 7, *NULL)
    assert [len(text.split()) for text in texts(kept)] == [length for length in lengths if length >= 7]


def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path: Path, refused: Refusal) -> None:
    path = write_texts(tmp_path / "in.jsonl", "5 5", "five")
    assert f"{path}:2: " in refused("--input", path, "--min-tokens", 1, *NULL)


@pytest.mark.full
def test_languages_are_filtered(tmp_path: Path, refused: Refusal) -> None:
    pytest.importorskip("py3langid", reason="the optional package py3langid is absent")
    english = "The quick brown fox jumps over the lazy dog and runs back into the forest."
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft zurück in den Wald."
    french = "Le renard brun saute par-dessus le chien paresseux et retourne dans la forêt."
    path = write_texts(tmp_path / "in.jsonl", english, german, french)
    assert texts(clean(tmp_path, "--language", "en", "fr")) == [english, french]
    assert texts(clean(tmp_path, "--language", "en", "--min-language-probability", "1")) == []
    assert "--language xx is not known; possible values:" in refused("--input", path, "--language", "en", "xx")


def test_urls_are_blacklisted(tmp_path: Path, refused: Refusal, capsys: pytest.CaptureFixture[str]) -> None:
    blacklist = tmp_path / "blacklist.txt"
    blacklist.write_text("# comment\n\nbad.com\nhttps://www.Mixed.org/members/\nshop.net/item?id=3\nbücher.de\n")
    urls = {
        "http://bad.com": False,
        "https://sub.bad.com:8080/page": False,
        "bad.com/page": False,
        "https://notbad.com/": True,
        "https://bad.com.example/": True,
        "http://mixed.org/members": False,
        "https://www.mixed.org/members/7?x#y": False,
        "https://mixed.org/membership": True,
        "https://mixed.org/": True,
        "http://shop.net/item?id=3#top": False,
        "http://shop.net/item?id=31": True,
        "http://xn--bcher-kva.de/a": False,
        "http://[::1": False,
        "": False,
    }
    path = write_lines(tmp_path / "in.jsonl", *({"text": url or "x", "url": url} for url in urls), {"text": "none"})
    kept = clean(tmp_path, "--url-blacklist", blacklist, "--dropped-output", tmp_path / "dropped.jsonl")
    assert [record.get("url") for record in kept] == [*(url for url, good in urls.items() if good), None]
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert dropped[1] == {
        "document": f"{path}:2",
        "reason": "URL on the blacklist",
        "detail": "https://sub.bad.com:8080/page (bad.com)",
    }
    assert "1 had no URL" in capsys.readouterr().out
    blacklist.write_text("bad.com\nno host\n")
    for name in ("dropped.jsonl", "out.jsonl"):
        (tmp_path / name).unlink()
    assert f"{blacklist}:2: 'no host' is neither" in refused("--input", path, "--url-blacklist", blacklist)


def test_exact_duplicates_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "in.jsonl", "a b", "c", " a b\n", "A b", "c", "")
    report = tmp_path / "report.json"
    assert texts(clean(tmp_path, "--deduplicate", "exact", "--report", report)) == ["a b", "c", "A b"]
    assert "dropped 2 (33.33 %, 0.00 MB): exact duplicate" in capsys.readouterr().out
    counts = json.loads(report.read_text())
    assert counts["dropped"] == {"no text": 1, "exact duplicate": 2}
    assert (counts["documents"], counts["kept"]) == (6, 3)


def vary(words: list[str], num_changes: int, draw: random.Random) -> str:
    words = list(words)
    for place in draw.sample(range(len(words)), num_changes):
        words[place] = f"changed{draw.randrange(10**6)}"
    return " ".join(words)


def corpus(seed: int, families: int, variants: int) -> list[str]:
    """Write families of documents: near ones differ in one word of 150, far ones in 40."""
    draw = random.Random(seed)
    documents = []
    for _ in range(families):
        words = [f"w{draw.randrange(500)}" for _ in range(150)]
        documents.append(" ".join(words))
        documents += [vary(words, draw.choice((1, 40)), draw) for _ in range(variants - 1)]
    draw.shuffle(documents)
    return documents


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_near_duplicates_are_those_that_comparing_all_pairs_finds(tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="the optional package datasketch is absent")
    documents = corpus(5, families=13, variants=6)
    kept: list[str] = []
    for document in documents:
        runs = word_runs(document)
        if all(len(runs & word_runs(other)) < 0.8 * len(runs | word_runs(other)) for other in kept):
            kept.append(document)
    write_texts(
        tmp_path / "in.jsonl",
        *documents,
        documents[0].upper() + "!",
        "你好世界，今天天气很好。",
        "你好世界今天天气很好",
    )
    dropped = tmp_path / "dropped.jsonl"
    cleaned = texts(clean(tmp_path, "--deduplicate", "near", "--dropped-output", dropped))
    assert 13 < len(kept) < len(documents)
    assert cleaned == [*kept, "你好世界，今天天气很好。"]
    last = [json.loads(line) for line in dropped.read_text().splitlines()][-2:]
    assert [entry["reason"] for entry in last] == ["near duplicate"] * 2
    assert last[1]["detail"] == f"of {tmp_path / 'in.jsonl'}:80, similarity 1.000"


@pytest.mark.full
def test_workers_and_hash_seeds_do_not_change_the_output(tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="the optional package datasketch is absent")
    path = write_texts(tmp_path / "in.jsonl", *corpus(6, families=300, variants=5), "", "last")
    outputs = []
    for workers in (1, 2):
        output, dropped = tmp_path / f"out{workers}", tmp_path / f"dropped{workers}"
        command = [sys.executable, str(TOOL), "--input", str(path), "--output", str(output), "--dropped-output"]
        command += [str(dropped), "--deduplicate", "near", "--workers", str(workers)]
        environment = {**os.environ, "PYTHONHASHSEED": str(workers)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append((output.read_bytes(), dropped.read_bytes()))
    assert outputs[0] == outputs[1]
    assert all(outputs[0])


@pytest.mark.long
def test_a_worker_that_dies_ends_the_work(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="the package psutil is absent")
    command = [sys.executable, str(TOOL), "--input", "-", "--output", str(tmp_path / "out"), "--workers", "2"]
    tool = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tool.stdin is not None
    for number in range(30_000):
        tool.stdin.write(json.dumps({"text": f"{number} " * 20}) + "\n")
    tool.stdin.flush()
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not workers and time.monotonic() < deadline:
        children = psutil.Process(tool.pid).children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        time.sleep(0.05)
    workers[0].kill()
    _, error = tool.communicate(timeout=60)
    assert tool.returncode == 1
    assert error == "error: a worker died, possibly for lack of memory; use fewer --workers and run again\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="the optional package datasketch is absent")
    program = (
        "import sys, runpy\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0].split()[1])\n"
    )
    peaks = []
    for num_documents in (20_000, 200_000):
        path, draw = tmp_path / f"{num_documents}.jsonl", random.Random(9)
        with open(path, "w") as file:
            for _ in range(num_documents):
                words = [f"w{draw.randrange(5000)}" for _ in range(60)]
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
        command = [sys.executable, "-c", program, str(TOOL), "--input", str(path), "--output", str(tmp_path / "out")]
        command += ["--deduplicate", "near", "--workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        assert f"Kept {num_documents} documents" in done.stdout
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 160  # MiB: the cache of the index of duplicates, full
    assert peaks[1] < 512
