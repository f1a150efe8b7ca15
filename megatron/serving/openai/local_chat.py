"""Chat with a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron.core.errors import InputError
from megatron.core.inference import ContinuousEngine, NewToken, PromptEnded, PromptFailed, PromptSearched
from megatron.serving.openai.chat_client import ChatFailed
from megatron.serving.openai.request_fields import ApiError, RequestFields
from megatron.serving.openai.translator import Translator


class LocalChat:
    """Chat with one model; ``fields`` are request fields that apply to every message."""

    def __init__(self, engine: ContinuousEngine, translator: Translator, fields: Mapping[str, object]) -> None:
        self._engine = engine
        self._translator = translator
        self._fields = fields

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yield the text of the response in pieces.

        Raises:
            ChatFailed: the model cannot answer.
        """
        try:
            fields = RequestFields(messages=tuple(messages), **self._fields)  # type: ignore[arg-type]
            asked = self._translator.translate(fields, default_seed=len(messages))
        except ApiError as error:
            raise ChatFailed(str(error)) from error
        (text,) = asked.choice_texts(self._translator.tokenizer)
        self._engine.add(0, asked.request)
        try:
            while text.reason is None:
                for _, happened in self._engine.step():
                    if isinstance(happened, PromptFailed):
                        raise ChatFailed(str(happened.error))
                    if isinstance(happened, NewToken):
                        text.add(happened.token, None)
                    elif isinstance(happened, PromptEnded):
                        text.end(happened.reason)
                    elif isinstance(happened, PromptSearched):
                        for token in happened.found.tokens:
                            text.add(token, None)
                        text.end("stop")
                yield text.take()[0]
        except InputError as error:
            raise ChatFailed(str(error)) from error
        finally:
            self._engine.drop([0])
