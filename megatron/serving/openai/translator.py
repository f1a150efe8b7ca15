"""Translate the fields of a request for the engine: tokens, sampling, and stop conditions."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Sequence

from megatron.core.datasets import ASSISTANT, END_OF_DOCUMENT, ChatTemplate, Conversation, ConversationEncoder
from megatron.core.errors import DataError, InputError
from megatron.core.inference import (
    BeamConfig,
    GenerationRequest,
    SamplingConfig,
    StopRule,
    check_request,
    context_length,
    new_tokens_that_fit,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.tokenizers import Tokenizer
from megatron.serving.openai.answer_forms import ChoiceText
from megatron.serving.openai.request_fields import ApiError, Message, Prompt, RequestFields

COMPLETION_TOKENS = 16
"""Default number of new tokens of /v1/completions, as in OpenAI's API."""
BASE_MODEL_TOKENS = 64
"""Default number of new tokens for the messages of a model without a chat template, which may never end its text."""
COMPLETION_MODE = (
    "the model has no chat template: completion mode, which continues the text of the messages; --chat-template "
    "selects a format"
)
_MARK = "marked text of an answer"


@dataclasses.dataclass(frozen=True)
class Translated:
    """Request to the engine, with each prompt repeated ``n`` times, and the stop sequences to search for."""

    request: GenerationRequest
    fields: RequestFields
    prompts: tuple[tuple[int, ...], ...]
    stops: tuple[str, ...]

    def choice_texts(self, tokenizer: Tokenizer) -> list[ChoiceText]:
        """Create an empty text for each prompt of the engine's request."""
        return [ChoiceText(tokenizer, prompt, self.stops) for prompt in self.request.prompts]


