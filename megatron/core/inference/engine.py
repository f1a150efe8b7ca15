"""Generate tokens from a GPT model, with a key-value cache, at any tensor- and pipeline-parallel size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.collectives import all_gather_last_dim, all_reduce, broadcast
from megatron.core.errors import InputError
from megatron.core.inference.padded_prompts import batches_of_like_length, pad_left
from megatron.core.inference.request import (
    Continuation,
    GenerationCancelled,
    GenerationRequest,
    StopRule,
    check_request,
)
from megatron.core.inference.sampling import choose_tokens, forbid_pairs
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import StagedModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.p2p_communication import PipelineLinks
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import stream_seed
from megatron.core.transformer.kv_cache import KeyValueCache

TokenCallback = Callable[[int, int], None]
"""(number of the prompt, token): called for each token as soon as it is known."""

MAX_BATCH_SIZE = 32
"""How many prompts run together."""
_PROMPT_TOKENS_AT_ONCE = 1024
# What is chosen where a row's logits are not finite: all ranks must learn it.
_NOT_FINITE = -1


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    eod_id: int | None,
    state: ParallelState,
    *,
    on_token: TokenCallback | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    links: PipelineLinks | None = None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt: ``max_new_tokens``, or fewer where ``eod_id`` came (left out).

    As ``InferenceEngine.generate``, for one call.
    """
    request = GenerationRequest(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=StopRule(end_tokens=frozenset() if eod_id is None else frozenset((eod_id,))),
    )
    engine = InferenceEngine(model, state, links, max_batch_size)
    return [continuation.tokens for continuation in engine.generate(request, on_token=on_token)]


