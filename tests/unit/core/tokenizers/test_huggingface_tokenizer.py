from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.gpt2_bpe_tokenizer import check_merges
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizers_engine import TokenizersEngine

TEXTS = ["", "parse the arguments", "naïve 你好 🙂", "  spaces\n\nand lines ", "x" * 50]


def test_ids_are_the_models_without_added_tokens_truncation_or_padding(
    hugging_face_folder: Path, trained: Tokenizer
) -> None:
    tokenizer = HuggingFaceTokenizer(hugging_face_folder)
    expected = [trained.encode(text).ids for text in TEXTS]
    assert max(map(len, expected)) > 3
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    assert tokenizer.tokenize_batch(TEXTS, num_threads=2) == expected
    assert [tokenizer.detokenize(ids) for ids in expected] == TEXTS


def test_what_a_text_begins_with_where_special_tokens_are_asked_for(hugging_face_folder: Path) -> None:
    assert HuggingFaceTokenizer(hugging_face_folder).leading_ids == (699,)
    path = hugging_face_folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    assert HuggingFaceTokenizer(hugging_face_folder).leading_ids == ()


def test_special_tokens(hugging_face_folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(hugging_face_folder, extra_vocab_size=11)
    assert tokenizer.vocab_size == 702 + 11
    assert tokenizer.eod_id == 700
    assert tokenizer.tokenize("<|turn|>")[0] == 701
    assert tokenizer.detokenize([701, *tokenizer.tokenize("hi"), 700]) == "<|turn|>hi<|end|>"


def test_file_alone_equals_its_folder(hugging_face_folder: Path) -> None:
    folder = HuggingFaceTokenizer(hugging_face_folder)
    file = HuggingFaceTokenizer(hugging_face_folder / "tokenizer.json")
    assert file.tokenize("arguments") == folder.tokenize("arguments")
    assert (file.eod_id, file.files) == (folder.eod_id, folder.files)
    assert [path.name for path in folder.files] == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("name", "content", "end_id"),
    [
        ("tokenizer_config.json", {"eos_token": "<|turn|>"}, 701),
        ("special_tokens_map.json", {"eos_token": "<|end|>"}, 700),
        ("special_tokens_map.json", {"eos_token": {"content": "<|turn|>"}}, 701),
        ("generation_config.json", {"eos_token_id": [701, 700]}, 701),
        ("generation_config.json", {"eos_token_id": 700}, 700),
        ("generation_config.json", {}, None),
    ],
)
def test_end_of_document(hugging_face_folder: Path, name: str, content: object, end_id: int | None) -> None:
    (hugging_face_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (hugging_face_folder / name).write_text(json.dumps(content))
    assert HuggingFaceTokenizer(hugging_face_folder).eod_id == end_id


def test_unknown_end_of_document(hugging_face_folder: Path) -> None:
    (hugging_face_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    with pytest.raises(TokenizerError, match=r"eos_token to '<\|stop\|>', but tokenizer.json"):
        HuggingFaceTokenizer(hugging_face_folder)


def test_what_is_missing_or_damaged(hugging_face_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"Qwen/Qwen2.5-0.5B does not exist.*not downloaded"):
        HuggingFaceTokenizer("Qwen/Qwen2.5-0.5B")
    with pytest.raises(TokenizerError, match="needs --tokenizer-model"):
        HuggingFaceTokenizer(None)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        HuggingFaceTokenizer(empty)
    (hugging_face_folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match="cannot read"):
        HuggingFaceTokenizer(hugging_face_folder)


def test_merges_that_are_cut_short_are_named(hugging_face_folder: Path) -> None:
    path = hugging_face_folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    last = "".join(content["model"]["merges"].pop())
    path.write_text(json.dumps(content), encoding="utf-8")
    message = (
        rf"tokenizer.json has 442 merges, but the 699 tokens of .* need 443: no merge produces '{re.escape(last)}'"
    )
    with pytest.raises(TokenizerError, match=message):
        HuggingFaceTokenizer(hugging_face_folder)
    content["model"]["ignore_merges"] = True  # such a model finds whole words in its vocabulary
    path.write_text(json.dumps(content), encoding="utf-8")
    assert HuggingFaceTokenizer(hugging_face_folder).vocab_size == 702


@pytest.mark.parametrize("prefix", ["\0", "##", "argument"])
def test_a_prefix_that_merges_lack_is_refused_before_the_package_cuts_it_off(
    hugging_face_folder: Path, prefix: str
) -> None:
    path = hugging_face_folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["continuing_subword_prefix"] = prefix
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: merge 0, .* the continuing_subword_prefix"):
        HuggingFaceTokenizer(hugging_face_folder)


def test_a_prefix_that_merges_have_in_their_second_part_is_read(hugging_face_folder: Path) -> None:
    content = json.loads((hugging_face_folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": [["a", "##b"]]}
    content |= {"pre_tokenizer": None, "decoder": None, "added_tokens": [], "post_processor": None}
    content["model"] = model | {"continuing_subword_prefix": "##"}
    (hugging_face_folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (hugging_face_folder / "tokenizer_config.json").unlink()
    assert HuggingFaceTokenizer(hugging_face_folder).tokenize("ab") == [2]


def test_a_template_beside_the_tokenizer_is_one_of_its_files(hugging_face_folder: Path) -> None:
    (hugging_face_folder / "tokenizer_config.json").unlink()
    for name in ("chat_template.jinja", "vocab.json", "README.md"):
        (hugging_face_folder / name).write_text("{}")
    files = HuggingFaceTokenizer(hugging_face_folder).files
    assert [path.name for path in files] == ["tokenizer.json", "vocab.json", "chat_template.jinja"]


class PanicException(BaseException):
    """Stand for what the package raises where it panics."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(PanicException, TokenizerError), (Exception, TokenizerError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_what_interrupts_reading_a_file_is_passed_on(
    raised: type[BaseException], expected: type[BaseException], hugging_face_folder: Path, monkeypatch
) -> None:
    def from_file(path: str) -> None:
        raise raised("stop")

    package = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file))
    monkeypatch.setattr("megatron.core.tokenizers.tokenizers_engine.load_package", lambda *names: package)
    with pytest.raises(expected, match="stop"):
        HuggingFaceTokenizer(hugging_face_folder)


def test_an_empty_vocabulary_has_no_ids_and_half_a_pair_none_in_any(hugging_face_folder: Path) -> None:
    assert TokenizersEngine.byte_level_bpe({}, [], "GPT2BPETokenizer").vocab_size == 0
    engine = TokenizersEngine.from_file(hugging_face_folder / "tokenizer.json", "HuggingFaceTokenizer")
    assert [engine.token_to_id(token) for token in ("\ud800", "a\udfff", "<|end|>")] == [None, None, 700]


def test_the_package_gets_texts_by_the_batch(monkeypatch) -> None:
    batches: list[list[str]] = []

    def encode_batch_fast(batch: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        batches.append(batch)
        return [SimpleNamespace(ids=[len(text)]) for text in batch]

    monkeypatch.setattr("megatron.core.tokenizers.tokenizers_engine._BATCH_CHARACTERS", 4)
    engine = TokenizersEngine(SimpleNamespace(no_truncation=str, no_padding=str, encode_batch_fast=encode_batch_fast))
    assert engine.encode_batch(["ab", "cd", "e", "fg", "h", "", "abcdefg", ""]) == [
        [n] for n in (2, 2, 1, 2, 1, 0, 7, 0)
    ]
    assert batches == [["ab", "cd"], ["e", "fg", "h"], ["", "abcdefg"], [""]]


def test_a_merge_of_one_part_is_named(hugging_face_folder: Path) -> None:
    path = hugging_face_folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"] |= {"continuing_subword_prefix": "##", "merges": ["ab"]}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: merge 0, 'ab', has no part with"):
        HuggingFaceTokenizer(hugging_face_folder)


@pytest.mark.parametrize(("lacking", "vocabulary"), [("b", {"a": 0, "ab": 1}), ("ab", {"a": 0, "b": 1})])
def test_tokens_that_a_merge_needs_are_named(lacking: str, vocabulary: dict[str, int]) -> None:
    with pytest.raises(
        TokenizerError, match=f"merge 0: .* the merge 'a' 'b' needs the token '{lacking}', which v lacks"
    ):
        check_merges(vocabulary, [("a", "b")], {"a", "b"}, ("v", "m"), lambda number: f"merge {number}")
