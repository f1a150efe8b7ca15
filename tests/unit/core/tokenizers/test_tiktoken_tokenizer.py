from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tiktoken_tokenizer import PATTERNS, TikTokenizer

pytest.importorskip("tiktoken", reason="the optional package tiktoken is absent")

TEXTS = ["", "the thing in there", "abABaB aBc 12345", "naïve 你好 🙂\n\n  x", "</s> <unk>"]


def encode_slowly(ranks: list[bytes], pattern: str, text: str, offset: int) -> list[int]:
    """Merge pairs of bytes, the lowest rank first."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    ids = []
    for word in regex.findall(PATTERNS[pattern], text):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            joined = [(rank_of.get(a + b, len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts))]
            best, at = min(joined, default=(len(ranks), 0))
            if best == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [offset + rank_of[part] for part in parts]
    return ids


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_ids_follow_the_special_tokens(tiktoken_file: Path, tiktoken_ranks: list[bytes], pattern: str) -> None:
    tokenizer = TikTokenizer(tiktoken_file, pattern=pattern, num_special_tokens=10)
    expected = [encode_slowly(tiktoken_ranks, pattern, text, 10) for text in TEXTS]
    assert tokenizer.tokenize_batch(TEXTS, num_threads=2) == expected
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    assert [tokenizer.detokenize(ids) for ids in expected] == TEXTS
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (10 + 269, 2)


def test_second_pattern_cuts_where_capitals_begin() -> None:
    assert regex.findall(PATTERNS["v1"], "fooBar 12 x!\n") == ["fooBar", " ", "1", "2", " x", "!\n"]
    assert regex.findall(PATTERNS["v2"], "fooBar 12 x!\n") == ["foo", "Bar", " ", "1", "2", " x", "!\n"]


def test_vocabulary_size_cuts_the_file(tiktoken_file: Path, tiktoken_ranks: list[bytes]) -> None:
    tokenizer = TikTokenizer(tiktoken_file, pattern="v1", vocab_size=266, num_special_tokens=7, extra_vocab_size=5)
    assert tokenizer.vocab_size == 271
    assert tokenizer.tokenize("the thing") == encode_slowly(tiktoken_ranks[:259], "v1", "the thing", 7)
    assert tokenizer.detokenize([268, 2, *tokenizer.tokenize("in")]) == "</s>in"


def test_a_vocabulary_has_all_bytes_at_least_and_all_entries_at_most(
    tiktoken_file: Path, tiktoken_ranks: list[bytes], tmp_path: Path
) -> None:
    for size in (7 + 256, 7 + 269):
        tokenizer = TikTokenizer(tiktoken_file, pattern="v1", vocab_size=size, num_special_tokens=7)
        assert tokenizer.vocab_size == size
        assert tokenizer.detokenize([-1, 2, size]) == "</s>"
    bytes_alone = tmp_path / "bytes.tiktoken"
    bytes_alone.write_text("".join(f"{base64.b64encode(tiktoken_ranks[i]).decode()} {i}\n" for i in range(256)))
    assert TikTokenizer(bytes_alone, pattern="v1", num_special_tokens=7).tokenize("a") == [7 + ord("a")]


def test_unnamed_special_tokens_and_broken_bytes(tiktoken_file: Path) -> None:
    tokenizer = TikTokenizer(
        tiktoken_file, pattern="v1", num_special_tokens=9, special_tokens=["<s>", "<unk>", "</s>", "<im>"]
    )
    assert tokenizer.detokenize([0, 3, 4, 8, 0xFF + 9]) == "<s><im><SPECIAL_4><SPECIAL_8>\ufffd"


def test_lines_of_base64(tiktoken_ranks: list[bytes], tiktoken_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.tiktoken"
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tiktoken_ranks)]
    path.write_text("\n".join(lines) + "\n")
    expected = TikTokenizer(tiktoken_file, pattern="v2").tokenize_batch(TEXTS)
    assert TikTokenizer(path, pattern="v2").tokenize_batch(TEXTS) == expected


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pattern": None}, "needs --tiktoken-pattern v1 or v2, found None"),
        ({"vocab_size": 270}, "vocabulary size 270 is not between 20 special tokens"),
        ({"vocab_size": 300}, r"20 \+ 269 entries"),
        ({"special_tokens": ["<unk>", "<s>"]}, "required special tokens are missing: </s>"),
        ({"special_tokens": ["<unk>", "<s>", "</s>", "<s>"]}, "special tokens are repeated"),
        ({"num_special_tokens": 4}, "--tiktoken-num-special-tokens 4 is less than the number of special tokens, 7"),
    ],
)
def test_settings_that_cannot_be(tiktoken_file: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        TikTokenizer(tiktoken_file, **({"pattern": "v1", "num_special_tokens": 20} | keywords))


def test_damaged_files(tiktoken_file: Path, tmp_path: Path) -> None:
    entries = json.loads(tiktoken_file.read_text(encoding="utf-8"))
    for change, message in (
        (lambda e: e[:255], "the first 256 ranks must be the single bytes"),
        (lambda e: [*e, {"rank": 300, "token_bytes": "YQ=="}], "entry 269 has rank 300"),
        (lambda e: [*e, {"rank": 269, "token_bytes": "?"}], "entry 269 is damaged"),
        (lambda e: [*e, {"rank": 269}], "entry 269 is damaged"),
        (lambda e: [*e, {"rank": 269, "token_bytes": "YQ=="}], "no token may repeat"),
        (lambda e: {"vocab": e}, "is not a list of tiktoken entries"),
        (lambda e: [*e, "YQ=="], "is not a list of tiktoken entries"),
    ):
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps(change(entries)))
        with pytest.raises(TokenizerError, match=message):
            TikTokenizer(path, pattern="v1")
    path = tmp_path / "damaged.tiktoken"
    path.write_text("AA== 0\nAQ==\n")
    with pytest.raises(TokenizerError, match=r"damaged\.tiktoken:2: a token and its rank are expected"):
        TikTokenizer(path, pattern="v1")


def test_lone_surrogate_is_refused(tiktoken_file: Path) -> None:
    tokenizer = TikTokenizer(tiktoken_file, pattern="v1")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize("a\ud800b")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize_batch(["good", "a\ud800b"], num_threads=2)
