"""Text from tokens: whole characters, and stops that lie across tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.core.inference.inference_request import TokenValue
from megatron.serving.openai.answer_forms import ChoiceText


class Bytes:
    """A tokenizer whose ids are the bytes of UTF-8."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(text: ChoiceText, tokens: bytes, reason: str = "length") -> list[str]:
    """Return what is given out after each token, and at the end."""
    found = []
    for token in tokens:
        text.add(token, None)
        found.append(text.take()[0])
    text.end(reason)  # type: ignore[arg-type]
    return [*found, text.take()[0]]


def test_a_character_is_given_out_whole() -> None:
    text = ChoiceText(Bytes(), b"before ", ())  # type: ignore[arg-type]
    assert pieces(text, "aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b", ""]
    assert text.reason == "length"


def test_what_is_no_character_is_shown_at_the_end_or_when_it_cannot_become_one() -> None:
    assert pieces(ChoiceText(Bytes(), b"", ()), b"a\xf0\x9f") == ["a", "", "", "\ufffd"]  # type: ignore[arg-type]
    assert "".join(pieces(ChoiceText(Bytes(), b"", ()), b"\xff" * 9 + b"z")).endswith("z")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [
        (("cd",), ["a", "b", "", "", "", ""], "stop"),
        (("cx",), ["a", "b", "", "cd", "e", ""], "length"),
        (("bcde", "d"), ["a", "", "", "bc", "", ""], "stop"),
        (("e",), ["a", "b", "c", "d", "", ""], "stop"),
        (("efg",), ["a", "b", "c", "d", "", "e"], "length"),
    ],
)
def test_a_stop_ends_the_text_and_is_not_in_it(stops: tuple[str, ...], expected: list[str], reason: str) -> None:
    text = ChoiceText(Bytes(), b"x", stops)  # type: ignore[arg-type]
    assert pieces(text, b"abcde") == expected
    assert text.reason == reason


def test_tokens_come_with_the_text_that_they_add_and_end_with_it() -> None:
    text = ChoiceText(Bytes(), b"", ("cd",))  # type: ignore[arg-type]
    text.begin_with(Bytes(), b"cd", [TokenValue(-1.0)])  # type: ignore[arg-type]
    for token in "éabcd".encode():
        text.add(token, TokenValue(-2.0))
    whole, tokens = text.take()
    assert whole == "cdéab"
    assert [(each.text, each.offset, each.value and each.value.log_probability) for each in tokens] == [
        ("c", 0, None),
        ("d", 1, -1.0),
        ("", 2, -2.0),
        ("é", 2, -2.0),
        ("a", 3, -2.0),
        ("b", 4, -2.0),
    ]
    assert (text.reason, text.num_tokens) == ("stop", 6)
