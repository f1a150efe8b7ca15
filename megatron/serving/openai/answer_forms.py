"""The JSON of OpenAI's answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.serving.openai.choice_text import TextToken

Json = dict[str, Any]


class AnswerForms:
    """Write the answers to one request: of a completion, or of a conversation."""

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
        """Return a whole answer."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def choice(self, index: int, text: str, tokens: Sequence[TextToken], reason: str | None) -> Json:
        """Return one choice of a whole answer."""
        content: Json = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def chunk(self, index: int, text: str, tokens: Sequence[TextToken], reason: str | None, *, is_first: bool) -> Json:
        """Return what is new of one choice; the first chunk of a conversation's choice has the role."""
        content: Json = {"text": text}
        if self._is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | ({"content": text} if text else {})}
            if is_first:
                content["delta"]["content"] = text
        # A chunk without tokens has no values; a choice that has none at all says null throughout.
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": self._kind_of_chunk, "choices": [choice]}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the last chunk of a stream that was asked for the counts."""
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
        """Return the likeliest tokens by their texts, the chosen one among them."""
        if token.value is None:
            return None
        found: dict[str, float] = {}
        for number, value in [*token.value.alternatives, (token.token, token.value.log_probability)]:
            # Of tokens that look alike the likeliest has the name; the chosen one's value is there in any case.
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
    """Return the counts of tokens."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
