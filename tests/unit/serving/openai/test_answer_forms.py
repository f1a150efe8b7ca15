"""The text that each token of a stream adds."""

from __future__ import annotations

from random import Random

from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
from megatron.serving.openai.answer_forms import ChoiceText, TokenTexts

TOKENIZER = ByteTokenizer()


def pieces(ids: list[int], prompt: str = "") -> list[str]:
    texts = TokenTexts(TOKENIZER, TOKENIZER.tokenize(prompt))
    return [*map(texts.add, ids), texts.rest()]


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    assert pieces(TOKENIZER.tokenize("aé中🙂"), "Chloé") == [*("a", "", "é", "", "", "中", "", "", "", "🙂"), ""]
    assert pieces([97, 0xE4, 0xB8], "é") == ["a", "", "", "\ufffd"]


def test_bytes_that_never_become_a_character_are_shown_after_four() -> None:
    assert pieces([0xE4] * 6) == ["", "", "", "", "\ufffd\ufffd", "", "\ufffd" * 4]
    # A character that begins among them is complete in the stream, too.
    assert "".join(pieces([*[0xE4] * 5, 0xB8, 0xAD])) == "\ufffd" * 4 + "中"


def test_a_stream_has_the_text_of_the_whole() -> None:
    draw = Random(3)
    kinds = [range(128), range(128, 192), range(192, 248), range(257), "é中🙂".encode()]
    for _ in range(300):
        ids = [draw.choice(draw.choice(kinds)) for _ in range(draw.randrange(1, 40))]
        text = ChoiceText(TOKENIZER, TOKENIZER.tokenize("Chloé "), ())
        streamed = ""
        for token in ids:
            text.add(token, None)
            streamed += text.take()[0]
        text.end("length")
        assert streamed + text.take()[0] == TOKENIZER.detokenize(ids)
