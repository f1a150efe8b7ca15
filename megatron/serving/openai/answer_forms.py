"""Text and JSON of OpenAI-compatible responses, complete or as the chunks of a stream.

Text is held back while it may be the start of a stop sequence.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.inference import TokenValue
from megatron.core.tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
_MOST_HELD = 4
"""Maximum number of tokens in one character: a UTF-8 character has up to four bytes, and a token at least one."""
_CONTEXT = 8


@dataclass(frozen=True)
class TextToken:
    """Token with the text that it adds, the offset of that text, and its log-probabilities.

    A token that ends within a character adds no text; the token that completes the character adds all of it.
    """

    token: int
    text: str
    offset: int
    value: TokenValue | None


class TokenTexts:
    """Incremental detokenizer: converts each token to the text that it adds to the preceding ones."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        self._begin = 0
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        self._ids.append(token)
        return self._new_text(is_last=False)

    def rest(self) -> str:
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        known = self._tokenizer.detokenize(self._ids[self._begin : self._read])
        end = len(self._ids)
        text = self._tokenizer.detokenize(self._ids[self._begin :])
        if text.endswith(_UNFINISHED) and not is_last:
            if end - self._read <= _MOST_HELD:
                return ""
            # The last tokens may still begin a character, but those before them cannot.
            end -= _MOST_HELD - 1
            text = self._tokenizer.detokenize(self._ids[self._begin : end])
        if end > self._read:
            self._begin, self._read = max(self._read - 1, 0), end
        return text[len(known) :]


class ChoiceText:
    """Accumulates the text and tokens of a choice up to its end, and releases the part that is final."""

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
        """Start the text with the prompt (``echo``), which is not searched for stop sequences."""
        texts = TokenTexts(tokenizer, ())
        of_tokens: list[TokenValue | None] = [None, *values] if values else [None] * len(prompt)
        for token, value in zip(prompt, of_tokens, strict=True):
            self._append(token, texts.add(token), value)
        self._text += texts.rest()
        self._begin_of_new = len(self._text)

    def add(self, token: int, value: TokenValue | None) -> None:
        """Append a token; if it completes a stop sequence, the text ends before that sequence."""
        if self.reason is not None:
            return
        self.num_tokens += 1
        self._append(token, self._texts.add(token), value)
        self._stop()

    def end(self, reason: Literal["stop", "length"]) -> None:
        """End the text unless it has already ended."""
        if self.reason is None:
            self._text += self._texts.rest()
            self._stop()
            self.reason = self.reason or reason

    def take(self) -> tuple[str, list[TextToken]]:
        """Return the final text and tokens that have not been returned before."""
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
        # The text already returned contains no start of a stop sequence.
        begin = max(self._num_given, self._begin_of_new)
        places = [place for stop in self._stops if (place := self._text.find(stop, begin)) >= 0]
        if places:
            self._text = self._text[: min(places)]
            self.reason = "stop"

    def _num_held(self) -> int:
        """Return the number of characters at the end that may be the start of a stop sequence."""
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


Json = dict[str, Any]


class AnswerForms:
    """Builds the responses to one completion or chat request."""

    def __init__(self, tokenizer: Tokenizer, model: str, *, is_chat: bool, num_alternatives: int | None) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._num_alternatives = num_alternatives
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """Build a complete response."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def choice(self, index: int, text: str, tokens: Sequence[TextToken], reason: str | None) -> Json:
        """Build one choice of a complete response."""
        content: Json = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def chunk(self, index: int, text: str, tokens: Sequence[TextToken], reason: str | None, *, is_first: bool) -> Json:
        """Build a chunk with the new text of one choice; the first chunk of a chat choice has the role."""
        content: Json = {"text": text}
        if self._is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | ({"content": text} if text else {})}
            if is_first:
                content["delta"]["content"] = text
        # A chunk without tokens has no log-probabilities; null means that none were requested.
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": self._kind_of_chunk, "choices": [choice]}

    def usage_chunk(self, usage: Json) -> Json:
        """Build the last chunk of a stream that requested ``include_usage``."""
        return {**self._head, "object": self._kind_of_chunk, "choices": [], "usage": usage}

    @property
    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _logprobs(self, tokens: Sequence[TextToken]) -> Json | None:
        if self._num_alternatives is None:
            return None
        if self._is_chat:
            return {"content": [self._entry_of_chat(token) for token in tokens]}
        values = [token.value for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [None if value is None else value.log_probability for value in values],
            "top_logprobs": [self._top(token) for token in tokens] if self._num_alternatives else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: TextToken) -> dict[str, float] | None:
        """Return the log-probabilities of the most likely tokens by text, including the chosen token."""
        if token.value is None:
            return None
        found: dict[str, float] = {}
        for number, value in [*token.value.alternatives, (token.token, token.value.log_probability)]:
            # If several tokens have the same text, the most likely one is kept; the chosen token is always included.
            found.setdefault(self._tokenizer.detokenize([number]), value)
        return found

    def _entry_of_chat(self, token: TextToken) -> Json:
        assert token.value is not None
        top = [self._named(number, value) for number, value in token.value.alternatives]
        return self._named(token.token, token.value.log_probability) | {"top_logprobs": top}

    def _named(self, token: int, value: float) -> Json:
        text = self._tokenizer.detokenize([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def usage_of(num_prompt: int, num_new: int) -> Json:
    """Build the token counts of a response."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
