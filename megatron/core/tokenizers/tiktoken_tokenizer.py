"""tiktoken tokenizers, with a block of special tokens before the vocabulary."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer import load_package, read_json, read_text, require_file, require_unicode

DEFAULT_VOCAB_SIZE = 131072
DEFAULT_NUM_SPECIAL_TOKENS = 1000
DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
END_TOKEN = "</s>"
# Pre-tokenization patterns: word, digit, punctuation, line break, white space.
# v2 also splits a word before an upper-case letter that follows a lower-case one.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_V1 = (_BEFORE_WORD + r"+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")
_V2 = (
    f"{_BEFORE_WORD}[{_UPPER}]*[{_LOWER}]+",
    f"{_BEFORE_WORD}[{_UPPER}]+[{_LOWER}]*",
    *(r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
PATTERNS = {"v1": "|".join(_V1), "v2": "|".join(_V2)}


class TikTokenizer:
    """tiktoken tokenizer whose vocabulary follows a block of special tokens.

    Ids 0 to ``num_special_tokens`` - 1 are the special tokens. Rank r of the file has id
    ``num_special_tokens`` + r. Only the ranks that fit in ``vocab_size`` are used. Its default is
    131,072, or less if the file has fewer ranks. "</s>" is the end-of-document token. Special tokens
    spelled out in a text are ordinary characters.

    Raises:
        TokenizerError: the file is missing or damaged, or the sizes are inconsistent.
    """

    name = "TikTokenizer"

    def __init__(
        self,
        tokenizer_model: str | Path | None,
        *,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int = DEFAULT_NUM_SPECIAL_TOKENS,
        special_tokens: Sequence[str] = (),
        extra_vocab_size: int = 0,
    ) -> None:
        path = require_file(tokenizer_model, "--tokenizer-model", self.name)
        if pattern not in PATTERNS:
            raise TokenizerError(f"{self.name} needs --tiktoken-pattern v1 or v2, found {pattern!r}")
        special = tuple(special_tokens or DEFAULT_SPECIAL_TOKENS)
        _check_special_tokens(special, num_special_tokens)
        ranks = _read_ranks(path)
        size = min(DEFAULT_VOCAB_SIZE, num_special_tokens + len(ranks)) if vocab_size is None else vocab_size
        if not num_special_tokens + 256 <= size <= num_special_tokens + len(ranks):
            raise TokenizerError(
                f"{self.name}: vocabulary size {size} is not between {num_special_tokens} special tokens + "
                f"256 bytes and {num_special_tokens} + {len(ranks)} entries of {path}; change --vocab-size "
                "or --tiktoken-num-special-tokens"
            )
        used = ranks[: size - num_special_tokens]
        package = load_package("tiktoken", self.name)
        self._model: Any = package.Encoding(
            name=path.name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(used)},
            special_tokens={token: i for i, token in enumerate(special)},
        )
        self._special_tokens = special
        self._num_ids = size
        self._num_special = num_special_tokens
        self.vocab_size = size + extra_vocab_size
        self.eod_id = special.index(END_TOKEN)
        self.files = (path,)
        self.arguments: Mapping[str, object] = {
            "tokenizer_type": self.name,
            "tokenizer_model": str(path),
            "vocab_size": size,
            "extra_vocab_size": extra_vocab_size,
            "tiktoken_pattern": pattern,
            "tiktoken_num_special_tokens": num_special_tokens,
            "tiktoken_special_tokens": list(special),
        }

    def tokenize(self, text: str) -> list[int]:
        """Encode one text."""
        require_unicode([text])
        ids: list[int] = self._model.encode_ordinary(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts."""
        require_unicode(texts)
        ids: list[list[int]] = self._model.encode_ordinary_batch(list(texts), num_threads=num_threads)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids with special tokens spelled out (<SPECIAL_id> if unnamed). Invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self._token_bytes, ids)).decode("utf-8", errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < len(self._special_tokens):
            return self._special_tokens[token_id].encode()
        if 0 <= token_id < self._num_special:
            return f"<SPECIAL_{token_id}>".encode()
        if self._num_special <= token_id < self._num_ids:
            token: bytes = self._model.decode_single_token_bytes(token_id)
            return token
        return b""


def _check_special_tokens(special: tuple[str, ...], num_special_tokens: int) -> None:
    if len(set(special)) != len(special):
        raise TokenizerError(f"special tokens are repeated: {' '.join(special)}; change --tiktoken-special-tokens")
    missing = [token for token in ("<unk>", "<s>", END_TOKEN) if token not in special]
    if missing:
        raise TokenizerError(
            f"required special tokens are missing: {' '.join(missing)}; change --tiktoken-special-tokens"
        )
    if len(special) > num_special_tokens:
        raise TokenizerError(
            f"--tiktoken-num-special-tokens {num_special_tokens} is less than the number of special tokens, "
            f"{len(special)}"
        )


def _read_ranks(path: Path) -> list[bytes]:
    """Read the tokens in the order of their ranks.

    Supports two formats: a JSON list of {"rank", "token_bytes" (base64), "token_str"}, or lines of "base64 rank".
    """
    ranks = _decode_entries(path, _json_entries(path) if path.suffix == ".json" else _line_entries(path))
    if len(ranks) < 256 or any(len(token) != 1 for token in ranks[:256]) or len(set(ranks)) != len(ranks):
        raise TokenizerError(
            f"{path}: the first 256 ranks must be the single bytes, and no token may repeat; change --tokenizer-model"
        )
    return ranks


def _json_entries(path: Path) -> list[tuple[Any, Any]]:
    vocabulary = read_json(path)
    if not isinstance(vocabulary, list) or not all(isinstance(entry, dict) for entry in vocabulary):
        raise TokenizerError(f"{path} is not a list of tiktoken entries; change --tokenizer-model")
    return [(entry.get("token_bytes"), entry.get("rank")) for entry in vocabulary]


def _line_entries(path: Path) -> list[tuple[Any, Any]]:
    entries: list[tuple[Any, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        words = line.split()
        if len(words) not in (0, 2):
            raise TokenizerError(f"{path}:{number}: a token and its rank are expected; change --tokenizer-model")
        if words:
            entries.append((words[0], words[1]))
    return entries


def _decode_entries(path: Path, entries: Sequence[tuple[Any, Any]]) -> list[bytes]:
    tokens = []
    for number, (encoded, rank) in enumerate(entries):
        try:
            token = base64.b64decode(encoded, validate=True)
            fits = int(rank) == number
        except (TypeError, ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path}: entry {number} is damaged ({error}); change --tokenizer-model") from error
        if not fits:
            raise TokenizerError(f"{path}: entry {number} has rank {rank}; ranks must be consecutive from 0")
        tokens.append(token)
    return tokens
