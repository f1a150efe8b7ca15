"""What generated pages show is the text that they are made of: no character of it is taken for Markdown."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import markdown
import pytest

from docs.scripts.markdown_cells import code, prose
from megatron.config.megatron_flags import NO_EFFECT
from megatron.config.run_config import config_parts
from megatron.core.config_base import field_docs, field_specs
from tests.unit.config.mistakes import MISTAKES, workplace
from tests.unit.repository.source_tree import REPOSITORY

DOCS = REPOSITORY / "docs"


def rows(page: Path) -> Iterator[list[str]]:
    """Yield the cells of a page's tables as a browser shows them."""
    shown = markdown.markdown(page.read_text(encoding="utf-8"), extensions=["tables"])
    for row in re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        yield [html.unescape(re.sub(r"<[^>]+>", "", cell.replace("<br>", "\n"))).strip() for cell in cells]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "([0]*3+[1])*4",
        "X | None",
        "one_two _three_ __four__",
        "<name> & a `quoted` word",
        "[text](link)",
        r"C:\path \* *",
        "a < b | c ** d ~~e~~",
    ],
)
def test_a_cell_shows_its_text(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"| a | b |\n|---|---|\n| {prose(text)} | {code(text)} |\n")
    assert [row for row in rows(page) if row] == [[text, text]]


def test_the_page_of_flags_shows_what_their_fields_say() -> None:
    shown = {row[0].split(",")[0]: row[-1] for row in rows(DOCS / "arguments.md") if row}
    said = {name: note.reason for name, note in NO_EFFECT.items()}
    for kind in config_parts().values():
        docs = field_docs(kind)
        said |= {spec.flags[0]: spec.help_text(docs[spec.name]) for spec in field_specs(kind) if spec.options.cli}
    assert shown == said


def test_the_page_of_messages_shows_the_messages() -> None:
    script = load("docs/scripts/list_refusals.py")
    expected = sorted(message.what for message in script.all_messages())
    assert sorted(row[0] for row in rows(DOCS / "messages.md") if len(row) == 3) == expected


def test_the_page_of_mistakes_shows_the_answers() -> None:
    with workplace():
        expected = ["\n".join(each.answers()) for mistakes in MISTAKES.values() for each in mistakes]
    assert [row[1] for row in rows(DOCS / "mistakes.md") if row] == expected
