"""The tokenizer travels with the weights: into a checkpoint, where it can be used, and out again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.checkpoint.checkpoint_source import SourceView
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.model_record import MODEL_RECORD
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.tokenizer_files import (
    complete_model_folder,
    copy_into_checkpoint,
    copy_into_model_folder,
    end_of_text,
    tokenizer_settings,
)
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from tests.unit.interop.huggingface.tiny_models import import_transformers, save_model

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
    (folder / "generation_config.json").write_text('{"eos_token_id":  [3, 1]}')
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
    assert end_of_text(tmp_path / "checkpoint" / "tokenizer") == [3, 1]


def test_every_file_survives_training_and_the_torch_format(model_folder: Path, tmp_path: Path) -> None:
    """A run knows the tokenizer's flags alone; Megatron's files have no place for the record of the folder."""
    wanted = {path.name for path in model_folder.iterdir()} - {"config.json", "model.safetensors"}
    record_tokenizer(build_tokenizer(**tokenizer_settings(model_folder, 4)), tmp_path / "run")
    (tmp_path / "again").mkdir()
    copy_into_model_folder(tmp_path / "run" / "tokenizer", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == wanted
    for name in wanted:
        assert (tmp_path / "again" / name).read_bytes() == (model_folder / name).read_bytes()


def test_a_folder_with_vocabulary_and_merges_only_has_gpt2s(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    assert tokenizer_settings(model_folder, 4)["tokenizer_type"] == "GPT2BPETokenizer"


def test_a_folder_without_a_tokenizer_has_bare_ids(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (model_folder / name).unlink()
    settings = tokenizer_settings(model_folder, 4)
    assert build_tokenizer(**settings).vocab_size == 4
    assert copy_into_checkpoint(model_folder, settings, tmp_path / "checkpoint")
    copies = tmp_path / "checkpoint" / "tokenizer"
    assert load_recorded_tokenizer(tmp_path / "checkpoint").vocab_size == 4
    for path in model_folder.iterdir():
        assert (copies / path.name).exists() == (path.name not in ("config.json", "model.safetensors"))
        path.unlink()
    assert not copy_into_checkpoint(model_folder, settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


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


def test_transformers_loads_what_a_run_of_our_own_becomes(tmp_path: Path) -> None:
    """The run has a Llama model, GPT-2's vocabulary files, and nothing from Hugging Face."""
    import_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    byte_level = [*byte_characters(), "th", "the", END_OF_TEXT]
    vocabulary = {token: number for number, token in enumerate(byte_level)}
    (tmp_path / "my-vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "my-merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    tokenizer = build_tokenizer(vocab_file=tmp_path / "my-vocab.json", merge_file=tmp_path / "my-merges.txt")
    save_model("llama31", tmp_path / "model", vocab_size=tokenizer.vocab_size)
    record_tokenizer(tokenizer, tmp_path / "run")
    source = HuggingFaceSource(tmp_path / "model")
    # Of a run of our own: no record of a model folder.
    common = {name: value for name, value in source.common.items() if name != MODEL_RECORD} | {"tokenizer": "tokenizer"}
    run = SourceView(source, common)
    source.folder = tmp_path / "run"
    write_hugging_face(run, tmp_path / "exported")
    source.close()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "the wörld's\n\n  thë 123 你好 "
    assert theirs.encode(text) == tokenizer.tokenize(text)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (END_OF_TEXT, 258, 259)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.eos_token_id == 258
    assert model.config.vocab_size == 259


@pytest.mark.parametrize(("kind", "begins"), [("Llama2Tokenizer", True), ("GPTSentencePieceTokenizer", False)])
def test_pieces_get_the_class_that_reads_them(kind: str, begins: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "run" / "my.model").write_bytes(b"pieces")
    record = {"record_version": 1, "tokenizer_type": kind, "files": [{"name": "my.model"}]}
    (tmp_path / "run" / "tokenizer_record.json").write_text(json.dumps(record))
    copy_into_model_folder(tmp_path / "run", tmp_path / "model")
    complete_model_folder(tmp_path / "run", tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == b"pieces"
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["add_bos_token"]) == ("LlamaTokenizer", begins)
