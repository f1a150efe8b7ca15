"""Fill-in-the-middle (FIM): turn documents of a sample into prefix, suffix and middle, between special tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers import Tokenizer

_NOT_TEXT = "\ufffd"


@dataclass(frozen=True)
class FillInTheMiddle:
    """FIM transformation of some of a sample's documents: a model learns to write the text between prefix and suffix.

    A document is split at two random character positions. A share of ``spm_rate`` of the chosen documents is written in
    suffix-prefix-middle (SPM) order, the others in prefix-suffix-middle (PSM) order. The result depends only on the
    seed, the sample's number and its text. A document whose tokens start or end inside a character is left unchanged.
    Paper: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022).

    Attributes:
        rate: share of the documents that are transformed.
        prefix_id, middle_id, suffix_id: special tokens at the start of each part.
        document_end_id: end-of-document token. None: a sample is one document.
        split_id: token that separates the fragments of a document, which are then transformed separately at
            ``fragment_rate``. None: documents have no fragments.
        kept_beginning: a document that starts with this text is left unchanged.
        pad_id: fills a sample that became shorter. These positions are masked out.
    """

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int
    document_end_id: int | None
    split_id: int | None = None
    fragment_rate: float = 0.0
    kept_beginning: str | None = None
    pad_id: int = 0

    def apply(self, text: NDArray[np.int64], num_tokens: int, seed: int, number: int) -> int:
        """Transform ``num_tokens`` tokens in ``text`` in place, truncate, and return the new number of tokens.

        Shapes: text ``[sequence_length + 1]``.
        """
        generator = np.random.default_rng((seed, number))
        rearranged = itertools.chain.from_iterable(
            self._document(document, generator) if kind == "text" else [document]
            for kind, document in _cut(text[:num_tokens], self.document_end_id)
        )
        tokens = np.concatenate([*rearranged, np.empty(0, np.int64)])[: len(text)]
        text[: len(tokens)] = tokens
        text[len(tokens) :] = self.pad_id
        return len(tokens)

    def _document(self, document: NDArray[np.int64], generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        if self.split_id is None:
            yield self._permuted(document, self.rate, generator)
        elif generator.random() < self.rate:
            for kind, fragment in _cut(document, self.split_id):
                yield fragment if kind == "end" else self._permuted(fragment, self.fragment_rate, generator)
        else:
            yield document

    def _permuted(self, tokens: NDArray[np.int64], rate: float, generator: np.random.Generator) -> NDArray[np.int64]:
        # Always draw four numbers, so that no draw depends on the outcome of earlier ones.
        chosen, suffix_first, *places = generator.random(4)
        content = self.tokenizer.detokenize(tokens.tolist())
        if chosen >= rate or _NOT_TEXT in content or not content:
            return tokens
        if self.kept_beginning is not None and content.startswith(self.kept_beginning):
            return tokens
        begin, end = sorted(int(place * (len(content) + 1)) for place in places)
        parts = [content[:begin], content[begin:end], content[end:]]
        num_leading = len(self.tokenizer.tokenize(""))
        prefix, middle, suffix = (ids[num_leading:] for ids in self.tokenizer.tokenize_batch(parts))
        if suffix_first < self.spm_rate:
            ids = [self.prefix_id, self.suffix_id, *suffix, self.middle_id, *prefix, *middle]
        else:
            ids = [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id, *middle]
        return np.array(ids, np.int64)


def special_token_id(tokenizer: Tokenizer, token: str, flag: str) -> int:
    """Return the id of a special token.

    Raises:
        TokenizerError: the tokenizer does not encode ``token`` as one token; the message names it and ``flag``.
    """
    advice = f"set {flag} to one of its special tokens"
    try:
        ids = tokenizer.tokenize(token)[len(tokenizer.tokenize("")) :]
    except TokenizerError as error:
        raise TokenizerError(f"{flag} {token}: the tokenizer cannot encode it ({error}); {advice}") from error
    if len(ids) != 1:
        raise TokenizerError(f"{flag} {token}: the tokenizer encodes it as {len(ids)} tokens instead of one; {advice}")
    return ids[0]


def _cut(tokens: NDArray[np.int64], end_id: int | None) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield each ``end_id`` ("end") and the non-empty runs of other tokens between them ("text"), in order."""
    begin = 0
    for place in np.flatnonzero(tokens == end_id).tolist() if end_id is not None else ():
        if place > begin:
            yield "text", tokens[begin:place]
        yield "end", tokens[place : place + 1]
        begin = place + 1
    if begin < len(tokens):
        yield "text", tokens[begin:]
