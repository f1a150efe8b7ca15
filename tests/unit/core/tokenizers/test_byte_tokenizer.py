"""The tokenizer without files: bytes of UTF-8, and the end of a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer, reject_unused_flags
from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
from megatron.core.tokenizers.text_encoder import HARD_TEXTS, choose_encoder, missing_engine
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from megatron.core.tokenizers.tokenizers_engine import TokenizersEngine


def no_report(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_the_ids_of_a_text_are_its_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.tokenize(text) == list(text.encode("utf-8"))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_document_ends_with_an_id_of_its_own() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.files) == (257, 256, ())
    assert tokenizer.detokenize([97, 256, 256, 98]) == "a<|endoftext|><|endoftext|>b"
    assert 256 not in tokenizer.tokenize("<|endoftext|>")
    assert tokenizer.tokenize_batch(["a", ""], num_threads=2) == [[97], []]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    tokenizer = ByteTokenizer(extra_vocab_size=7)
    assert tokenizer.vocab_size == 264
    assert tokenizer.detokenize([195, 169, 195]) == "é\ufffd"
    assert tokenizer.detokenize([195, 256, 169]) == "\ufffd<|endoftext|>\ufffd"
    assert tokenizer.detokenize([97, 257, 263, -1, 98]) == "ab"
    with pytest.raises(TokenizerError, match=r"lone surrogate U\+D800"):
        tokenizer.tokenize("a\ud800")


def test_its_engine_gives_the_ids_of_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    for engine in ("auto", "bytes", "reference"):
        encoder = choose_encoder(tokenizer, engine, ["sample"], no_report)
        assert encoder.name == ("reference" if engine == "reference" else "bytes")
        ids = encoder.encode([text.encode() for text in HARD_TEXTS])
        assert [each.tolist() for each in ids] == [tokenizer.tokenize(text) for text in HARD_TEXTS]
        assert missing_engine(tokenizer, encoder) is None
    with pytest.raises(TokenizerError, match="--tokenizer-engine words cannot be used with ByteTokenizer"):
        choose_encoder(tokenizer, "words", [], no_report)


def test_a_checkpoint_records_it_with_its_size(tmp_path: Path) -> None:
    record_tokenizer(build_tokenizer(tokenizer_type="ByteTokenizer", padded_vocab_size=384), tmp_path)
    loaded = load_recorded_tokenizer(tmp_path)
    assert (loaded.name, loaded.vocab_size, loaded.eod_id) == ("ByteTokenizer", 384, 256)
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["tokenizer_record.json"]


def test_a_size_that_is_not_its_own_and_files_are_rejected() -> None:
    assert build_tokenizer(tokenizer_type="ByteTokenizer", vocab_size=257).vocab_size == 257
    with pytest.raises(TokenizerError, match="--vocab-size 300 does not match the 257 ids of ByteTokenizer; omit"):
        build_tokenizer(tokenizer_type="ByteTokenizer", vocab_size=300)
    with pytest.raises(TokenizerError, match="--tokenizer-model has no effect: the tokenizer is ByteTokenizer; omit"):
        reject_unused_flags("ByteTokenizer", ["tokenizer_model"])
    reject_unused_flags("ByteTokenizer", ["vocab_size"])


def test_its_tokenizer_json_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer_json(), encoding="utf-8")
    engine = TokenizersEngine.from_file(tmp_path / "tokenizer.json", "test")
    assert engine.vocab_size == 257
    for text in HARD_TEXTS:
        if "<|endoftext|>" not in text:
            assert engine.encode(text) == tokenizer.tokenize(text)
