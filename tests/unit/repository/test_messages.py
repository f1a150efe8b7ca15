"""The page of messages: it is what the code has, and what users are answered is on it."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.unit.config.mistakes import MISTAKES, workplace
from tests.unit.repository.source_tree import REPOSITORY


@pytest.fixture(scope="module")
def refusals() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("list_refusals", REPOSITORY / "docs" / "scripts" / "list_refusals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules["list_refusals"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["list_refusals"]


@pytest.fixture(scope="module")
def messages(refusals: ModuleType) -> list[Any]:
    found: list[Any] = refusals.all_messages()
    return found


def test_the_page_is_what_the_code_has(refusals: ModuleType, messages: list[Any]) -> None:
    page = refusals.DOCUMENT.read_text(encoding="utf-8")
    assert page == refusals.document(messages), "run python docs/scripts/list_refusals.py"
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) > 800
    assert len(set(anchors)) == len(anchors)
    assert all(message.advice for message in messages)
    assert "| what the message says |" not in page
    # Advice on messages that are gone is taken out, or written for what took their place.
    texts = {message.text.partition("; ")[0] for message in messages}
    assert [text for text in refusals.PARTICULAR if text not in texts] == []


def test_every_answer_to_a_typical_mistake_is_on_it(messages: list[Any]) -> None:
    patterns = [message.pattern for message in messages]
    with workplace():
        answers = [answer for mistakes in MISTAKES.values() for each in mistakes for answer in each.answers()]
    assert len(answers) > 100
    assert [each for each in answers if not any(pattern.search(each) for pattern in patterns)] == []


CODE = """
class OwnError(DataError): ...
class DataError(InputError): ...
class OtherError(Exception): ...
def read(path, is_short):
    raise OwnError(f"{path} cannot be read" + ("; give a longer one" if is_short else f"; it has {path.size} bytes"))
    raise OtherError("this is not for users")
def size_problems(sizes):
    yield f"{sizes} do not divide | at all"
    return ["one thing is wrong", *sizes]
def size():
    return "no answer to anybody"
"""


def test_messages_are_found_wherever_they_are_made(refusals: ModuleType) -> None:
    tree = ast.parse(CODE)
    errors = refusals.error_names({"x": tree})
    assert errors == {"InputError", "TrainingError", "ValueError", "DataError", "OwnError"}
    found = {message.text for message in refusals.messages_of("megatron/x.py", tree, errors)}
    assert {text for text in found if " " in text} == {
        "… cannot be read; give a longer one",
        "… cannot be read; it has … bytes",
        "… do not divide | at all",
        "one thing is wrong",
    }
    said, unsaid = (
        refusals.Message(text, "megatron/training/data_plan.py").advice
        for text in ("… is short; give more", "… is short")
    )
    assert said == "`give more`"
    assert "(datasets.md)" in unsaid
    assert refusals.code("… do not divide | at all") == "<code>… do not divide &#124; at all</code>"
