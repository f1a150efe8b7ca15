from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.core.tokenizers.tokenizer_record import (
    describe_tokenizer,
    load_recorded_tokenizer,
    rebuild_tokenizer,
    record_tokenizer,
)

TEXT = "parse the arguments"


def test_copies_suffice(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*gpt2_files, extra_vocab_size=3)
    record = record_tokenizer(tokenizer, tmp_path / "checkpoint")
    assert json.loads(json.dumps(record)) == record
    shutil.rmtree(gpt2_files[0].parent)
    moved = shutil.move(tmp_path / "checkpoint", tmp_path / "moved")
    loaded = load_recorded_tokenizer(Path(moved))
    assert loaded.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert (loaded.vocab_size, loaded.eod_id) == (703, 699)
    assert all(path.parent == tmp_path / "moved" / "tokenizer" for path in loaded.files)
    # And it can be recorded again, from there.
    record_tokenizer(loaded, tmp_path / "second")
    assert load_recorded_tokenizer(tmp_path / "second").tokenize(TEXT) == tokenizer.tokenize(TEXT)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_folder_of_files(hugging_face_folder: Path, tmp_path: Path, name: str) -> None:
    tokenizer = HuggingFaceTokenizer(hugging_face_folder / name)
    record_tokenizer(tokenizer, tmp_path / "checkpoint")
    shutil.rmtree(hugging_face_folder)
    loaded = load_recorded_tokenizer(tmp_path / "checkpoint")
    assert loaded.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert loaded.eod_id == 700


def test_originals_serve_where_there_are_no_copies(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*gpt2_files)
    record = describe_tokenizer(tokenizer)
    assert rebuild_tokenizer(record).tokenize(TEXT) == tokenizer.tokenize(TEXT)
    record_tokenizer(tokenizer, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer" / "merges.txt").unlink()
    loaded = load_recorded_tokenizer(tmp_path / "checkpoint")
    assert loaded.files == gpt2_files


def test_settings_survive(tiktoken_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="the optional package tiktoken is absent")
    tokenizer = build_tokenizer(
        tokenizer_type="TikTokenizer",
        tokenizer_model=tiktoken_file,
        tiktoken_pattern="v2",
        vocab_size=270,
        tiktoken_num_special_tokens=8,
        tiktoken_special_tokens=["<s>", "</s>", "<unk>"],
    )
    record_tokenizer(tokenizer, tmp_path)
    loaded = load_recorded_tokenizer(tmp_path)
    assert loaded.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert (loaded.vocab_size, loaded.eod_id) == (270, 1)


def test_tokenizer_without_files(tmp_path: Path) -> None:
    record_tokenizer(NullTokenizer(127), tmp_path)
    loaded = load_recorded_tokenizer(tmp_path)
    assert (loaded.name, loaded.vocab_size) == ("NullTokenizer", 128)


def test_files_of_one_name(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    vocab_file, merge_file = (tmp_path / "a" / "bpe.txt", tmp_path / "b" / "bpe.txt")
    for source, target in zip(gpt2_files, (vocab_file, merge_file), strict=True):
        target.parent.mkdir()
        shutil.copy(source, target)
    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    record_tokenizer(tokenizer, tmp_path / "checkpoint")
    loaded = load_recorded_tokenizer(tmp_path / "checkpoint")
    assert loaded.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert [path.name for path in loaded.files] == ["bpe.txt", "1-bpe.txt"]


def test_changed_files_are_refused(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    record = record_tokenizer(GPT2BPETokenizer(*gpt2_files), tmp_path / "checkpoint")
    copy = tmp_path / "checkpoint" / "tokenizer" / "vocab.json"
    copy.write_text(copy.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"vocab\.json is not the file that was recorded"):
        load_recorded_tokenizer(tmp_path / "checkpoint")
    gpt2_files[1].unlink()
    with pytest.raises(TokenizerError, match=r"files of the recorded tokenizer are missing: .*merges\.txt"):
        rebuild_tokenizer(record)


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"records no tokenizer .* pass --tokenizer-type"):
        load_recorded_tokenizer(tmp_path)
    record = describe_tokenizer(NullTokenizer(127))
    with pytest.raises(TokenizerError, match="version 9; version 1 is expected"):
        rebuild_tokenizer(record | {"record_version": 9})
    with pytest.raises(
        TokenizerError, match="has 128 ids and end-of-document id 127, but the checkpoint was trained with 500 and 127"
    ):
        rebuild_tokenizer(record | {"vocab_size": 500})
    with pytest.raises(TokenizerError, match="record is damaged"):
        rebuild_tokenizer({"record_version": 1})
    with pytest.raises(TokenizerError, match="record is damaged"):
        rebuild_tokenizer(record | {"arguments": {"tokenizer_kind": "NullTokenizer"}})


def test_a_record_may_be_written_again(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*gpt2_files)
    assert record_tokenizer(tokenizer, tmp_path) == record_tokenizer(tokenizer, tmp_path)
