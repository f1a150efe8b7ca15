"""The scripts of tools/openwebtext take the arguments of Megatron-LM's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.openwebtext import blacklist_urls, cleanup_dataset, merge_jsons
from megatron.data.url_filter import UrlFilter, is_well_formed, site_of
from tests.harness.byte_vocabulary import write_vocabulary

FOLDER = Path(__file__).parents[3] / "tools" / "openwebtext"
ENGLISH = "This is a text in the English language about the history of the printing press and its inventors. " * 8
GERMAN = "Dies ist ein Text in deutscher Sprache über die Geschichte des Buchdrucks und seiner Erfinder. " * 8


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("www.google.de", "google"),
        ("maps.google.co.uk", "google"),
        ("example.com", "example"),
        ("apple.example.com", "example"),
        ("co.uk", "co"),
        ("localhost", "localhost"),
    ],
)
def test_a_site_is_known_under_every_top_level_domain(host: str, site: str) -> None:
    assert site_of(host) == site


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/story", None),
        ("https://en.wikipedia.org/wiki/Printing", UrlFilter.DOMAIN),
        ("http://www.Amazon.co.jp/dp/1", UrlFilter.DOMAIN),
        ("http://example.com/photo.JPG?size=2", UrlFilter.SUFFIX),
        ("http://example.ai", None),
        ("http://a", UrlFilter.SHORT),
        ("ftp://example.com/story", UrlFilter.MALFORMED),
        ("http://example/story", UrlFilter.MALFORMED),
        ("http://exa mple.com/story", UrlFilter.MALFORMED),
        ("http://[1::/story", UrlFilter.MALFORMED),
        ("http://10.0.0.1:8000/story", None),
        ("http://bücher.example/buch", None),
    ],
)
def test_the_reason_to_remove_a_url(url: str, reason: str | None) -> None:
    assert UrlFilter().reason_to_remove(url) == reason
    assert is_well_formed(url) or reason is not None


def test_lists_of_urls_are_merged_and_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "b.txt").write_text("http://example.com/1\nhttp://imgur.com/x\n")
    (tmp_path / "urls" / "a.txt").write_text("http://example.org/2\nhttp://example.com/1\nhttp://example.org/a.pdf\n")
    output = tmp_path / "clean_urls.txt"
    assert blacklist_urls.main([str(tmp_path / "urls"), str(output)]) == 0
    assert output.read_text() == "http://example.org/2\nhttp://example.com/1\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "> found 2 files"
    assert "[DUPLICATE URL]: http://example.com/1" in lines
    assert "[DOMAIN BLACKLIST]: http://imgur.com/x" in lines
    (final,) = (line for line in lines if line.startswith("FINAL | time elapsed (s): "))
    assert final.endswith(
        "number of urls: 5 | domain blacklisted: 1 | extention blacklisted: 1 | short urls (<=8): 0 | "
        "malformed urls: 0 | duplicate urls: 1"
    )
    assert blacklist_urls.main([str(tmp_path / "none"), str(output)]) == 2
    error = f"error: {tmp_path / 'none'} has no .txt files with URLs; use a different folder\n"
    assert capsys.readouterr().err == error


def write_documents(path: Path, *texts: str) -> Path:
    path.write_text("".join(f"{json.dumps({'url': str(place), 'text': text})}\n" for place, text in enumerate(texts)))
    return path


def test_short_and_foreign_documents_are_dropped_and_mojibake_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ftfy")
    pytest.importorskip("py3langid")
    source = write_documents(tmp_path / "in.json", f"{ENGLISH} donâ€™t", GERMAN, ENGLISH[:100])
    source.write_text(source.read_text() + "no json\n")
    output = tmp_path / "out.json"
    assert cleanup_dataset.main([str(source), str(output), "--workers", "1"]) == 0
    (kept,) = (json.loads(line) for line in output.read_text().splitlines())
    assert kept == {"url": "0", "text": f"{ENGLISH} don't"}
    out = capsys.readouterr().out
    assert "Documents of fewer than 96 words are dropped, which is about 128 tokens" in out
    assert "skipped 1 that could not be read" in out
    assert out.splitlines()[-2] == "Kept 1 documents (33.33 %, 0.00 MB of jsonl)"


def test_tokens_are_counted_with_the_given_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ftfy")
    pytest.importorskip("py3langid")
    vocabulary, merges = write_vocabulary(tmp_path)
    text = "A text in the English language whose single bytes are its tokens. " * 3
    source = write_documents(tmp_path / "in.json", text, text[:100])
    words = [str(source), str(tmp_path / "out.json"), "--workers", "1"]
    assert cleanup_dataset.main([*words, "--vocab-file", str(vocabulary), "--merge-file", str(merges)]) == 0
    assert [json.loads(line)["url"] for line in (tmp_path / "out.json").read_text().splitlines()] == ["0"]
    assert "96 words" not in capsys.readouterr().out
    assert cleanup_dataset.main([*words, "--min-words", "-1"]) == 2
    assert capsys.readouterr().err == "error: --min-words -1 is negative\n"


def test_json_files_are_merged_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.json").write_text('{"text": "b",  "url": "1"}')
    (tmp_path / "a.json").write_text('{"url": "2", "text": "\\u00e4"}\n{"text": "c"}\n')
    script = [sys.executable, FOLDER / "merge_jsons.py"]
    for _ in range(2):
        done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("Merged file merged_output.json\n")
    merged = (tmp_path / "merged_output.json").read_text()
    assert merged == '{"url": "2", "text": "\\u00e4"}\n{"text": "c"}\n{"text": "b",  "url": "1"}\n'
    (tmp_path / "c.json").write_text("no json\n")
    words = ["--json_path", str(tmp_path), "--output_file", str(tmp_path / "out" / "merged.json")]
    assert merge_jsons.main(words) == 2
    assert merge_jsons.main(["--json_path", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert error[1] == f"error: --json_path {tmp_path / 'none'}: there are no .json files in it; use a different folder"


@pytest.mark.parametrize("name", ["blacklist_urls", "cleanup_dataset", "merge_jsons"])
def test_a_script_says_how_it_differs(name: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: {name}.py ")
    assert "Unlike there, " in " ".join(done.stdout.split())