class InferenceEngine:
    """Continue prompts with one model, or with this rank's stage of it.

    ``links``, those of `create_pipeline_links`, are needed where there is a pipeline.

    Raises:
        ConfigurationError: the model was built for training over several processes, or the links are missing.
    """

    def __init__(
        self,
        model: GPTModel,
        state: ParallelState,
        links: PipelineLinks | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
    ) -> None:
        self.model = model
        self.state = state
        self.max_batch_size = max_batch_size
        self._staged = StagedModel(model, state, links)

    def generate(
        self,
        request: GenerationRequest,
        *,
        on_token: TokenCallback | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[Continuation]:
        """Return what follows each prompt.

        Prompts of any lengths run together, at most ``max_batch_size`` of them; what follows a prompt does not depend
        on the others. Every rank is given the same request, returns the same and calls ``on_token``. Where
        ``is_cancelled`` is given (on every rank), all ranks stop at the next token after one of them says yes.

        Raises:
            ConfigurationError: the sampling cannot be.
            InputError: a prompt is empty, holds a token outside the vocabulary or leaves too few learned positions;
                or the model's logits are not finite.
            GenerationCancelled: a rank's ``is_cancelled`` says yes.
        """
        check_request(self.model.config, request)
        results = [Continuation(tokens=[]) for _ in request.prompts]
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for numbers in batches_of_like_length(request.prompts, self.max_batch_size):
                    batch = _Batch(self._staged, request, numbers, is_cancelled)
                    for number, token in batch.run():
                        results[number].tokens.append(token)
                        if on_token is not None:
                            on_token(number, token)
                    for number, values in batch.log_probabilities().items():
                        results[number] = dataclasses.replace(results[number], log_probabilities=values)
        finally:
            self.model.train(was_training)
        return results


class _Batch:
    """Hold some prompts of a request, the cache of what the model saw of them, and each one's random stream."""

    def __init__(
        self,
        staged: StagedModel,
        request: GenerationRequest,
        numbers: Sequence[int],
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        self.staged = staged
        self.state = staged.state
        self.request = request
        self.numbers = numbers
        self.is_cancelled = is_cancelled
        self.prompts = pad_left([request.prompts[number] for number in numbers], staged.device)
        self.length = self.prompts.tokens.shape[1]
        # The last token that is chosen is never looked at again.
        self.cache = KeyValueCache(self.length + max(request.max_new_tokens - 1, 0))
        self.generators = [
            torch.Generator(staged.device).manual_seed(stream_seed(request.sampling.seed, "sampling", (number,)))
            for number in numbers
        ]
        self.prompt_values: list[torch.Tensor] = []
        self.new_values: list[list[float]] = [[] for _ in numbers]

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield (prompt number, token) step by step until every prompt has ended."""
        logits = self._see_prompts()
        running = [True] * len(self.numbers)
        last = self.prompts.tokens[:, -1].tolist()
        stop = self.request.stop
        for step in range(self.request.max_new_tokens):
            if step > 0:
                logits = self._forward(torch.tensor(last, device=self.staged.device)[:, None], self.length + step - 1)
            tokens, values = self._choose(logits, last, step)
            for row, token in enumerate(tokens):
                running[row] = running[row] and token not in stop.end_tokens
                if running[row]:
                    self.new_values[row].append(values[row])
                    running[row] = not stop.closes(last[row], token)
                    yield self.numbers[row], token
            if not any(running):
                break
            last = tokens
        self.staged.finish()

    def log_probabilities(self) -> dict[int, list[float]]:
        """Return each prompt's, by its number; none where they were not asked for."""
        if not self.request.log_probabilities:
            return {}
        of_prompts = torch.cat(self.prompt_values, dim=1)
        return {
            number: of_prompts[row, start : self.length - 1].tolist() + self.new_values[row]
            for row, (number, start) in enumerate(zip(self.numbers, self.prompts.starts.tolist(), strict=True))
        }

    def _see_prompts(self) -> torch.Tensor | None:
        """Show the model the prompts, a stretch of positions at a time, and return the logits of the last position."""
        stretch = max(1, _PROMPT_TOKENS_AT_ONCE // len(self.numbers))
        logits = None
        for start in range(0, self.length, stretch):
            tokens = self.prompts.tokens[:, start : start + stretch]
            logits = self._forward(tokens, start, all_positions=self.request.log_probabilities)
            if self.request.log_probabilities:
                self.prompt_values.append(self._values_of_prompts(logits, start, start + tokens.shape[1]))
        return None if logits is None else logits[-1:]

    def _forward(self, tokens: torch.Tensor, start: int, all_positions: bool = False) -> torch.Tensor | None:
        """Show the model the tokens of the columns from ``start`` on; the last stage returns logits.

        Shapes: ``[b, s] -> [s or 1, b, v/tp]``.
        """
        self._stop_if_cancelled()
        end = start + tokens.shape[1]
        positions, pattern = self.prompts.positions(start, end), self.prompts.pattern(start, end)
        return self.staged.forward(tokens, positions, pattern, self.cache, last_position_only=not all_positions)

    def _stop_if_cancelled(self) -> None:
        if self.is_cancelled is None:
            return
        asked = torch.tensor(int(self.is_cancelled()), device=self.staged.device)
        all_reduce(asked, self.state.model_parallel, op="max")
        if asked.item():
            self.staged.finish()
            raise GenerationCancelled("generation was given up: the program was asked to end")

    def _values_of_prompts(self, logits: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
        """Return the log-probability of the token behind each of the columns ``[start, end)``, on every rank.

        Shapes: ``[s, b, v/tp] -> [b, s]``; what stands behind the last column of all is not known yet: 0.
        """
        values = torch.zeros(len(self.numbers), end - start, dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            model = self.staged.model
            behind = self.prompts.tokens[:, start + 1 : end + 1].t()
            known = logits[: behind.shape[0]]
            losses = vocab_parallel_cross_entropy(known, behind.contiguous(), model.config.vocab_size, self.state.tp)
            values[:, : behind.shape[0]] = -losses.t()
        broadcast(values, self.state.pp, source=self.state.pp.size - 1)
        return values.cpu()

    def _choose(self, logits: torch.Tensor | None, last: Sequence[int], step: int) -> tuple[list[int], list[float]]:
        """Return the next token of every row and its log-probability, chosen on the last stage, on every rank."""
        chosen = torch.zeros(2, len(self.numbers), dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            whole = gather_logits(logits[-1], self.staged.model.config.vocab_size, self.state.tp)
            self._choose_from(whole, last, step, chosen)
            # All ranks chose from the same bytes; but a GPU's sums may differ in their last bit from rank to rank.
            broadcast(chosen, self.state.tp)
        broadcast(chosen, self.state.pp, source=self.state.pp.size - 1)
        tokens = [int(token) for token in chosen[0].tolist()]
        if _NOT_FINITE in tokens:
            row = tokens.index(_NOT_FINITE)
            position = self.length + step - 1 - int(self.prompts.starts[row])
            raise InputError(
                f"the model's logits are not finite at position {position}: its weights hold NaN or "
                f"overflow {self.staged.model.config.params_dtype}; use another checkpoint"
            )
        return tokens, chosen[1].tolist()

    def _choose_from(self, logits: torch.Tensor, last: Sequence[int], step: int, chosen: torch.Tensor) -> None:
        """Fill the two rows of ``chosen``: tokens, log-probabilities.

        Shapes: ``logits: [b, v]``, ``chosen: [2, b]``.
        """
        finite = logits.isfinite().all(dim=-1)
        if not bool(finite.all()):
            chosen[0] = torch.where(finite, 0, _NOT_FINITE)
            return
        allowed = forbid_pairs(logits, last, self.request.never)
        tokens = choose_tokens(allowed, self.request.sampling.at_step(step), self.generators)
        chosen[0] = tokens
        if self.request.log_probabilities:
            wide = logits.to(arithmetic_dtype(logits.dtype))
            chosen[1] = wide.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def gather_logits(logits: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Return the logits of the whole vocabulary on every rank, without the columns that pad it.

    Shapes: ``[b, v/tp] -> [b, vocab_size]``.
    """
    return all_gather_last_dim(logits, tp)[:, :vocab_size]
