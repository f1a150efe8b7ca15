"""Choose the fastest engine that gives the tokenizer's ids on a sample of the input."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.text_encoder import (
    GigatokenEncoder,
    ReferenceEncoder,
    TextEncoder,
    TiktokenEncoder,
    WordEncoder,
)
from megatron.core.tokenizers.tokenizer import Tokenizer

ENGINES: Final = ("auto", GigatokenEncoder.name, TiktokenEncoder.name, WordEncoder.name, ReferenceEncoder.name)

# Where engines are likely to differ: white space of many kinds, contractions, digits, marks, scripts, half-known
# characters, spelt-out special tokens. The sample of the input may have none of it, the rest of the input may.
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
