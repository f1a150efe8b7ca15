"""Perplexity of texts, computed per document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import InputError
from megatron.core.inference import ScoredRow
from megatron.evaluation.model_ranks import ModelRanks, TextEncoding

_LINES = (".jsonl", ".json")
_AT_ONCE = 64
_LARGEST_LOSS = 700.0


@dataclasses.dataclass(frozen=True)
class Document:
    """Text with the name of its source."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class TextLikelihood:
    """Log-likelihood of a text (natural logarithm), with its numbers of tokens and UTF-8 bytes."""

    name: str
    num_tokens: int
    num_bytes: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        """Return the perplexity per token, or infinity if it overflows."""
        loss = -self.log_likelihood / max(self.num_tokens, 1)
        return math.exp(loss) if loss < _LARGEST_LOSS else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Return the bits per byte of the text, a figure that does not depend on the tokenizer."""
        return -self.log_likelihood / math.log(2.0) / max(self.num_bytes, 1)

    def as_json(self) -> dict[str, Any]:
        """Return all fields and both derived figures, for a line of JSON."""
        return {
            "document": self.name,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "log_likelihood": self.log_likelihood,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def read_documents(paths: Sequence[str], key: str) -> Iterator[Document]:
    """Yield the documents of files: the ``key`` of each line of a .jsonl file, or the whole of any other file.

    Raises:
        InputError: a file cannot be read, or a line has no such text.
    """
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read --text {path}: {error}") from error
        if Path(path).suffix not in _LINES:
            yield Document(path, text)
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield Document(f"{path}:{number}", _text_of(line, key, f"{path}, line {number}"))


def _text_of(line: str, key: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--text {place}: {error}") from error
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InputError(f"--text {place} has no string {key!r}; select the key of the text with --json-key")
    return text


def measure_texts(
    ranks: ModelRanks, encoding: TextEncoding, documents: Sequence[Document], max_length: int
) -> Iterator[TextLikelihood]:
    """Yield the likelihood of each document; only the first rank calls this.

    The context starts with the BOS token. A document is scored in consecutive windows of ``max_length`` tokens. Each
    window after the first starts with the last token of the previous window, and its tokens attend no further back.

    Raises:
        InputError: the tokenizer has no such token, or the model's logits are not finite.
    """
    for start in range(0, len(documents), _AT_ONCE):
        some = documents[start : start + _AT_ONCE]
        ids = [encoding.encode(document.text, with_leading=False) for document in some]
        rows = [list(_windows([encoding.first_id, *tokens], max_length)) for tokens in ids]
        scores = iter(ranks.score([row for own in rows for row in own]))
        for document, tokens, own in zip(some, ids, rows, strict=True):
            total = sum(next(scores).log_probability for _ in own)
            yield TextLikelihood(document.name, len(tokens), len(document.text.encode()), total)


def in_all(found: Sequence[TextLikelihood]) -> TextLikelihood:
    """Return the combined likelihood of all texts."""
    return TextLikelihood(
        f"{len(found)} documents",
        sum(each.num_tokens for each in found),
        sum(each.num_bytes for each in found),
        math.fsum(each.log_likelihood for each in found),
    )


def _windows(tokens: Sequence[int], max_length: int) -> Iterator[ScoredRow]:
    for start in range(0, len(tokens) - 1, max_length):
        window = tuple(tokens[start : start + max_length + 1])
        yield ScoredRow(window, len(window) - 1)
