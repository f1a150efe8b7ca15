"""The engine of the `gigatoken` package, used where it is installed and gives the same ids."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray


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
