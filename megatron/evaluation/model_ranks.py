"""Score and continue texts with one model over several processes.

The first rank runs the program that sends the questions, and the other ranks wait for them. Replicas of the model split
the questions. Texts are encoded as the tokenizer's own files specify.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron.core.collectives import all_gather_objects, broadcast_object
from megatron.core.errors import InputError, MegatronError, TrainingError
from megatron.core.inference import (
    GenerationCancelled,
    GenerationRequest,
    InferenceEngine,
    SamplingConfig,
    Score,
    ScoredRow,
    StopRule,
    batches_of_like_length,
)
from megatron.core.process_group import Group
from megatron.core.tokenizers import HuggingFaceTokenizer, Tokenizer


class TextEncoding:
    """Tokenizer for evaluation that encodes texts as the package transformers does with the same files.

    ``prefix_id`` is the token that represents an empty context: the BOS token, or without one the EOS token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        leading = tokenizer.tokenize("")  # of Llama2Tokenizer, which always adds a BOS token
        self._own = len(leading)
        begin: int | None = leading[0] if leading else None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            leading, begin = list(tokenizer.leading_ids), tokenizer.begin_id
        self._leading = leading
        self.prefix_id = tokenizer.eod_id if begin is None else begin
        self._begin_text = None if self.prefix_id is None else tokenizer.detokenize([self.prefix_id])

    @property
    def end_id(self) -> int:
        """Return the token that ends a document.

        Raises:
            InputError: the tokenizer has none.
        """
        return self._known(self.tokenizer.eod_id)

    @property
    def first_id(self) -> int:
        """Return ``prefix_id``.

        Raises:
            InputError: the tokenizer has no such token.
        """
        return self._known(self.prefix_id)

    def encode(self, text: str, with_leading: bool = True) -> list[int]:
        """Tokenize a text; a leading BOS that the text already contains is not added again."""
        ids = self.tokenizer.tokenize(text)[self._own :]
        if not with_leading or (self._begin_text and text.startswith(self._begin_text)):
            return ids
        return [*self._leading, *ids]

    def decode(self, ids: list[int]) -> str:
        """Detokenize generated tokens, without special tokens if the tokenizer knows which they are."""
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.plain_text(ids)
        return self.tokenizer.detokenize(ids)

    def _known(self, token: int | None) -> int:
        if token is None:
            raise InputError(
                f"{self.tokenizer.name} has neither a beginning-of-text nor an end-of-text token, one of which is "
                "needed for an empty context; use a tokenizer with one"
            )
        return token


Result = TypeVar("Result")
Show = Callable[[str, int, int], None]
"""Progress callback: (activity, number done, total)."""


