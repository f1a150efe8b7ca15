"""Answers to the bodies of PUT /api, whatever server has taken them."""

from __future__ import annotations

import traceback
from http import HTTPStatus
from itertools import count
from typing import Any

from megatron.core.errors import InputError
from megatron.core.tensor_parallel.random import stream_seed
from megatron.serving.generation_api import ApiTranslator, BadRequest, read_body
from megatron.serving.job_queue import GenerationFailed, JobQueue, ServiceEnding


class PutApi:
    """Answer one body after the other, from several threads.

    Requests without ``random_seed`` draw from streams that follow from ``seed`` and their number.
    """

    def __init__(self, translator: ApiTranslator, jobs: JobQueue, seed: int) -> None:
        self._translator = translator
        self._jobs = jobs
        self._seed = seed
        self._numbers = count()

    def next_seed(self) -> int:
        """Return the seed of a request that brings none."""
        return stream_seed(self._seed, "request", (next(self._numbers),))

    def answer(self, body: bytes) -> tuple[HTTPStatus, Any, str]:
        """Return status, content and a line for the log."""
        try:
            api = read_body(body)
            asked = self._translator.generation_request(api, self.next_seed())
            given = self._jobs.submit(asked)
            answer = self._translator.answer(asked, api, given)
        except BadRequest as error:
            return HTTPStatus.BAD_REQUEST, str(error), f"refused: {error}"
        except ServiceEnding as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error), str(error)
        except (InputError, GenerationFailed) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, str(error), str(error)
        except Exception as error:  # noqa: BLE001 - the client is told, and the next request is another
            traceback.print_exc()
            line = f"the server failed at this request: {type(error).__name__}"
            return HTTPStatus.INTERNAL_SERVER_ERROR, line, line
        num_new = sum(len(continuation.tokens) for continuation in given)
        return HTTPStatus.OK, answer, "" if api.no_log else f"{len(api.prompts)} prompts, {num_new} new tokens"
