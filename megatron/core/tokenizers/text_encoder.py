"""Encode UTF-8 text into arrays of token ids, with the tokenizer itself or the fastest equivalent engine.

`choose_encoder` selects the fastest engine that reproduces the tokenizer's ids on a sample of the input.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, GPT2BPETokenizer, byte_characters
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer


class TextEncoder(Protocol):
    """Interface of engines that encode texts in the calling thread, with the same ids as a tokenizer."""

    @property
    def name(self) -> str:
        """Name of the engine, as in ``--tokenizer-engine``."""

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts of valid UTF-8 to one array of ids (of any integer dtype) per text.

        Consume each array before requesting the next, so that its memory is still in the CPU cache when it is reused.

        Raises:
            TokenizerError: a text cannot be encoded. May be raised when its array is requested.
        """

    def renew(self) -> None:
        """Free the memory that has grown with the encoded texts."""


class ReferenceEncoder:
    """Encoder that calls the tokenizer itself, the reference that faster engines are compared with."""

    name = "reference"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Encode texts to one array each."""
        ids = self._tokenizer.tokenize_batch([str(text, "utf-8") for text in texts], num_threads=1)
        return [np.array(tokens, np.int64) for tokens in ids]

    def renew(self) -> None:
        """Do nothing, because memory does not grow."""


class ByteEncoder:
    """Encoder of `ByteTokenizer`, whose ids are the text itself."""

    name = "bytes"

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts lazily to views of their bytes."""
        return (np.frombuffer(text, np.uint8) for text in texts)

    def renew(self) -> None:
        """Do nothing, because memory does not grow."""


class GigatokenEncoder:
    """Encoder for a tokenizer.json with the package gigatoken.

    The package caches every word, so its memory grows with the input until `renew`.

    Raises:
        ImportError, OSError: the package is missing or broken.
        Exception: the package does not support the file. It has no error classes.
    """

    name = "gigatoken"

    def __init__(self, tokenizer_json: str) -> None:
        if '"post_processor":null' not in tokenizer_json:
            # It would add special tokens around every text.
            tokenizer_json = json.dumps(json.loads(tokenizer_json) | {"post_processor": None})
        self._description = tokenizer_json
        # Import only the compiled module, because the Python package has functions that access a model hub.
        self._load: Any = importlib.import_module("gigatoken.gigatoken_rs").load_hf_json
        self._model: Any = self._load(self._description)

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts lazily to one array each."""
        return map(self._model.encode, texts)

    def renew(self) -> None:
        """Reload the model with an empty word cache."""
        self._model = None
        self._model = self._load(self._description)


_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class TiktokenEncoder:
    """Encoder for GPT-2's byte-level BPE with the package tiktoken, from a tokenizer.json.

    Raises:
        ImportError, OSError: the package is missing or broken.
        ValueError: the merges are not in the order of their ids, which this engine requires.
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
        """Encode texts to one array each."""
        encode = self._model.encode_ordinary
        return [np.array(encode(str(text, "utf-8")), np.uint32) for text in texts]

    def renew(self) -> None:
        """Do nothing, because memory does not grow."""


_MOST_CHARACTERS: Final = 32
"""Length limit of cached words. Longer words seldom repeat."""


