"""The protocol that every tokenizer meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron.core.errors import TokenizerError


class Tokenizer(Protocol):
    """Turn text into token ids and back.

    Text that merely spells a special token is ordinary text, except where the tokenizer's own files or
    Megatron's rules for its kind say otherwise (HuggingFaceTokenizer, SentencePieceTokenizer).
    """

    @property
    def name(self) -> str:
        """Give the kind, as ``--tokenizer-type`` spells it."""

    @property
    def vocab_size(self) -> int:
        """Give the number of ids, special tokens included, padding not included."""

    @property
    def eod_id(self) -> int | None:
        """Give the id that ends a document, or None where the tokenizer has none."""

    @property
    def files(self) -> tuple[Path, ...]:
        """List the files that the tokenizer was read from, and those of its model folder that travel with them.

        The first ones are all that it takes to build it again.
        """

    @property
    def arguments(self) -> Mapping[str, object]:
        """Give the keywords that make ``build_tokenizer`` build this one again, as JSON values."""

    def tokenize(self, text: str) -> list[int]:
        """Encode one text; only Llama2Tokenizer adds a token of its own, at the beginning.

        Raises:
            TokenizerError: the text cannot be encoded.
        """

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts, each as ``tokenize`` would, whatever the number of threads.

        Raises:
            TokenizerError: one of the texts cannot be encoded.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids; ids that name no token (rows that pad the vocabulary) contribute nothing."""


def require_unicode(texts: Sequence[str]) -> None:
    """Refuse half characters, which an escape such as ``\\ud800`` puts into a str.

    The engines differ over them, and one engine's versions do too: an error, U+FFFD, or a crash.

    Raises:
        TokenizerError: a text holds a lone surrogate.
    """
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"the text is not valid Unicode: character {error.start} is the lone surrogate "
                    f"U+{ord(text[error.start]):04X}"
                ) from error
