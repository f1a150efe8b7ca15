"""The text of one choice as its tokens come: pieces of text, held back where they may yet be part of a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.inference.inference_request import TokenValue
from megatron.core.tokenizers.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_MOST_HELD = 4
"""A character of UTF-8 has at most so many bytes, and a token at least one."""
_CONTEXT = 8


@dataclass(frozen=True)
class TextToken:
    """Hold a token, the text that it adds, where that begins, and its value.

    A token that leaves a character unfinished adds nothing; the one that finishes it adds all of it.
    """

    token: int
    text: str
    offset: int
    value: TokenValue | None


class TokenTexts:
    """Turn tokens into the text that each adds behind those before it."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        self._begin = 0
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """Return what a token adds."""
        self._ids.append(token)
        return self._new_text(is_last=len(self._ids) - self._read > _MOST_HELD)

    def rest(self) -> str:
        """Return what is left of an unfinished character."""
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        known = self._tokenizer.detokenize(self._ids[self._begin : self._read])
        text = self._tokenizer.detokenize(self._ids[self._begin :])
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        if len(self._ids) > self._read:
            self._begin, self._read = max(self._read - 1, 0), len(self._ids)
        return text[len(known) :]


class ChoiceText:
    """Gather a choice's text and tokens up to its end, and give out what is certain."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.reason: Literal["stop", "length"] | None = None
        self.num_tokens = 0
        self._stops = stops
        self._texts = TokenTexts(tokenizer, prompt)
        self._text = ""
        self._tokens: list[TextToken] = []
        self._begin_of_new = 0
        self._num_given = 0
        self._num_tokens_given = 0

    def begin_with(self, tokenizer: Tokenizer, prompt: Sequence[int], values: Sequence[TokenValue]) -> None:
        """Let the text begin with the prompt, in which no stop is looked for."""
        texts = TokenTexts(tokenizer, ())
        of_tokens: list[TokenValue | None] = [None, *values] if values else [None] * len(prompt)
        for token, value in zip(prompt, of_tokens, strict=True):
            self._append(token, texts.add(token), value)
        self._text += texts.rest()
        self._begin_of_new = len(self._text)

    def add(self, token: int, value: TokenValue | None) -> None:
        """Take a token; where it completes a stop, the text ends before that."""
        if self.reason is not None:
            return
        self.num_tokens += 1
        self._append(token, self._texts.add(token), value)
        self._stop()

    def end(self, reason: Literal["stop", "length"]) -> None:
        """End the text, if nothing has ended it before."""
        if self.reason is None:
            self._text += self._texts.rest()
            self._stop()
            self.reason = self.reason or reason

    def take(self) -> tuple[str, list[TextToken]]:
        """Return the text and the tokens that are certain and have not been given out."""
        end = len(self._text) if self.reason is not None else len(self._text) - self._num_held()
        text, self._num_given = self._text[self._num_given : end], max(self._num_given, end)
        tokens = []
        for token in self._tokens[self._num_tokens_given :]:
            is_whole = token.offset + len(token.text) <= end
            if not is_whole and not (self.reason is not None and token.offset < end):
                break
            tokens.append(token)
        self._num_tokens_given += len(tokens)
        return text, tokens

    def _append(self, token: int, text: str, value: TokenValue | None) -> None:
        self._tokens.append(TextToken(token, text, len(self._text), value))
        self._text += text

    def _stop(self) -> None:
        # What has been given out holds no beginning of a stop.
        begin = max(self._num_given, self._begin_of_new)
        places = [place for stop in self._stops if (place := self._text.find(stop, begin)) >= 0]
        if places:
            self._text = self._text[: min(places)]
            self.reason = "stop"

    def _num_held(self) -> int:
        """Return how many characters at the end may be the beginning of a stop."""
        tail = self._text[self._num_given :]
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(tail) + 1))
                if tail.endswith(stop[:length])
            ),
            default=0,
        )
