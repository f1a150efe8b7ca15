from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.text_encoder import HARD_TEXTS, WordEncoder, cut_at_spaces
from megatron.core.tokenizers.tokenizer import Tokenizer

# The word patterns of GPT-4 and Llama 3, and of Qwen 2 (which takes digits one by one, and normalizes).
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def split(pattern: str) -> dict[str, Any]:
    """Describe a pre-tokenizer as published tokenizer.json files do."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, to_bytes]}


def changed(folder: Path, **changes: Any) -> HuggingFaceTokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return HuggingFaceTokenizer(folder)


def random_texts(count: int) -> list[str]:
    """Mix words, marks, special tokens, and white space of every kind that the engines tell apart."""
    draw = np.random.default_rng(5)
    pieces = ["a", "the", "parser", "It's", "'ll", "12345", "...", "!", "é", "中文", "e\u0301", "\u0301", "<|turn|>"]
    spaces = [" "] * 12 + [
        "  ",
        "   ",
        "\n",
        " \n",
        "\n ",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\x85",
        "\x1c",
        "\u200b",
        "",
    ]
    return ["".join(draw.choice(pieces) + draw.choice(spaces) for _ in range(12)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])
def test_words_have_the_ids_of_the_whole_text(
    kind: str, gpt2_files: tuple[Path, Path], hugging_face_folder: Path, corpus: list[str]
) -> None:
    tokenizer: GPT2BPETokenizer | HuggingFaceTokenizer
    if kind == "gpt2":
        tokenizer = GPT2BPETokenizer(*gpt2_files)
    elif kind == "llama3":
        tokenizer = changed(hugging_face_folder, pre_tokenizer=split(LLAMA3_WORDS))
    else:
        tokenizer = changed(hugging_face_folder, pre_tokenizer=split(QWEN2_WORDS), normalizer={"type": "NFC"})
    encoder = WordEncoder(tokenizer, tokenizer.tokenizer_json())
    texts = [*HARD_TEXTS, *random_texts(800), "\n".join(corpus)]
    wrong = [
        text
        for text, ids in zip(texts, encoder.encode([text.encode() for text in texts]))
        if ids.tolist() != tokenizer.tokenize(text)
    ]
    assert wrong == []


class CountedTokenizer:
    """Note the texts that a tokenizer is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        return self._tokenizer.tokenize_batch(texts)


def test_a_word_is_encoded_once_until_it_is_forgotten(gpt2_files: tuple[Path, Path]) -> None:
    gpt2 = GPT2BPETokenizer(*gpt2_files)
    counted: Any = CountedTokenizer(gpt2)
    encoder = WordEncoder(counted, gpt2.tokenizer_json())
    long = " " + "x" * 50
    text = f"one two two{long}".encode()
    assert [ids.tolist() for ids in encoder.encode([text, text])] == [gpt2.tokenize(text.decode())] * 2
    assert counted.texts == ["one", " two", long, long]
    encoder.renew()
    list(encoder.encode([b"one"]))
    assert counted.texts[4:] == ["one"]


SPLIT_ALONE = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
BYTES_ALONE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_cuts() -> None:
    assert cut_at_spaces("") == [""]
    assert cut_at_spaces(" a  b\n c\td e ") == [" a", "  b\n c\td", " e", " "]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Prepend", "prepend": "x"}}, "it normalizes texts"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "its words do not begin at spaces"),
        ({"pre_tokenizer": SPLIT_ALONE}, "its words do not begin at spaces"),
        ({"pre_tokenizer": BYTES_ALONE}, "its words do not begin at spaces"),
    ],
)
def test_tokenizers_that_do_not_cut_there_are_refused(
    hugging_face_folder: Path, changes: dict[str, Any], reason: str
) -> None:
    tokenizer = changed(hugging_face_folder, **changes)
    with pytest.raises(ValueError, match=reason):
        WordEncoder(tokenizer, tokenizer.tokenizer_json())


@pytest.mark.parametrize(("rstrip", "content"), [(True, "<|turn|>"), (False, "<|a turn|>")])
def test_added_tokens_that_take_spaces_are_refused(hugging_face_folder: Path, rstrip: bool, content: str) -> None:
    path = hugging_face_folder / "tokenizer.json"
    description = json.loads(path.read_text())
    description["added_tokens"][-1] |= {"rstrip": rstrip, "content": content}
    path.write_text(json.dumps(description))
    tokenizer = HuggingFaceTokenizer(hugging_face_folder)
    with pytest.raises(ValueError, match="takes spaces in"):
        WordEncoder(tokenizer, tokenizer.tokenizer_json())
