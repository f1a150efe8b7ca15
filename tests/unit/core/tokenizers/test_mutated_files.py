"""Damaged and forged tokenizer files of every kind build a tokenizer that encodes, or are refused in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from megatron.core.errors import InputError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from tests.harness.bounded import bad_cases
from tests.harness.mutations import mutated_bytes, mutated_json, mutated_text

TEXTS = ["", "parse the arguments  and\n\n options", "naïve 你好 🙂", "<|end|> <s>"]
Mutate = Callable[[bytes, Random], bytes]
Attempts = Callable[[str], Callable[[int], None]]
KINDS = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer", "GPTSentencePieceTokenizer")


@pytest.fixture
def attempts(
    gpt2_files: tuple[Path, Path],
    hugging_face_folder: Path,
    tiktoken_file: Path,
    sentence_piece_file: Path,
    tmp_path: Path,
) -> Attempts:
    """Return, for a kind of tokenizer, what builds and uses one of which a file is mutated."""
    vocabulary, merges = gpt2_files
    own = tmp_path / "own.model"
    shutil.copyfile(sentence_piece_file, own)
    files: dict[str, tuple[dict[str, str], dict[Path, Mutate]]] = {
        "GPT2BPETokenizer": (
            {"vocab_file": str(vocabulary), "merge_file": str(merges)},
            {vocabulary: mutated_json, merges: mutated_text},
        ),
        "HuggingFaceTokenizer": (
            {"tokenizer_model": str(hugging_face_folder)},
            {
                hugging_face_folder / "tokenizer.json": mutated_json,
                hugging_face_folder / "tokenizer_config.json": mutated_json,
            },
        ),
        "TikTokenizer": (
            {"tokenizer_model": str(tiktoken_file)},
            {tiktoken_file: mutated_json if tiktoken_file.suffix == ".json" else mutated_text},
        ),
        "GPTSentencePieceTokenizer": ({"tokenizer_model": str(own)}, {own: mutated_bytes}),
    }

    def of_kind(kind: str) -> Callable[[int], None]:
        arguments, targets = files[kind]
        original = {path: path.read_bytes() for path in targets}

        def attempt(number: int) -> None:
            draw = Random(f"{kind} {number}")
            path = draw.choice(sorted(targets))
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(targets[path](original[path], draw))
            os.replace(new, path)
            message = "none"
            try:
                tokenizer = build_tokenizer(tokenizer_type=kind, **arguments)
                for ids in tokenizer.tokenize_batch(TEXTS):
                    tokenizer.detokenize(ids)
            except InputError as error:
                message = str(error)
            finally:
                new.write_bytes(original[path])
                os.replace(new, path)
            assert message

        attempt(0)
        return attempt

    return of_kind


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_read_or_refused(kind: str, attempts: Attempts) -> None:
    assert bad_cases(attempts(kind), 200) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_mutated_files_are_read_or_refused(kind: str, attempts: Attempts) -> None:
    assert bad_cases(attempts(kind), 10_000) == []
