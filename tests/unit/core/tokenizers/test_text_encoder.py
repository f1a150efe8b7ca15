"""Encoding of texts: the choice of an encoder, and what it gives."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers import text_encoder
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.text_encoder import (
    HARD_TEXTS,
    GigatokenEncoder,
    ReferenceEncoder,
    WordEncoder,
    choose_encoder,
    cut_at_spaces,
    missing_engine,
)
from megatron.core.tokenizers.tokenizer import NullTokenizer, Tokenizer
from tests.unit.core.tokenizers.gpt2_oracle import GPT2Oracle

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
        ({"normalizer": {"type": "Prepend", "prepend": "x"}}, "it normalizes text"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "its words do not start at spaces"),
        ({"pre_tokenizer": SPLIT_ALONE}, "its words do not start at spaces"),
        ({"pre_tokenizer": BYTES_ALONE}, "its words do not start at spaces"),
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
    with pytest.raises(ValueError, match="strips adjacent spaces"):
        WordEncoder(tokenizer, tokenizer.tokenizer_json())


SHARED = Path(__file__).parents[4].parent / "shared" / "data"
ENGINES = [
    pytest.param(
        name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    )
    for name in ("gigatoken", "tiktoken")
] + [pytest.param("words")]


def no_report(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def gpt2(gpt2_files: tuple[Path, Path]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*gpt2_files)


@pytest.fixture
def hugging_face(hugging_face_folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(hugging_face_folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_give_the_ids_of_the_tokenizer(engine: str, gpt2: GPT2BPETokenizer, corpus: list[str]) -> None:
    encoder = choose_encoder(gpt2, engine, corpus[:50], no_report)
    assert encoder.name == engine
    texts = [*HARD_TEXTS, *corpus]
    for _ in range(2):
        ids = encoder.encode([text.encode() for text in texts])
        assert [array.tolist() for array in ids] == [gpt2.tokenize(text) for text in texts]
        encoder.renew()


def test_special_tokens_of_a_tokenizer_json_are_kept(hugging_face: HuggingFaceTokenizer) -> None:
    encoder = choose_encoder(hugging_face, "auto", [], lambda line: None)
    text = "one<|turn|> two <|begin|>"
    assert next(iter(encoder.encode([text.encode()]))).tolist() == hugging_face.tokenize(text)


@pytest.mark.default(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_against_the_published_algorithm(engine: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("the GPT-2 vocabulary is not beside the repository (../shared)")
    files = SHARED / "gpt2-vocab.json", SHARED / "gpt2-merges.txt"
    encoder = choose_encoder(GPT2BPETokenizer(*files), engine, [], no_report)
    oracle = GPT2Oracle(*files)
    with open(SHARED / "wikitext2.jsonl", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"][:3000] for line in lines][:12]
    for text in [*texts, *HARD_TEXTS]:
        assert next(iter(encoder.encode([text.encode()]))).tolist() == oracle.encode(text)


def test_without_engines_the_tokenizer_encodes(
    gpt2: GPT2BPETokenizer, hugging_face: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gigatoken", "gigatoken.gigatoken_rs", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    tokenizers: list[Tokenizer] = [gpt2, hugging_face, NullTokenizer(9)]
    for tokenizer in tokenizers:
        encoder = choose_encoder(tokenizer, "auto", [], no_report)
        assert encoder.name == ("reference" if tokenizer is tokenizers[2] else "words")
        assert next(iter(encoder.encode([b"1 2", b""]))).tolist() == tokenizer.tokenize("1 2")
    with pytest.raises(TokenizerError, match="--tokenizer-engine gigatoken cannot be used"):
        choose_encoder(gpt2, "gigatoken", [], no_report)
    with pytest.raises(TokenizerError, match="cannot be used with NullTokenizer"):
        choose_encoder(tokenizers[2], "tiktoken", [], no_report)


def test_an_engine_of_other_tokenizers_is_rejected(gpt2: GPT2BPETokenizer, hugging_face: HuggingFaceTokenizer) -> None:
    for tokenizer, engine in ((gpt2, "bytes"), (hugging_face, "bytes"), (hugging_face, "tiktoken")):
        with pytest.raises(TokenizerError, match=f"^--tokenizer-engine {engine} cannot be used with {tokenizer.name};"):
            choose_encoder(tokenizer, engine, [], no_report)


def test_the_faster_engine_that_is_missing_is_named(gpt2: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    reference = ReferenceEncoder(gpt2)
    assert missing_engine(gpt2, reference) == "gigatoken"
    installed.add("gigatoken")  # and not used, for a reason that is reported
    assert missing_engine(gpt2, reference) == "tiktoken"
    installed.add("tiktoken")
    assert missing_engine(gpt2, reference) is None
    assert missing_engine(NullTokenizer(9), reference) is None


def test_the_runtime_set_brings_the_fast_engine() -> None:
    lines = (Path(__file__).parents[4] / "requirements" / "runtime.txt").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("gigatoken==")]
    for machine in ("x86_64", "aarch64", "arm64"):
        assert f'platform_machine == "{machine}"' in line


class WrongEncoder:
    """Differ in one word that stands in the input alone."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.array(self._tokenizer.tokenize(str(text, "utf-8").replace("odd", "even"))) for text in texts]

    def renew(self) -> None:
        pass


def test_an_engine_that_differs_on_the_input_is_not_used(
    gpt2: GPT2BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_encoder, "_candidates", lambda tokenizer: [("gigatoken", lambda: WrongEncoder(gpt2))])
    assert choose_encoder(gpt2, "auto", ["a plain text"], no_report).name == "gigatoken"
    reports: list[str] = []
    assert choose_encoder(gpt2, "auto", ["a plain text", "an odd text"], reports.append).name == "reference"
    assert reports == [
        "the engine gigatoken is not used with GPT2BPETokenizer: it produces different ids, first for 'an odd text'"
    ]
    with pytest.raises(TokenizerError, match="it produces different ids"):
        choose_encoder(gpt2, "gigatoken", ["an odd text"], no_report)


def test_an_engine_that_cannot_load_is_not_used(
    hugging_face: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: GigatokenEncoder, tokenizer_json: str) -> None:
        raise ValueError("cannot do this")

    monkeypatch.setattr(GigatokenEncoder, "__init__", fail)
    reports: list[str] = []
    assert choose_encoder(hugging_face, "auto", [], reports.append).name == "words"
    assert reports == ["the engine gigatoken is not used with HuggingFaceTokenizer: cannot do this"]
