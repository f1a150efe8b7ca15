"""The tokenizer travels with the weights: into a checkpoint, where it can be used, and out again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from megatron.interop.huggingface.tokenizer_files import (
    copy_into_checkpoint,
    copy_into_model_folder,
    end_of_text,
    tokenizer_settings,
)

WORDS = {"a": 0, "b": 1, "ab": 2, "<end>": 3}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Write the tokenizer's files of a model folder, every kind that there is, each with bytes of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(WORDS, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "special_tokens_map.json").write_text('{"eos_token":  "<end>"}')
    (folder / "added_tokens.json").write_text("{}")
    (folder / "vocab.json").write_text(json.dumps(WORDS))
    (folder / "merges.txt").write_bytes(b"#version: 0.2\r\na b\n")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_every_file_comes_back_and_the_checkpoint_can_use_it(model_folder: Path, tmp_path: Path) -> None:
    settings = tokenizer_settings(model_folder, 4)
    assert copy_into_checkpoint(model_folder, settings, tmp_path / "checkpoint")
    expected = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    for name in ("config.json", "model.safetensors"):
        del expected[name]
    (tmp_path / "again").mkdir()
    copy_into_model_folder(tmp_path / "checkpoint" / "tokenizer", tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == expected
    for path in model_folder.iterdir():
        path.unlink()
    tokenizer = load_recorded_tokenizer(tmp_path / "checkpoint")
    assert (tokenizer.tokenize("ab b"), tokenizer.eod_id) == ([2, 1], 3)
    assert end_of_text(tmp_path / "checkpoint" / "tokenizer") == 3


def test_a_folder_with_vocabulary_and_merges_only_has_gpt2s(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    assert tokenizer_settings(model_folder, 4)["tokenizer_type"] == "GPT2BPETokenizer"


def test_a_folder_without_a_tokenizer_has_bare_ids(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (model_folder / name).unlink()
    settings = tokenizer_settings(model_folder, 4)
    assert build_tokenizer(**settings).vocab_size == 4
    assert not copy_into_checkpoint(model_folder, settings, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_the_files_of_a_run_get_the_names_that_are_looked_for(tmp_path: Path) -> None:
    """A run's own files have any names: gpt2-vocab.json and gpt2-merges.txt here."""
    vocabulary = {character: i for i, character in enumerate(byte_characters())} | {END_OF_TEXT: 256}
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": tmp_path / "gpt2-vocab.json", "merge_file": tmp_path / "gpt2-merges.txt"}
    record_tokenizer(build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files), tmp_path / "checkpoint")
    (tmp_path / "model").mkdir()
    copy_into_model_folder(tmp_path / "checkpoint" / "tokenizer", tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["merges.txt", "vocab.json"]
    assert (tmp_path / "model" / "vocab.json").read_bytes() == (tmp_path / "gpt2-vocab.json").read_bytes()
