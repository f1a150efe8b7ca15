"""OpenAI-compatible HTTP API, with a web page to try out the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.serving.openai.answer_forms import ChoiceText
    from megatron.serving.openai.application import Application
    from megatron.serving.openai.chat_client import ChatClient, ChatFailed
    from megatron.serving.openai.guard import Guard, Limits, Metrics
    from megatron.serving.openai.http_server import HttpServer
    from megatron.serving.openai.local_chat import LocalChat
    from megatron.serving.openai.translator import (
        BASE_MODEL_TOKENS,
        COMPLETION_MODE,
        COMPLETION_TOKENS,
        Translator,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "answer_forms": "ChoiceText",
        "application": "Application",
        "chat_client": "ChatClient ChatFailed",
        "guard": "Guard Limits Metrics",
        "http_server": "HttpServer",
        "local_chat": "LocalChat",
        "translator": "BASE_MODEL_TOKENS COMPLETION_MODE COMPLETION_TOKENS Translator",
    },
)