class WordEncoder:
    """Encoder that caches the ids of the words of a byte-level BPE until `renew`.

    A byte-level BPE splits a text before each space that does not follow white space, so the ids of a word between two
    such positions do not depend on its context.

    Raises:
        ValueError: the tokenizer may merge across these positions.
    """

    name = "words"

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str) -> None:
        _check_cuts(json.loads(tokenizer_json))
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts lazily to one array each."""
        return map(self._encode, texts)

    def renew(self) -> None:
        """Clear the word cache."""
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
    """Split a text before each space that does not follow white space."""
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
    """Reject a tokenizer whose pre-tokenizer, normalizer or added tokens may cross word boundaries."""
    before = json.dumps(description["pre_tokenizer"])
    if '"ByteLevel"' not in before or not ('"use_regex": true' in before or '"Split"' in before):
        raise ValueError("its words do not start at spaces")
    normalizer = description["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise ValueError(f"it normalizes text ({normalizer['type']})")
    for token in description["added_tokens"]:
        if token["rstrip"] or " " in token["content"]:
            raise ValueError(f"its token {token['content']!r} strips adjacent spaces")


ENGINES: Final = (
    *("auto", GigatokenEncoder.name, TiktokenEncoder.name, WordEncoder.name, ByteEncoder.name),
    ReferenceEncoder.name,
)

# Texts on which engines are likely to differ: kinds of white space, contractions, digits, marks, scripts, rare
# characters, spelled-out special tokens. The input may contain them even if its sample does not.
HARD_TEXTS: Final = (
    "",
    " ",
    "  two  spaces   three \t tab\n\n\nlines \r\n end  ",
    "\u00a0no\u00a0break \u2003em\u2003 \u3000wide\u3000 \u0085next \u2028line \u200bzero \ufeffmark",
    "it's IT'S we'll they'RE 'twas I'd you've don\u2019t '''s",
    "3.14159 1,000,000 \u0663\u0664 \u00bd\u00b2 \u2167 12abc34 x2y",
    "na\u00efve nai\u0308ve \u1e9e \u01c5 \u0130 \ufb01 a\u0301\u0301\u0301",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \U00010348\U0001e900",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2764\ufe0f #\ufe0f\u20e3",
    "<|endoftext|> <s></s> [MASK] <unk> <|im_start|>",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # ok\n\t\tpass\n",
    "\x00\x01\x7f \ufffd \ue000 \U0010ffff",
    "a" * 300 + " " * 300 + "=" * 300 + "\n" * 30,
)


def choose_encoder(
    tokenizer: Tokenizer, engine: str, sample: Sequence[str | bytes], report: Callable[[str], None]
) -> TextEncoder:
    """Return the fastest engine whose ids equal the tokenizer's on the sample and on `HARD_TEXTS`.

    ``report`` is called with the reason if an installed engine is not used.

    Raises:
        TokenizerError: the requested ``engine`` cannot be used with this tokenizer.
    """
    reference = ReferenceEncoder(tokenizer)
    if engine == reference.name:
        return reference
    if isinstance(tokenizer, ByteTokenizer) and engine in ("auto", ByteEncoder.name):
        return ByteEncoder()
    candidates = {}
    if isinstance(tokenizer, GPT2BPETokenizer | HuggingFaceTokenizer):
        candidates = dict(_candidates(tokenizer))
    if engine not in ("auto", *candidates):
        raise TokenizerError(f"--tokenizer-engine {engine} cannot be used with {tokenizer.name}; omit it")
    if not candidates:
        return reference
    texts = [text.encode() if isinstance(text, str) else text for text in (*HARD_TEXTS, *sample)]
    expected = reference.encode(texts)
    for name, load in candidates.items():
        if engine not in ("auto", name):
            continue
        try:
            encoder = load()
            found = list(encoder.encode(texts))
        except Exception as error:  # noqa: BLE001 - compiled packages raise anything; fall back to the reference
            reason, is_missing = f"{error}", isinstance(error, ModuleNotFoundError)
        else:
            different = [text for text, ids, wanted in zip(texts, found, expected) if not np.array_equal(ids, wanted)]
            if not different:
                return encoder
            reason, is_missing = f"it produces different ids, first for {_excerpt(different[0])}", False
        if engine == name:
            raise TokenizerError(f"--tokenizer-engine {name} cannot be used with {tokenizer.name}: {reason}; omit it")
        if not is_missing:
            report(f"the engine {name} is not used with {tokenizer.name}: {reason}")
    return reference


def missing_engine(tokenizer: Tokenizer, encoder: TextEncoder) -> str | None:
    """Return the name of an engine that is faster than the chosen one but not installed, or None."""
    if isinstance(tokenizer, GPT2BPETokenizer | HuggingFaceTokenizer):
        for name, _ in _candidates(tokenizer):
            if name in (encoder.name, WordEncoder.name):
                return None
            if importlib.util.find_spec(name) is None:
                return name
    return None


def _candidates(
    tokenizer: GPT2BPETokenizer | HuggingFaceTokenizer,
) -> Iterator[tuple[str, Callable[[], TextEncoder]]]:
    yield GigatokenEncoder.name, lambda: GigatokenEncoder(tokenizer.tokenizer_json())
    if isinstance(tokenizer, GPT2BPETokenizer):
        yield TiktokenEncoder.name, lambda: TiktokenEncoder(tokenizer.tokenizer_json())
    yield WordEncoder.name, lambda: WordEncoder(tokenizer, tokenizer.tokenizer_json())


def _excerpt(text: bytes) -> str:
    shown = str(text, "utf-8")
    return repr(shown if len(shown) <= 60 else shown[:60] + "…")
