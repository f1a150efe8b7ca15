"""What preprocessing needs of a tokenizer: arrays of ids from UTF-8 text, as fast as an engine gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.tokenizer import Tokenizer


class TextEncoder(Protocol):
    """Encode many texts in the calling thread, each as the tokenizer that it stands for does."""

    @property
    def name(self) -> str:
        """Give the name of the engine, as ``--tokenizer-engine`` spells it."""

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts of valid UTF-8, one array of ids (of any integer type) a text.

        An array is best used up before the next one is asked for: its memory is then still in the processor's caches
        when the next is written there.

        Raises:
            TokenizerError: a text cannot be encoded; now, or when its array is asked for.
        """

    def renew(self) -> None:
        """Give back the memory that grew with what was encoded so far."""


class ReferenceEncoder:
    """Encode with the tokenizer itself: the definition that faster engines are held against."""

    name = "reference"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Encode texts, one array each."""
        ids = self._tokenizer.tokenize_batch([str(text, "utf-8") for text in texts], num_threads=1)
        return [np.array(tokens, np.int64) for tokens in ids]

    def renew(self) -> None:
        """Do nothing: no memory grows."""
