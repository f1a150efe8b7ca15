from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.resolution import unused_tokenizer_flags
from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer


def test_every_kind_is_built(
    gpt2_files: tuple[Path, Path], hugging_face_folder: Path, tiktoken_file: Path, sentence_piece_file: Path
) -> None:
    pytest.importorskip("tiktoken", reason="the optional package tiktoken is absent")
    keywords: dict[str, dict[str, Any]] = {
        "GPT2BPETokenizer": {"vocab_file": gpt2_files[0], "merge_file": gpt2_files[1], "vocab_size": 700},
        "HuggingFaceTokenizer": {"tokenizer_model": str(hugging_face_folder), "vocab_file": "ignored"},
        "SentencePieceTokenizer": {"tokenizer_model": sentence_piece_file, "vocab_extra_ids": 3},
        "GPTSentencePieceTokenizer": {"tokenizer_model": sentence_piece_file},
        "Llama2Tokenizer": {"tokenizer_model": sentence_piece_file},
        "TikTokenizer": {"tokenizer_model": tiktoken_file, "tiktoken_pattern": "v2"},
        "NullTokenizer": {"vocab_size": 127},
    }
    sizes = {}
    for name in TOKENIZER_TYPES:
        tokenizer = build_tokenizer(tokenizer_type=name, **keywords[name])
        sizes[name] = tokenizer.vocab_size
        assert tokenizer.name == name
        again = build_tokenizer(**dict(tokenizer.arguments))
        assert again.arguments == tokenizer.arguments
        assert again.tokenize("1 2") == tokenizer.tokenize("1 2")
    assert sizes == dict(zip(TOKENIZER_TYPES, [700, 702, 399, 391, 391, 1269, 128], strict=True))


def test_gpt2_is_the_default(gpt2_files: tuple[Path, Path]) -> None:
    assert build_tokenizer(vocab_file=gpt2_files[0], merge_file=gpt2_files[1]).name == "GPT2BPETokenizer"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokeniser"}, "did you mean GPT2BPETokenizer"),
        ({"tokenizer_type": "xyz"}, "choose one of GPT2BPETokenizer, .*NullTokenizer"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "extra_vocab_size": 3}, "larger --vocab-size"),
        ({"extra_vocab_size": -1}, "--extra-vocab-size -1 is negative"),
        ({"vocab_extra_ids": -1}, "--vocab-extra-ids -1 is negative"),
        ({"vocab_extra_ids": 5}, "only SentencePieceTokenizer"),
        ({"padded_vocab_size": 699}, "699 is less than the 700 ids of the tokenizer; give 700 or more"),
        ({"tokenizer_type": "NullTokenizer", "padded_vocab_size": 128}, "give NullTokenizer --vocab-size 127"),
        ({"vocab_size": 701}, "--vocab-size 701: GPT2BPETokenizer has 700 ids"),
    ],
)
def test_settings_that_cannot_be(gpt2_files: tuple[Path, Path], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(**({"vocab_file": gpt2_files[0], "merge_file": gpt2_files[1]} | keywords))


@pytest.mark.parametrize(("padded", "extra"), [(700, 0), (704, 4)])
def test_a_padded_size_has_ids_without_text(gpt2_files: tuple[Path, Path], padded: int, extra: int) -> None:
    tokenizer = build_tokenizer(vocab_file=gpt2_files[0], merge_file=gpt2_files[1], padded_vocab_size=padded)
    assert (tokenizer.vocab_size, tokenizer.arguments["extra_vocab_size"]) == (padded, extra)


def test_the_size_that_is_given_is_without_extra_ids(gpt2_files: tuple[Path, Path]) -> None:
    files = {"vocab_file": gpt2_files[0], "merge_file": gpt2_files[1]}
    assert build_tokenizer(**files, vocab_size=700, extra_vocab_size=3).vocab_size == 703  # type: ignore[arg-type]


def test_flags_of_other_kinds_are_named() -> None:
    given = ("vocab_file", "tokenizer_model", "tiktoken_pattern", "vocab_size")
    ends = {
        "GPT2BPETokenizer": ["tokenizer-model", "tiktoken-pattern"],
        "Llama2Tokenizer": ["vocab-file", "tiktoken-pattern"],
        "TikTokenizer": ["vocab-file"],
        "NullTokenizer": ["vocab-file", "tokenizer-model", "tiktoken-pattern"],
    }
    for name, flags in ends.items():
        assert unused_tokenizer_flags(name, given) == [
            f"--{flag} has no effect: the tokenizer is {name}" for flag in flags
        ]
        assert unused_tokenizer_flags(name, ()) == []


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("GPT2BPETokenizer", "tokenizers"),
        ("HuggingFaceTokenizer", "tokenizers"),
        ("SentencePieceTokenizer", "sentencepiece"),
        ("TikTokenizer", "tiktoken"),
    ],
)
def test_missing_package_is_named(
    name: str,
    package: str,
    gpt2_files: tuple[Path, Path],
    hugging_face_folder: Path,
    tiktoken_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    model = hugging_face_folder if name == "HuggingFaceTokenizer" else tiktoken_file
    with pytest.raises(TokenizerError, match=f"{name} needs the package {package}.*pip install {package}"):
        build_tokenizer(
            tokenizer_type=name,
            vocab_file=gpt2_files[0],
            merge_file=gpt2_files[1],
            tokenizer_model=model,
            tiktoken_pattern="v1",
        )


def test_import_needs_no_optional_package_and_no_torch() -> None:
    code = (
        "import sys, megatron.core.tokenizers.tokenizer_record\n"
        "print([m for m in ('torch', 'tokenizers', 'sentencepiece', 'tiktoken', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
