"""Texts as a tokenizer's own files say that a model is shown them, with what stands in front."""

from __future__ import annotations

from megatron.core.errors import InputError
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer


class TextEncoding:
    """Encode texts for a measurement, as the package transformers would with the same files.

    ``prefix_id`` is what an empty context stands for: the token that begins a text, or else the one that ends a
    document.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        leading = tokenizer.tokenize("")  # of Llama2Tokenizer, which always puts a token in front
        self._own = len(leading)
        begin: int | None = leading[0] if leading else None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            leading, begin = list(tokenizer.leading_ids), tokenizer.begin_id
        self._leading = leading
        self.prefix_id = tokenizer.eod_id if begin is None else begin
        self._begin_text = None if self.prefix_id is None else tokenizer.detokenize([self.prefix_id])

    @property
    def end_id(self) -> int:
        """Give the token that ends a document.

        Raises:
            InputError: the tokenizer has none.
        """
        return self._known(self.tokenizer.eod_id)

    @property
    def first_id(self) -> int:
        """Give ``prefix_id``.

        Raises:
            InputError: the tokenizer has no such token.
        """
        return self._known(self.prefix_id)

    def encode(self, text: str, with_leading: bool = True) -> list[int]:
        """Return a text's tokens; what stands in front of it is not put there a second time."""
        ids = self.tokenizer.tokenize(text)[self._own :]
        if not with_leading or (self._begin_text and text.startswith(self._begin_text)):
            return ids
        return [*self._leading, *ids]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens that a model has made, special ones left out where the tokenizer knows them."""
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.plain_text(ids)
        return self.tokenizer.detokenize(ids)

    def _known(self, token: int | None) -> int:
        if token is None:
            raise InputError(
                f"{self.tokenizer.name} has no token that begins or ends a text, which stands for an empty context; "
                "use a tokenizer with one"
            )
        return token
