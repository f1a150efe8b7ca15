"""Encode UTF-8 text into arrays of token ids, with the tokenizer itself or the fastest equivalent engine.

`choose_encoder` takes the fastest engine that gives the tokenizer's ids on a sample of the input.
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
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, GPT2BPETokenizer, byte_characters
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
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


class GigatokenEncoder:
    """Encode what a tokenizer.json describes.

    The package remembers every word that it met, so that its memory grows with the input until `renew`.

    Raises:
        ImportError, OSError: the package is missing or broken.
        Exception: the package cannot do what the file describes; it has no errors of its own.
    """

    name = "gigatoken"

    def __init__(self, tokenizer_json: str) -> None:
        if '"post_processor":null' not in tokenizer_json:
            # It would add special tokens around every text.
            tokenizer_json = json.dumps(json.loads(tokenizer_json) | {"post_processor": None})
        self._description = tokenizer_json
        # The compiled module alone: the package above it has functions that reach for a hub.
        self._load: Any = importlib.import_module("gigatoken.gigatoken_rs").load_hf_json
        self._model: Any = self._load(self._description)

    def encode(self, texts: Sequence[bytes]) -> Iterable[NDArray[Any]]:
        """Encode texts, one array each, when it is asked for."""
        return map(self._model.encode, texts)

    def renew(self) -> None:
        """Load the model again, without the words that it remembers."""
        self._model = None
        self._model = self._load(self._description)


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


ENGINES: Final = ("auto", GigatokenEncoder.name, TiktokenEncoder.name, WordEncoder.name, ReferenceEncoder.name)

# Where engines are likely to differ: white space of many kinds, contractions, digits, marks, scripts, half-known
# characters, spelled-out special tokens. The sample of the input may have none of it, the rest of the input may.
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

    ``report`` is told why an engine that is installed is not used.

    Raises:
        TokenizerError: ``engine`` names one that cannot be used here.
    """
    reference = ReferenceEncoder(tokenizer)
    if engine == reference.name:
        return reference
    if not isinstance(tokenizer, GPT2BPETokenizer | HuggingFaceTokenizer):
        if engine != "auto":
            raise TokenizerError(f"--tokenizer-engine {engine} cannot be used with {tokenizer.name}; drop it")
        return reference
    texts = [text.encode() if isinstance(text, str) else text for text in (*HARD_TEXTS, *sample)]
    expected = reference.encode(texts)
    for name, load in _candidates(tokenizer):
        if engine not in ("auto", name):
            continue
        try:
            encoder = load()
            found = list(encoder.encode(texts))
        except Exception as error:  # noqa: BLE001 - compiled packages raise what they like; the reference remains
            reason, is_missing = f"{error}", isinstance(error, ModuleNotFoundError)
        else:
            different = [text for text, ids, wanted in zip(texts, found, expected) if not np.array_equal(ids, wanted)]
            if not different:
                return encoder
            reason, is_missing = f"it gives other ids, for {_excerpt(different[0])} first", False
        if engine == name:
            raise TokenizerError(f"--tokenizer-engine {name} cannot be used with {tokenizer.name}: {reason}; drop it")
        if not is_missing:
            report(f"the engine {name} is not used with {tokenizer.name}: {reason}")
    return reference


def missing_engine(tokenizer: Tokenizer, encoder: TextEncoder) -> str | None:
    """Return the name of a faster engine than the one chosen that is not installed, or None."""
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
