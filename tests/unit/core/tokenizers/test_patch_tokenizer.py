"""Vocabularies as Pai-Megatron-Patch counts them, against the sizes of published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer, patched_vocab_size
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from megatron.core.tokenizers.tokenizers_engine import TokenizersEngine


@pytest.mark.parametrize(
    ("kind", "base", "own", "extra", "rows"),
    [
        ("Qwen2Tokenizer", 151643, 151665, 421, 152064),  # Qwen2.5 7B to 72B
        ("Qwen2Tokenizer", 151643, 151665, 293, 151936),  # Qwen2.5 0.5B to 3B
        ("LLama3Tokenizer", 128000, 128256, 256, 128256),
        ("LLama2Tokenizer", 32000, 32000, 0, 32000),
        ("DeepSeekV2Tokenizer", 100000, 100002, 2400, 102400),
        ("DeepSeekV2Tokenizer", 128000, 128815, 467, 129280),  # DeepSeek-V3
        ("StarcoderTokenizerFromHF", 49152, 49152, 0, 49152),
    ],
)
def test_rows_are_those_of_the_published_model(kind: str, base: int, own: int, extra: int, rows: int) -> None:
    assert patched_vocab_size(kind, base, own, extra) == rows


def test_added_tokens_without_a_row_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(TokenizerError, match=r"vocabulary of 151643, .* ids up to 151664; give --extra-vocab-size 22 "):
        patched_vocab_size("Qwen2Tokenizer", 151643, 151665, 0)
    assert patched_vocab_size("Qwen2Tokenizer", 151643, 151665, 22) == 151665


def test_only_with_the_patch_type_is_the_base_vocabulary_counted(hugging_face_folder: Path, tmp_path: Path) -> None:
    plain = build_tokenizer(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hugging_face_folder, extra_vocab_size=5
    )
    patched = HuggingFaceTokenizer(hugging_face_folder, 5, "Qwen2Tokenizer")
    assert (plain.vocab_size, patched.vocab_size) == (702 + 5, 699 + 5)
    record_tokenizer(patched, tmp_path)
    assert load_recorded_tokenizer(tmp_path).vocab_size == 704


def test_rows_in_all_may_be_given_in_place_of_further_ones(hugging_face_folder: Path) -> None:
    def build(rows: int) -> int:
        return build_tokenizer(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=hugging_face_folder,
            padded_vocab_size=rows,
            patch_tokenizer_type="Qwen3Tokenizer",
            vocab_size=702,
        ).vocab_size

    assert [build(rows) for rows in (702, 768)] == [702, 768]
    with pytest.raises(TokenizerError, match="--padded-vocab-size 701 is less than the 702 ids"):
        build(701)
    with pytest.raises(TokenizerError, match="give NullTokenizer --vocab-size 127"):
        build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=99, padded_vocab_size=128)


def test_files_are_read_once_for_a_vocabulary_with_rows_to_spare(
    hugging_face_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def from_file(path: Path, tokenizer_type: str) -> TokenizersEngine:
        read.append(path)
        return original(path, tokenizer_type)

    original = TokenizersEngine.from_file
    monkeypatch.setattr(TokenizersEngine, "from_file", from_file)
    tokenizer = build_tokenizer(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hugging_face_folder, padded_vocab_size=768
    )
    assert (len(read), tokenizer.vocab_size, tokenizer.arguments["extra_vocab_size"]) == (1, 768, 768 - 702)


def test_a_tokenizer_that_is_code_is_named_as_such(hugging_face_folder: Path) -> None:
    (hugging_face_folder / "tokenizer.json").unlink()
    (hugging_face_folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["x.Y", None]}})
    )
    with pytest.raises(TokenizerError, match=r"Python code of the model's author, which is never run; save a fast"):
        HuggingFaceTokenizer(hugging_face_folder)
