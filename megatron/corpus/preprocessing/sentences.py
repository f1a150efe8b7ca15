"""Cut text into sentences for --split-sentences, with nltk's Punkt where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.errors import DataError
from megatron.corpus.preprocessing.tokenized_chunk import SplitSentences


def load_splitter(language: str, keep_newlines: bool) -> SplitSentences:
    """Return nltk's sentence splitter of a language.

    With ``keep_newlines``, the white space behind a sentence stays with it, as in Megatron.

    Raises:
        DataError: nltk, or its data of that language, is not on this machine.
    """
    try:
        punkt = importlib.import_module("nltk.tokenize.punkt")
    except (ImportError, OSError) as error:
        raise DataError(
            f"--split-sentences needs the package nltk, which cannot be imported ({error}); "
            "install it with: pip install nltk"
        ) from error
    try:
        splitter = punkt.PunktTokenizer(language)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"--split-sentences --lang {language}: nltk's data of that language is not on this machine; "
            "fetch it with: python -m nltk.downloader punkt_tab (or change --lang)"
        ) from error
    if keep_newlines:
        parameters = splitter._params
        splitter = punkt.PunktSentenceTokenizer(lang_vars=_keep_white_space(punkt))
        splitter._params = parameters
    split: SplitSentences = splitter.tokenize
    return split


def _keep_white_space(punkt: Any) -> Any:
    """Make a sentence's end take the white space that follows, which Punkt otherwise drops between sentences."""
    plain = punkt.PunktLanguageVars._period_context_fmt
    before, following = r"(?=(?P<after_tok>", r"\s+(?P<next_tok>\S+)"
    assert plain.count(before) == plain.count(following) == 1, "nltk changed how it finds the ends of sentences"
    changed = plain.replace(before, r"\s*" + before).replace(following, r"(?P<next_tok>\S+)")
    return type("WhiteSpaceKept", (punkt.PunktLanguageVars,), {"_period_context_fmt": changed})()
