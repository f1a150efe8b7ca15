"""Texts use the field's terms: pages, docstrings, comments and messages avoid the words that stopped readers."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.repository.source_tree import REPOSITORY, relative, tracked_files

REJECTED = {
    r"(?<!multi-head )latent attention": "multi-head latent attention (MLA)",
    r"further tokens|prediction layers?": "multi-token prediction (MTP) modules",
    r"matrix products?": "matmul or GEMM",
    r"beside": "with, next to",
    r"in place of": "instead of",
    r"(?:goes|go|going|went) on(?! (?:to|the|a|CPU|GPU|disk))": "continue, resume",
    r"anew": "again",
    r"refus(?:e|es|ed|al|als|ing)": "reject, unsupported",
    r"mend(?:s|ed)?": "fix",
    r"whoever|nobody|somebody": "the actor",
    r"held against|asked of": "compared with, required by",
    r"pretend(?:s|ed)?": "simulated, fake",
    r"even share": "balanced load",
    r"by chance": "stochastic rounding, random",
    r"machine's memory": "host memory",
    r"its like|their like": "the other ranks",
    r"told apart": "distinguished",
    r"until (?:it|they) (?:is|are) told": "until a request",
    r"befell|befallen": "happened to",
}
"""Patterns of words that pages and sources do not use, and what they use instead."""
ARGUED: dict[str, tuple[str, ...]] = {
    "megatron/training/__init__.py": ("reasons_of refuse refuse_in_run",),
}
"""Phrases that are right in a file although a pattern rejects them, by the file."""
_CODE = re.compile(r"`+[^`]*`+|\]\([^)]*\)|<[^>]+>|https?://\S+|\{[^{}]*\}")
_PATTERN = re.compile(rf"\b(?:{'|'.join(REJECTED)})\b", flags=re.IGNORECASE)
_HEADLESS = re.compile(r'^\s*[rR]?"""(?:What|Who|Whoever|Nobody|Where|That which)\b')


def pages() -> list[Path]:
    return [path for path in tracked_files("*.md") if "benchmarks/results" not in relative(path)]


def sources() -> list[Path]:
    return [*tracked_files("megatron/*.py"), *tracked_files("tools/*.py"), REPOSITORY / "pretrain_gpt.py"]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside code blocks, without inline code and link targets."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, _CODE.sub("", line)


def texts(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and the strings with spaces of a module, without inline code."""
    for token in tokenize.generate_tokens(io.StringIO(source.read_text(encoding="utf-8")).readline):
        is_text = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
        if is_text and "noqa" not in token.string:
            yield token.start[0], _CODE.sub("", token.string)


def findings(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    argued = ARGUED.get(relative(path), ())
    for number, text in lines:
        for phrase in argued:
            text = text.replace(phrase, "")
        for match in _PATTERN.finditer(" ".join(text.split())):
            instead = next(use for words, use in REJECTED.items() if re.search(words, match.group(), re.IGNORECASE))
            yield f"{relative(path)}:{number}: {match.group()!r}; write {instead}"


def test_pages_use_standard_terms() -> None:
    assert [found for page in pages() for found in findings(page, prose(page))] == []


def test_sources_use_standard_terms() -> None:
    assert [found for source in sources() for found in findings(source, texts(source))] == []


def test_docstrings_state_what_a_function_does() -> None:
    headless = [
        f"{relative(source)}:{number}"
        for source in sources()
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1)
        if _HEADLESS.match(line)
    ]
    assert headless == []


def test_every_exception_is_needed() -> None:
    for name, phrases in ARGUED.items():
        text = " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())
        assert all(phrase in text for phrase in phrases), name
        assert all(_PATTERN.search(phrase) for phrase in phrases), name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""What a rank has of it."""', False),
        ('x = "this goes on beside it"', True),
        ("# refused by the parser", True),
        ('"""Multi-head latent attention (`beside`)."""', False),
    ],
)
def test_a_planted_text_is_found(text: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    path.write_text(text + "\n", encoding="utf-8")
    monkeypatch.setattr("tests.unit.repository.test_style.relative", str)
    assert bool(list(findings(path, texts(path)))) == found
