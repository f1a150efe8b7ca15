"""The page of error messages: it lists every message of the code and every message of the typical mistakes."""

from __future__ import annotations

import ast
import json
import re

from docs.scripts import list_refusals
from tests.unit.config.mistakes import FROZEN
from tests.unit.config.mistakes import messages as messages_of_mistakes


def test_every_message_has_an_anchor_and_advice() -> None:
    page, messages = list_refusals.page(), list_refusals.all_messages()
    anchors = re.findall(r" \{#(m-[^}]+)\}$", page, re.MULTILINE)
    assert len(anchors) == len(messages) > 800
    assert len(set(anchors)) == len(anchors)
    assert all(message.advice for message in messages)
    assert ":   what the message says" not in page
    # Advice for a message that no longer exists must be removed or rewritten for the message that replaced it.
    texts = {message.text.partition("; ")[0] for message in messages}
    assert [text for text in list_refusals.PARTICULAR if text not in texts] == []


def test_the_frozen_mistakes_have_the_messages_of_the_parser() -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    # Compare what JSON stores: tuples become lists.
    assert frozen == json.loads(json.dumps(messages_of_mistakes())), "run python -m tests.unit.config.mistakes"
    patterns = [message.pattern for message in list_refusals.all_messages()]
    reported = [text for mistakes in frozen["mistakes"].values() for each in mistakes for text in each["messages"]]
    assert len(reported) > 100
    assert [text for text in reported if not any(pattern.search(text) for pattern in patterns)] == []


CODE = """
class OwnError(DataError): ...
class DataError(InputError): ...
class OtherError(Exception): ...
def read(path, is_short):
    raise OwnError(f"{path} cannot be read" + ("; pass a longer one" if is_short else f"; it has {path.size} bytes"))
    raise OtherError("this is not for users")
def size_problems(sizes):
    yield f"{sizes} do not divide | at all"
    return ["one thing is wrong", *sizes]
def size():
    return "no answer to anybody"
"""


def test_messages_are_found_wherever_they_are_made() -> None:
    tree = ast.parse(CODE)
    errors = list_refusals.error_names({"x": tree})
    assert errors == {"InputError", "TrainingError", "ValueError", "DataError", "OwnError"}
    found = {message.text for message in list_refusals.messages_of("megatron/x.py", tree, errors)}
    assert {text for text in found if " " in text} == {
        "… cannot be read; pass a longer one",
        "… cannot be read; it has … bytes",
        "… do not divide | at all",
        "one thing is wrong",
    }
    said, unsaid = (
        list_refusals.Message(text, "megatron/training/data_plan.py").advice
        for text in ("… is short; give more", "… is short")
    )
    assert said == "`give more`"
    assert "(datasets.md)" in unsaid
    assert list_refusals.code("… do not divide | at all") == "<code>… do not divide &#124; at all</code>"
