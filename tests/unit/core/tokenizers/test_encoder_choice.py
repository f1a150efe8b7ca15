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
    choose_encoder,
    missing_engine,
)
from megatron.core.tokenizers.tokenizer import NullTokenizer, Tokenizer
from tests.unit.core.tokenizers.gpt2_oracle import GPT2Oracle

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
        "the engine gigatoken is not used with GPT2BPETokenizer: it gives other ids, for 'an odd text' first"
    ]
    with pytest.raises(TokenizerError, match="it gives other ids"):
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
