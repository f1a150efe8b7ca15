"""The engine of the `tiktoken` package for GPT-2's BPE, used where it is installed and gives the same ids."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters

_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class TiktokenEncoder:
    """Encode GPT-2's byte-level BPE from the tokenizer.json that describes it.

    Raises:
        ImportError, OSError: the package is missing or broken.
        ValueError: the merges are not in the order of their ids, which this engine leans on.
    """

    name = "tiktoken"

    def __init__(self, tokenizer_json: str) -> None:
        model = json.loads(tokenizer_json)["model"]
        vocabulary: dict[str, int] = model["vocab"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        merged = [vocabulary["".join(merge)] for merge in merges]
        used = set(byte_characters()) | {"".join(merge) for merge in merges}
        if merged != sorted(set(merged)) or used != vocabulary.keys() - {END_OF_TEXT}:
            raise ValueError("its merges are not in the order of their ids")
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        ranks = {bytes(byte_of[character] for character in token): vocabulary[token] for token in used}
        if min(merged, default=len(ranks)) < max(ranks[bytes([byte])] for byte in range(256)):
            raise ValueError("a merge has a lower id than a single byte")
        package = importlib.import_module("tiktoken")
        self._model: Any = package.Encoding(name="gpt2-bpe", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={})

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Encode texts, one array each."""
        encode = self._model.encode_ordinary
        return [np.array(encode(str(text, "utf-8")), np.uint32) for text in texts]

    def renew(self) -> None:
        """Do nothing: no memory grows."""
