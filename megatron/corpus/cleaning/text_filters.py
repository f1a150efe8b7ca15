"""Judge a text by itself: repair its encoding, filter by length and language, compute the keys of its duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron.core.errors import ConfigurationError, TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer import load_package
from megatron.corpus.cleaning.shingles import SignatureMaker, shingles

SAMPLE_CHARACTERS: Final = 4096


class Guess(NamedTuple):
    """Hold an ISO 639-1 code and how likely it is."""

    language: str
    probability: float


class LanguageDetector:
    """Guess from the beginning of a text; the model comes with the package, and the same text gives the same guess.

    Raises:
        ConfigurationError: the package cannot be imported, or does not know a language that is asked for.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        module = load_package("py3langid.langid", "--language", ConfigurationError)
        self._identifier = module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)
        known = self._identifier.labels
        unknown = [language for language in wanted if language not in known]
        if unknown:
            raise ConfigurationError(f"--language {' '.join(unknown)} is not known; choose among {' '.join(known)}")

    def guess(self, text: str) -> Guess:
        """Return the most likely language."""
        language, probability = self._identifier.classify(text[:SAMPLE_CHARACTERS])
        return Guess(str(language), float(probability))


NO_TEXT: Final = "no text"
TOO_SHORT: Final = "too short"
OTHER_LANGUAGE: Final = "other language"

# A text is long enough without reading on where its beginning has this many times the tokens asked for.
_LENGTH_MARGIN: Final = 2
_CHARACTERS_PER_TOKEN: Final = 16


@dataclass(frozen=True)
class TextRules:
    """Hold the rules for a text. A rule that is None, 0 or empty is off.

    Attributes:
        tokenizer: the keywords of `build_tokenizer`, where ``min_tokens`` is not 0.
        similarity: near duplicates share at least this part of their runs of ``shingle_words`` words.
    """

    fix_encoding: bool
    min_tokens: int
    tokenizer: Mapping[str, object]
    languages: Sequence[str]
    min_language_probability: float
    exact_duplicates: bool
    similarity: float | None
    num_permutations: int
    shingle_words: int


class Finding(NamedTuple):
    """Hold the verdict on a text.

    Attributes:
        text: after repair.
        reason: why it is dropped, or None; ``detail`` has the values.
        digest: what texts have in common that are equal but for spaces at their ends.
        keys: of which near duplicates are likely to share one.
    """

    text: str
    reason: str | None = None
    detail: str = ""
    digest: bytes = b""
    keys: Sequence[int] = ()


class TextExaminer:
    """Apply rules to texts, each for itself, so that any process may do any of them.

    Raises:
        InputError: a rule needs a package, a tokenizer file or a language that there is not.
    """

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._ftfy = load_package("ftfy", "--fix-encoding", ConfigurationError) if rules.fix_encoding else None
        self._tokenizer = build_tokenizer(**rules.tokenizer) if rules.min_tokens else None  # type: ignore[arg-type]
        self._detector = LanguageDetector(rules.languages) if rules.languages else None
        self._signatures = (
            SignatureMaker(rules.similarity, rules.num_permutations) if rules.similarity is not None else None
        )

    def examine(self, text: str) -> Finding:
        """Repair a text and decide on it.

        Raises:
            TokenizerError: the tokenizer refuses the text.
        """
        rules = self._rules
        if self._ftfy is not None:
            text = self._ftfy.fix_text(text)
        stripped = text.strip()
        if not stripped:
            return Finding(text, NO_TEXT)
        if self._tokenizer is not None:
            num_tokens = self._count_tokens(stripped)
            if num_tokens < rules.min_tokens:
                return Finding(text, TOO_SHORT, f"{num_tokens} tokens of {rules.min_tokens}")
        if self._detector is not None:
            guess = self._detector.guess(stripped)
            if guess.language not in rules.languages or guess.probability < rules.min_language_probability:
                return Finding(text, OTHER_LANGUAGE, f"{guess.language} with probability {guess.probability:.3f}")
        if not rules.exact_duplicates:
            return Finding(text)
        digest = hashlib.blake2b(stripped.encode("utf-8"), digest_size=16).digest()
        keys = [] if self._signatures is None else self._signatures.keys(shingles(stripped, rules.shingle_words))
        return Finding(text, digest=digest, keys=keys)

    def _count_tokens(self, text: str) -> int:
        """Count the tokens of a text, or of a beginning that has more than enough."""
        assert self._tokenizer is not None
        enough = self._rules.min_tokens * _LENGTH_MARGIN
        begin = text[: enough * _CHARACTERS_PER_TOKEN]
        num_tokens = len(self._tokenizer.tokenize(begin))
        return num_tokens if len(begin) == len(text) or num_tokens >= enough else len(self._tokenizer.tokenize(text))


def examine_batch(examiner: TextExaminer, texts: Sequence[tuple[str, str]]) -> list[Finding]:
    """Examine texts, each given after its place.

    Raises:
        TokenizerError: naming the place of the text that the tokenizer refuses.
    """
    findings = []
    for place, text in texts:
        try:
            findings.append(examiner.examine(text))
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return findings
