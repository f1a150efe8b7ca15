from __future__ import annotations

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer import NullTokenizer


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
