"""What generated pages show is the text that they are made of: no character of it is taken for Markdown."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

import markdown
import pytest

from docs.scripts import list_flags, list_refusals
from docs.scripts.markdown_cells import code, flags_as_code, prose
from megatron.config.megatron_flags import NO_EFFECT
from megatron.config.run_config import config_parts
from megatron.core.config_base import field_docs, field_specs
from tests.unit.config.mistakes import FROZEN


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of a page's tables as a browser shows them."""
    shown = markdown.markdown(page, extensions=["tables"])
    for row in re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL):
        yield [text_of(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]


def definitions(page: str) -> list[tuple[str, str, str]]:
    """Return the anchor, term and definition of each entry of a page's definition lists as a browser shows them."""
    shown = markdown.markdown(page, extensions=["attr_list", "def_list"])
    found, terms = [], []
    for anchor, term, definition in re.findall(
        r'<dt(?: id="([^"]+)")?>(.*?)</dt>|<dd>(.*?)</dd>', shown.replace("\n", " ")
    ):
        if term:
            terms.append((anchor, text_of(term)))
        else:
            found += [(anchor, term, text_of(definition)) for anchor, term in terms]
            terms = []
    return found


def text_of(element: str) -> str:
    """Return the text of an HTML element as a browser shows it."""
    return html.unescape(re.sub(r"<[^>]+>", "", element.replace("<br>", "\n"))).strip()


TEXTS = [
    "([0]*3+[1])*4",
    "X | None",
    "one_two _three_ __four__",
    "<name> & a `quoted` word",
    "[text](link)",
    r"C:\path \* *",
    "a < b | c ** d ~~e~~",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_cell_shows_its_text(text: str) -> None:
    page = f"| a | b |\n|---|---|\n| {prose(text)} | {code(text)} |\n"
    assert [row for row in rows(page) if row] == [[text, text]]


@pytest.mark.parametrize("text", TEXTS)
def test_a_definition_shows_its_text(text: str) -> None:
    page = f"{code(text)} {{#anchor}}\n:   {prose(text)}\n"
    assert definitions(page) == [("anchor", text, text)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pass --num-layers N, or --lr.", "pass `--num-layers` N, or `--lr`."),
        ("--train_iters: (--a-b)", "`--train_iters`: (`--a-b`)"),
        ("a--b -- c `--d e`", "a--b -- c `--d e`"),
    ],
)
def test_flags_in_prose_are_code(text: str, shown: str) -> None:
    assert flags_as_code(text) == shown


def test_the_page_of_flags_shows_what_their_fields_say() -> None:
    shown = definitions(list_flags.page())
    said = {name: note.reason for name, note in NO_EFFECT.items()}
    for kind in config_parts().values():
        docs = field_docs(kind)
        specs = [spec for spec in field_specs(kind) if spec.options.cli]
        said |= {flag: spec.help_text(docs[spec.name]) for spec in specs for flag in spec.flags}
    assert sorted(anchor for anchor, _, _ in shown) == sorted(said)
    for anchor, term, text in shown:
        assert term.split(" ")[0] == anchor
        assert text.startswith(said[anchor])
        # The default follows the text of the field.
        assert re.fullmatch(r"( Required\.| Default: .+\.)?", text.removeprefix(said[anchor])), text


def test_the_page_of_messages_shows_mistakes_and_messages() -> None:
    mistakes = json.loads(FROZEN.read_text(encoding="utf-8"))["mistakes"]
    expected = ["\n".join(each["messages"]) for examples in mistakes.values() for each in examples]
    shown = definitions(list_refusals.page())
    assert [definition for _, _, definition in shown[: len(expected)]] == expected
    messages = list_refusals.all_messages()
    assert sorted(term for _, term, _ in shown[len(expected) :]) == sorted(message.what for message in messages)
    anchors = {anchor: term for anchor, term, _ in shown[len(expected) :]}
    assert anchors == dict(zip(list_refusals.anchors(messages), [message.what for message in messages], strict=True))
