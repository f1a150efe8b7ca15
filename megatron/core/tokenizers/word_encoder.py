"""Encode with the tokenizer itself, each word once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.tokenizer import Tokenizer

_MOST_CHARACTERS: Final = 32
"""Longer words are not remembered: few come again."""


class WordEncoder:
    """Encode the words of a byte-level BPE, and remember their ids until `renew`.

    Such a tokenizer cuts a text before each space that does not follow white space, so that what stands between two
    such places has the same ids wherever it stands.

    Raises:
        ValueError: the tokenizer may not cut there.
    """

    name = "words"

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str) -> None:
        _check_cuts(json.loads(tokenizer_json))
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts, one array each, when it is asked for."""
        return map(self._encode, texts)

    def renew(self) -> None:
        """Forget the words."""
        self._ids = {}

    def _encode(self, text: bytes) -> NDArray[Any]:
        words = cut_at_spaces(str(text, "utf-8"))
        new = [word for word in dict.fromkeys(words) if word not in self._ids]
        self._ids.update(zip(new, self._tokenizer.tokenize_batch(new)))
        ids = np.fromiter(itertools.chain.from_iterable(map(self._ids.__getitem__, words)), np.int64)
        for word in new:
            if len(word) > _MOST_CHARACTERS:
                del self._ids[word]
        return ids


def cut_at_spaces(text: str) -> list[str]:
    """Cut a text before each space that does not follow white space."""
    words = []
    word, *parts = text.split(" ")
    for part in parts:
        if not word or word[-1].isspace():
            word = f"{word} {part}"
        else:
            words.append(word)
            word = f" {part}"
    return [*words, word]


def _check_cuts(description: dict[str, Any]) -> None:
    """Refuse a tokenizer whose parts could see beyond such a place."""
    before = json.dumps(description["pre_tokenizer"])
    if '"ByteLevel"' not in before or not ('"use_regex": true' in before or '"Split"' in before):
        raise ValueError("its words do not begin at spaces")
    normalizer = description["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise ValueError(f"it normalizes texts ({normalizer['type']})")
    for token in description["added_tokens"]:
        if token["rstrip"] or " " in token["content"]:
            raise ValueError(f"its token {token['content']!r} takes spaces in")