@dataclasses.dataclass(frozen=True)
class TextQuestion:
    """Prompts to continue until one of the stop strings ``until`` or the end of the document."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    until: tuple[str, ...]
    sampling: SamplingConfig


@dataclasses.dataclass(frozen=True)
class ScoreQuestion:
    """Rows to score."""

    rows: tuple[ScoredRow, ...]


@dataclasses.dataclass(frozen=True)
class _End:
    """End of the questions, with the error that caused it if there was one."""

    error: MegatronError | None = None


class ModelRanks:
    """Answer scoring and generation questions with one model on every rank of ``world``.

    ``copies`` is the data-parallel group of ranks with the same model shard. Each replica runs ``max_batch_size`` rows
    together. ``tick`` is called on every rank whenever there is progress.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        encoding: TextEncoding,
        world: Group,
        copies: Group,
        max_batch_size: int,
        tick: Callable[[], None] = lambda: None,
        show: Show = lambda what, done, total: None,
    ) -> None:
        self._engine = engine
        self._encoding = encoding
        self._world = world
        self._copies = copies
        self._max_batch_size = max_batch_size
        self._tick = tick
        self._show = show

    def lead(self, drive: Callable[[], Result]) -> Result | None:
        """Call ``drive`` on the first rank and return its result; ``drive`` may ask this object's questions.

        Raises:
            MegatronError: ``drive`` raised it; every rank raises it again.
            TrainingError: ``drive`` failed with another error, which the first rank raises unchanged.
        """
        if not self._world.is_first:
            self._follow()
            return None
        try:
            result = drive()
        except MegatronError as error:
            broadcast_object(_End(error), self._world)
            raise
        except Exception as error:
            broadcast_object(_End(TrainingError(f"rank 0 failed: {type(error).__name__}: {error}")), self._world)
            raise
        broadcast_object(_End(), self._world)
        return result

    def score(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Score rows; only the first rank calls this.

        Raises:
            InputError: a row cannot be scored, or the model's logits are not finite.
        """
        return self._ask(ScoreQuestion(tuple(rows)))

    def continue_texts(self, question: TextQuestion) -> list[str]:
        """Generate a continuation of each prompt up to its first stop string; only the first rank calls this.

        Raises:
            InputError: a prompt cannot be continued, or the model's logits are not finite.
        """
        return self._ask(question)

    def _ask(self, question: ScoreQuestion | TextQuestion) -> list[Any]:
        answer = self._answer(broadcast_object(question, self._world))
        if isinstance(answer, InputError):
            raise answer
        return answer

    def _follow(self) -> None:
        while True:
            question = broadcast_object(None, self._world)
            self._tick()
            if isinstance(question, _End):
                if question.error is not None:
                    raise question.error
                return
            self._answer(question)

    def _answer(self, question: ScoreQuestion | TextQuestion) -> list[Any] | InputError:
        """Return all answers to a question, gathered from the replicas that each computed a part."""
        size, place = self._copies.size, self._copies.rank
        part: list[Any] | InputError
        try:
            if isinstance(question, ScoreQuestion):
                part = self._scores(question.rows[place::size])
            else:
                part = self._texts(dataclasses.replace(question, prompts=question.prompts[place::size]))
        except InputError as error:
            part = error
        parts = all_gather_objects(part, self._copies)
        answers: list[Any] = [None] * sum(len(found) for found in parts if isinstance(found, list))
        for number, found in enumerate(parts):
            if isinstance(found, InputError):
                return found
            answers[number::size] = found
        return answers

    def _scores(self, rows: tuple[ScoredRow, ...]) -> list[Score]:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._tick()
            self._show("scoring", done, len(rows))

        return self._engine.score(rows, max_batch_size=self._max_batch_size, on_batch=count)

    def _texts(self, question: TextQuestion) -> list[str]:
        texts = [""] * len(question.prompts)
        # All rows of a batch run together, so a row without a new token has ended.
        at_once = min(self._max_batch_size, self._engine.max_batch_size)
        done = 0
        for numbers in batches_of_like_length(question.prompts, at_once):
            prompts = tuple(question.prompts[number] for number in numbers)
            running = _RunningTexts(self._encoding, len(numbers), question.until, self._tick)
            end = self._encoding.tokenizer.eod_id
            request = GenerationRequest(
                prompts=prompts,
                max_new_tokens=question.max_new_tokens,
                sampling=question.sampling,
                stop=StopRule(end_tokens=frozenset() if end is None else frozenset((end,))),
            )
            try:
                self._engine.generate(request, on_token=running.add, is_cancelled=running.have_ended)
            except GenerationCancelled:
                self._tick()  # Every text has ended.
            for number, text in zip(numbers, running.texts(), strict=True):
                texts[number] = text
            done += len(numbers)
            self._show("generating", done, len(texts))
        return texts


class _RunningTexts:
    """Texts being generated, each of which ends at its first stop string."""

    def __init__(self, encoding: TextEncoding, count: int, until: tuple[str, ...], tick: Callable[[], None]) -> None:
        self._encoding = encoding
        self._until = tuple(text for text in until if text)
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._has_stopped = [False] * count
        self._tick = tick

    def add(self, number: int, token: int) -> None:
        """Append a token to one text."""
        self._tick()
        self._tokens[number].append(token)
        if not self._has_stopped[number]:
            text = self._encoding.decode(self._tokens[number])
            self._has_stopped[number] = any(end in text for end in self._until)

    def have_ended(self) -> bool:
        """Return whether every text has ended, by a stop string or by getting no token at the last step."""
        longest = max(map(len, self._tokens))
        return longest > 0 and all(
            has_stopped or len(tokens) < longest
            for has_stopped, tokens in zip(self._has_stopped, self._tokens, strict=True)
        )

    def texts(self) -> list[str]:
        """Return each text up to its first stop string."""
        return [self._cut(self._encoding.decode(tokens)) for tokens in self._tokens]

    def _cut(self, text: str) -> str:
        for end in self._until:
            text = text.split(end)[0]
        return text
