"""Building a tokenizer of any kind: vocabulary sizes, the null tokenizer, and files that are damaged or forged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.core.errors import InputError, TokenizerError
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer, unused_tokenizer_flags
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer, patched_vocab_size
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from megatron.core.tokenizers.tokenizers_engine import TokenizersEngine
from tests.harness.bounded import bad_cases
from tests.harness.mutations import mutated_bytes, mutated_json, mutated_text


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
        "ByteTokenizer": {},
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
    assert sizes == dict(zip(TOKENIZER_TYPES, [700, 702, 399, 391, 391, 1269, 257, 128], strict=True))


def test_gpt2_is_the_default(gpt2_files: tuple[Path, Path]) -> None:
    assert build_tokenizer(vocab_file=gpt2_files[0], merge_file=gpt2_files[1]).name == "GPT2BPETokenizer"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokeniser"}, "did you mean GPT2BPETokenizer"),
        ({"tokenizer_type": "xyz"}, "use one of GPT2BPETokenizer, .*NullTokenizer"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "extra_vocab_size": 3}, "increase --vocab-size"),
        ({"extra_vocab_size": -1}, "--extra-vocab-size -1 is negative"),
        ({"vocab_extra_ids": -1}, "--vocab-extra-ids -1 is negative"),
        ({"vocab_extra_ids": 5}, "only with --tokenizer-type SentencePieceTokenizer"),
        ({"padded_vocab_size": 699}, "699 is less than the 700 ids of the tokenizer; use 700 or more"),
        (
            {"tokenizer_type": "NullTokenizer", "padded_vocab_size": 128},
            ("not supported with NullTokenizer; use --vocab-size 127"),
        ),
        ({"vocab_size": 701}, "--vocab-size 701 does not match the 700 ids of GPT2BPETokenizer"),
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
        "ByteTokenizer": ["vocab-file", "tokenizer-model", "tiktoken-pattern"],
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


def test_one_id_more_than_the_vocabulary_size() -> None:
    tokenizer = NullTokenizer(127)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.files) == (128, 127, ())
    assert tokenizer.tokenize(" 0 5\n127 ") == [0, 5, 127]
    assert tokenizer.tokenize_batch(["", "3"], num_threads=2) == [[], [3]]
    assert tokenizer.detokenize([0, 5, 127]) == "0 5 127"


def test_what_is_not_an_id() -> None:
    tokenizer = NullTokenizer(9)
    for text, message in (("1 x", "invalid literal.*'x'"), ("10", r"id 10 is not in 0\.\.9"), ("-1", "id -1")):
        with pytest.raises(TokenizerError, match=message):
            tokenizer.tokenize(text)


def test_vocabulary_size_is_needed() -> None:
    with pytest.raises(TokenizerError, match="needs --vocab-size"):
        NullTokenizer(None)
    with pytest.raises(TokenizerError, match="vocabulary size 0 is not positive"):
        NullTokenizer(0)


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
        ("QwenTokenizer", 151643, 151851, 85, 151936),  # Qwen 7B, whose special tokens count as its vocabulary
    ],
)
def test_rows_are_those_of_the_published_model(kind: str, base: int, own: int, extra: int, rows: int) -> None:
    assert patched_vocab_size(kind, base, own, extra) == rows


def test_added_tokens_without_a_row_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(
        TokenizerError, match=r"vocabulary of 151643 ids, .* ids up to 151664; use --extra-vocab-size 22 "
    ):
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
    with pytest.raises(TokenizerError, match="not supported with NullTokenizer; use --vocab-size 127"):
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
    with pytest.raises(TokenizerError, match=r"custom Python code, which is never run; save a fast"):
        HuggingFaceTokenizer(hugging_face_folder)


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
