"""A tokenizer without a vocabulary: the text is the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.core.errors import TokenizerError


class NullTokenizer:
    """Read ids as numbers separated by white space.

    ``--vocab-size N`` gives N + 1 ids, 0 to N, and the last one, N, ends a document.

    Raises:
        TokenizerError: no vocabulary size was given, or it is not positive.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise TokenizerError(f"{self.name} needs --vocab-size")
        if vocab_size < 1:
            raise TokenizerError(f"{self.name}: vocabulary size {vocab_size} is not positive; change --vocab-size")
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size
        self.files: tuple[Path, ...] = ()
        self.arguments: Mapping[str, object] = {"tokenizer_type": self.name, "vocab_size": vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Read the ids of one text.

        Raises:
            TokenizerError: a word is not a number, or not an id of this vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"{self.name} reads ids separated by white space: {error}") from error
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"{self.name}: id {token_id} is not in 0..{self.vocab_size - 1}; change --vocab-size"
                )
        return ids

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Read the ids of several texts; one thread does it."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Write the ids as numbers."""
        return " ".join(str(token_id) for token_id in ids)
