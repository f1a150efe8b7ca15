"""A tokenizer without files: its tokens are the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer import require_unicode
from megatron.core.tokenizers.tokenizers_engine import TokenizersEngine

NUM_BYTES = 256


class ByteTokenizer:
    """Tokenizer with an id for each byte of UTF-8, 0 to 255, and the end-of-document token 256.

    "<|endoftext|>", the spelling of the end-of-document token, is encoded as ordinary characters.
    """

    name = "ByteTokenizer"

    def __init__(self, extra_vocab_size: int = 0) -> None:
        self.vocab_size = NUM_BYTES + 1 + extra_vocab_size
        self.eod_id = NUM_BYTES
        self.files: tuple[Path, ...] = ()
        self.arguments: Mapping[str, object] = {"tokenizer_type": self.name, "extra_vocab_size": extra_vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Encode one text to its bytes."""
        require_unicode([text])
        return list(text.encode())

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts in a single thread."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids with the end-of-document token spelled out. Invalid UTF-8 becomes U+FFFD."""
        known = np.asarray(ids, np.int64)
        known = known[(known >= 0) & (known <= self.eod_id)]
        (ends,) = np.nonzero(known == self.eod_id)
        documents = np.split(known.astype(np.uint8), [place for end in ends for place in (end, end + 1)])[::2]
        return END_OF_TEXT.join(document.tobytes().decode("utf-8", errors="replace") for document in documents)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, in the spelling of a byte-level BPE."""
        return {token: number for number, token in enumerate([*byte_characters(), END_OF_TEXT])}

    def tokenizer_json(self) -> str:
        """Serialize the tokenizer in the format of a tokenizer.json, as a byte-level BPE without merges."""
        return TokenizersEngine.byte_level_bpe(self.vocabulary(), [], self.name).to_json()
