from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="the optional package sentencepiece is absent")

TEXTS = ["", "parse the arguments", "naïve 你好 🙂", "positional and optional"]


@pytest.fixture
def model(sentence_piece_file: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece_file))


def test_gpt_kind_is_the_model_alone(sentence_piece_file: Path, model: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = SentencePieceTokenizer(sentence_piece_file, "GPTSentencePieceTokenizer", extra_vocab_size=9)
    expected = [model.encode(text) for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    assert tokenizer.tokenize_batch(TEXTS, num_threads=2) == expected
    assert [tokenizer.detokenize(ids) for ids in expected] == TEXTS
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (391 + 9, model.eos_id())
    assert tokenizer.detokenize([395, *model.encode("parse"), 9999]) == "parse"


def test_llama2_kind_begins_every_text(sentence_piece_file: Path, model: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = SentencePieceTokenizer(sentence_piece_file, "Llama2Tokenizer")
    assert tokenizer.tokenize_batch(TEXTS) == [[model.bos_id(), *model.encode(text)] for text in TEXTS]
    assert tokenizer.detokenize(tokenizer.tokenize("parse the arguments")) == "parse the arguments"
    assert tokenizer.eod_id == model.eos_id()


def test_begin_and_end_may_have_the_first_id_or_none(
    sentence_piece_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bos_id", "eos_id"):
        monkeypatch.setattr(sentencepiece.SentencePieceProcessor, name, lambda model: 0)
    tokenizer = SentencePieceTokenizer(sentence_piece_file, "Llama2Tokenizer")
    assert (tokenizer.tokenize("")[0], tokenizer.eod_id) == (0, 0)
    for name in ("bos_id", "eos_id"):
        monkeypatch.setattr(sentencepiece.SentencePieceProcessor, name, lambda model: -1)
    assert SentencePieceTokenizer(sentence_piece_file, "GPTSentencePieceTokenizer").eod_id is None
    with pytest.raises(TokenizerError, match="has no begin-of-sentence id; use GPTSentencePieceTokenizer"):
        SentencePieceTokenizer(sentence_piece_file, "Llama2Tokenizer")


def test_special_tokens_follow_the_model(
    sentence_piece_file: Path, model: sentencepiece.SentencePieceProcessor
) -> None:
    tokenizer = SentencePieceTokenizer(sentence_piece_file, vocab_extra_ids=2)
    # <CLS> <SEP> <EOD> <MASK> <PAD> and two extra ids; <s> and </s> are the model's own.
    assert tokenizer.vocab_size == 391 + 7
    assert tokenizer.eod_id == 393
    assert tokenizer.tokenize("<EOD>") == [393]
    assert tokenizer.tokenize("<PAD><extra_id_1>") == [395, 397]
    assert tokenizer.tokenize("parse<SEP>the</s>") == [
        *model.encode("parse"),
        392,
        *model.encode("the"),
        model.eos_id(),
    ]
    assert tokenizer.detokenize([*model.encode("parse"), 392, *model.encode("the"), 393]) == "parse<SEP>the<EOD>"
    assert tokenizer.tokenize_batch([*TEXTS, "a<SEP>b"], num_threads=2) == [
        *(model.encode(text) for text in TEXTS),
        [*model.encode("a"), 392, *model.encode("b")],
    ]


def test_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="Llama2Tokenizer needs --tokenizer-model"):
        SentencePieceTokenizer(None, "Llama2Tokenizer")
    path = tmp_path / "not.model"
    path.write_bytes(b"something else")
    with pytest.raises(TokenizerError, match=r"not\.model is not a SentencePiece model"):
        SentencePieceTokenizer(path)


def test_lone_surrogate_is_refused(sentence_piece_file: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentence_piece_file)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize("a\ud800b")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize_batch(["good", "a\ud800b"], num_threads=2)
