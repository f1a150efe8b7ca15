"""Small tokenizers, trained in seconds on text that every Python has."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Lines of English-like text."""
    return Path(argparse.__file__).read_text(encoding="utf-8")[:60_000].splitlines()


@pytest.fixture(scope="session")
def trained(corpus: list[str]) -> Tokenizer:
    """Train a byte-level BPE of 700 entries, the end-of-text token last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=699, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@pytest.fixture
def gpt2_files(trained: Tokenizer, tmp_path: Path) -> tuple[Path, Path]:
    """Write vocab.json and merges.txt as GPT-2's are written."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture
def hugging_face_folder(trained: Tokenizer, tmp_path: Path) -> Path:
    """Write a model folder whose tokenizer.json also truncates and pads, and adds a token at the beginning."""
    folder = tmp_path / "model"
    folder.mkdir()
    content = json.loads(trained.to_str())
    ids = {"<|begin|>": 699, "<|end|>": 700, "<|turn|>": 701}
    content["added_tokens"] = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for token, i in ids.items()
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=5, pad_id=0)
    content = json.loads(tokenizer.to_str())
    begin = {"id": "<|begin|>", "ids": [699], "tokens": ["<|begin|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": begin},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return folder


@pytest.fixture
def tiktoken_ranks() -> list[bytes]:
    """List the 256 bytes and some merges."""
    merges = [b"th", b"he", b"in", b"the", b"er", b" the", b"an", b" a", b"ing", b"  ", b"ab", b"Ab", b"aB"]
    return [bytes([b]) for b in range(256)] + merges


@pytest.fixture
def tiktoken_file(tiktoken_ranks: list[bytes], tmp_path: Path) -> Path:
    """Write a vocabulary as Megatron's --tokenizer-model for TikTokenizer."""
    path = tmp_path / "vocab.json"
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tiktoken_ranks)
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def sentence_piece_file(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a SentencePiece model of 391 pieces with begin and end but no padding."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the optional package sentencepiece is absent")
    prefix = tmp_path_factory.mktemp("sentencepiece") / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(prefix),
        vocab_size=391,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")