class Translator:
    """Translator of requests for one model; thread-safe.

    Without a ``template`` (base models) the model continues the text of the messages (completion mode). ``max_tokens``
    limits the prompt plus the generated tokens, as the model's position embeddings do. ``default_new_tokens`` is the
    maximum number of new tokens for requests without one, shortened to fit the context; None: `default_length`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: GPTConfig,
        max_tokens: int,
        template: ChatTemplate | None,
        default_new_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.max_tokens = max_tokens
        self.template = template
        self._default_new_tokens = default_new_tokens
        self._encoder = None if template is None else ConversationEncoder(tokenizer, template)
        self._lock = threading.Lock()
        self._ends = frozenset() if tokenizer.eod_id is None else frozenset((tokenizer.eod_id,))
        self._chat_end, self._chat_stop = (None, None) if template is None else self._end_of_answers(template)

    @property
    def max_model_len(self) -> int:
        return context_length(self.config, self.max_tokens)

    def default_length(self, fields: RequestFields) -> int:
        """Return the maximum number of new tokens for a request without one, apart from the context length."""
        if not fields.is_chat:
            return COMPLETION_TOKENS
        return BASE_MODEL_TOKENS if self.template is None else self.max_model_len

    @property
    def is_busy(self) -> bool:
        """Return whether another thread is translating, in which case `translate` would block."""
        return self._lock.locked()

    def translate(self, fields: RequestFields, default_seed: int) -> Translated:
        """Translate a request for the engine.

        Raises:
            ApiError: the model or the tokenizer cannot serve it.
        """
        with self._lock:
            try:
                prompts = (
                    (self._conversation(fields.messages),)
                    if fields.is_chat
                    else tuple(self._tokens(prompt) for prompt in fields.prompts)
                )
                max_new = self._max_new(fields, max(map(len, prompts)))
                request = self._request(fields, prompts, max_new, default_seed)
                check_request(self.config, request)
            except InputError as error:
                raise ApiError(400, "; ".join(str(error).splitlines())) from error
        stops = fields.stop
        if fields.is_chat and self._chat_stop is not None and not fields.ignore_eos:
            stops = (*stops, self._chat_stop)
        return Translated(request, fields, prompts, stops)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        ids = tuple(self.tokenizer.tokenize(prompt)) if prompt else ()
        if not ids and self.tokenizer.eod_id is not None:
            # An empty prompt starts with the token that separates documents.
            return (self.tokenizer.eod_id,)
        return ids

    def _conversation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if self._encoder is None:
            return self._tokens("\n".join(message["content"] for message in messages))
        return tuple(self._encoder.encode_prompt(messages))

    def _max_new(self, fields: RequestFields, longest: int) -> int:
        """Return the maximum number of new tokens; reject a prompt that exceeds the context length."""
        limit = self.max_model_len
        max_new = fields.max_tokens
        if max_new is None:
            wanted = min(self._default_new_tokens or self.default_length(fields), limit - longest)
            max_new = new_tokens_that_fit(self.config, (longest,), max(wanted, 1))
        if longest + max_new > limit:
            is_servers = limit != self.config.max_position_embeddings
            restart = ", or restart the server with a larger --max-tokens-to-oom" if is_servers else ""
            raise ApiError(
                400,
                f"the maximum context length is {limit} tokens, but this request has {longest + max_new}: a prompt "
                f"of {longest} tokens and {max_new} to generate; shorten the "
                f"prompt{'' if max_new <= 1 else ' or lower max_tokens'}{restart}",
                param="messages" if fields.is_chat else "prompt",
                code="context_length_exceeded",
            )
        return max_new

    def _request(
        self, fields: RequestFields, prompts: tuple[tuple[int, ...], ...], max_new: int, default_seed: int
    ) -> GenerationRequest:
        ends = self._ends
        if fields.is_chat and self._chat_end is not None:
            ends |= {self._chat_end}
        has_beams = fields.num_beams > 1
        has_values = fields.num_alternatives is not None
        return GenerationRequest(
            prompts=prompts if has_beams else tuple(prompt for prompt in prompts for _ in range(fields.n)),
            max_new_tokens=max_new,
            sampling=_sampling(fields, default_seed),
            stop=StopRule(end_tokens=frozenset() if fields.ignore_eos else ends),
            bias=fields.bias,
            log_probabilities=has_values and fields.echo,
            new_log_probabilities=has_values,
            num_alternatives=min(fields.num_alternatives or 0, self.config.vocab_size),
            beams=BeamConfig(
                num_beams=fields.num_beams,
                length_penalty=float(fields.length_penalty),
                early_stopping=fields.early_stopping,
            )
            if has_beams
            else None,
        )

    def _end_of_answers(self, template: ChatTemplate) -> tuple[int | None, str | None]:
        """Return the token, or else the text, that ends a response of the template; neither if it has no such end."""
        messages = ({"role": "user", "content": "text"}, {"role": ASSISTANT, "content": _MARK})
        try:
            text = template.render(Conversation(messages)).text
        except DataError:  # some templates need other roles or a per-request setting
            return None, None
        end = text.rpartition(_MARK)[2].strip()
        if END_OF_DOCUMENT in end:
            return None, None
        try:
            ids = self.tokenizer.tokenize(end)[len(self.tokenizer.tokenize("")) :] if end else []
        except InputError:
            return None, None
        return (ids[0], None) if len(ids) == 1 else (None, end or None)


def _sampling(fields: RequestFields, default_seed: int) -> SamplingConfig:
    if fields.num_beams > 1:
        return SamplingConfig(
            no_repeat_ngram_size=fields.no_repeat_ngram_size, repetition_penalty=float(fields.repetition_penalty)
        )
    greedy = fields.temperature == 0.0 or fields.top_k == 1
    return SamplingConfig(
        greedy=greedy,
        temperature=1.0 if greedy else float(fields.temperature),
        top_k=0 if greedy else max(fields.top_k, 0),
        # A request's top_p 0 keeps only the most likely token, while SamplingConfig's 0 keeps all tokens.
        top_p=0.0 if greedy or fields.top_p == 1.0 else max(float(fields.top_p), sys.float_info.min),
        seed=default_seed if fields.seed is None else fields.seed % 2**63,
        no_repeat_ngram_size=fields.no_repeat_ngram_size,
        repetition_penalty=float(fields.repetition_penalty),
        presence_penalty=float(fields.presence_penalty),
        frequency_penalty=float(fields.frequency_penalty),
    )
