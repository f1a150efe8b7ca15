"""One request of the asynchronous server on its way: what the loop of tokens tells it, and the end of both sides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron.core.inference.beam_search import Hypothesis
from megatron.core.inference.inference_request import (
    NewToken,
    Progress,
    PromptEnded,
    PromptFailed,
    PromptSearched,
    PromptSeen,
)
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.serving.job_queue import Job, JobQueue
from megatron.serving.openai.translator import Translated


class ClientLeft(Exception):
    """Report that nobody waits for the answer."""


class RunningAnswer:
    """Hold a request that runs, from `start` to `close`, and the texts of its choices.

    A client that leaves, which ``receive`` of ASGI tells, ends the request at the next token.
    """

    def __init__(self, jobs: JobQueue, asked: Translated, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.choices = asked.choice_texts(tokenizer)
        self.found: dict[int, tuple[Hypothesis, ...]] = {}
        self._tokenizer = tokenizer
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Sequence[Progress] | Exception] = asyncio.Queue()
        self._job = Job(asked.request, self._listen)
        self._watcher: asyncio.Task[None] | None = None

    def start(self, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Let the request wait for its turn, and watch whether the client stays.

        Raises:
            QueueFull: too many requests wait.
            ServiceEnding: the service ends.
        """
        self._jobs.start(self._job)
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        """Give the request up, if it still runs."""
        self._jobs.leave(self._job)
        if self._watcher is not None:
            self._watcher.cancel()

    async def changes(self) -> AsyncIterator[set[int]]:
        """Yield the numbers of the choices that have gone on, until all have ended.

        Raises:
            ClientLeft: nobody waits any more.
            Exception: the request failed.
        """
        running = set(range(len(self.choices)))
        while running:
            changed: set[int] = set()
            for news in await self._next():
                self._take(news)
                changed.add(news.prompt)
                if self._has_ended(news):
                    running.discard(news.prompt)
            running -= {number for number in changed if self.choices[number].reason is not None}
            yield changed

    async def _next(self) -> list[Progress]:
        """Return all that has happened since; the slower the client, the more at once."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        news: list[Progress] = []
        for event in events:
            if isinstance(event, Exception):
                raise event
            news += event
        return news

    def _has_ended(self, news: Progress) -> bool:
        return isinstance(news, (PromptEnded, PromptSearched))

    def _take(self, news: Progress) -> None:
        choice = self.choices[news.prompt]
        match news:
            case PromptFailed(_, error):
                raise error
            case PromptSeen(prompt, values):
                if self.asked.fields.echo:
                    choice.begin_with(self._tokenizer, self.asked.request.prompts[prompt], values)
            case NewToken(_, token, value):
                choice.add(token, value)
            case PromptSearched(prompt, found):
                self.found[prompt] = found.hypotheses
            case PromptEnded(_, reason):
                choice.end(reason)

    def _listen(self, news: Sequence[Progress] | Exception) -> None:
        """Hand over to the loop of the server; at the very end that may be closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, news)

    async def _watch(self, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._jobs.leave(self._job)
        self._events.put_nowait(ClientLeft())
