"""Name the language of a text, with the package py3langid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from megatron.core.errors import ConfigurationError
from megatron.corpus.cleaning.optional_package import load_package

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
        module = load_package("py3langid.langid", "--language")
        self._identifier = module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)
        known = self._identifier.labels
        unknown = [language for language in wanted if language not in known]
        if unknown:
            raise ConfigurationError(f"--language {' '.join(unknown)} is not known; choose among {' '.join(known)}")

    def guess(self, text: str) -> Guess:
        """Return the most likely language."""
        language, probability = self._identifier.classify(text[:SAMPLE_CHARACTERS])
        return Guess(str(language), float(probability))
