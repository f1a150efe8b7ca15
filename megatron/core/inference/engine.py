"""Generate tokens from a GPT model, with a key-value cache, at any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.collectives import all_gather_last_dim, broadcast
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference.kv_cache import PreallocatedKeyValueCache
from megatron.core.inference.sampling import choose_tokens
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.random import stream_seed

TokenCallback = Callable[[int, int], None]
"""(number of the prompt, token): called for each token as soon as it is known."""


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    eod_id: int | None,
    state: ParallelState,
    *,
    on_token: TokenCallback | None = None,
    max_batch_size: int = 32,
) -> list[list[int]]:
    """Return the tokens that follow each prompt: ``max_new_tokens``, or fewer where ``eod_id`` came (left out).

    Prompts of equal length run together, at most ``max_batch_size`` of them; what follows a prompt does not depend on
    the others. Every tensor-parallel rank is given the same arguments, returns the same tokens and calls ``on_token``.

    Raises:
        ConfigurationError: the sampling cannot be, or the model was built for training over several processes.
        InputError: a prompt is empty, holds a token outside the vocabulary or leaves too few learned positions; or
            the model's logits are not finite.
    """
    _check_model(model, state)
    if problems := sampling.problems():
        raise ConfigurationError(problems)
    check_request(model.config, prompts, max_new_tokens)
    results: list[list[int]] = [[] for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for numbers in _batches(prompts, max_batch_size):
                batch = _Batch(model, prompts, numbers, max_new_tokens, sampling, state.tp)
                for number, token in batch.run(max_new_tokens, eod_id):
                    results[number].append(token)
                    if on_token is not None:
                        on_token(number, token)
    finally:
        model.train(was_training)
    return results


def check_request(config: GPTConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts that the model cannot continue.

    Raises:
        InputError: as ``generate``.
    """
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens} tokens to generate is not positive; change --tokens-to-generate")
    for number, prompt in enumerate(prompts, start=1):
        place = f"prompt {number} of {len(prompts)}"
        if not prompt:
            raise InputError(f"{place} has no tokens; give it at least one")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise InputError(
                    f"{place} has token {token}, the model knows 0..{config.vocab_size - 1}; "
                    "use the tokenizer that the model was trained with"
                )
        length = len(prompt) + max_new_tokens
        if config.position_embedding_type == "learned_absolute" and length > config.max_position_embeddings:
            raise InputError(
                f"{place} has {len(prompt)} tokens: with {max_new_tokens} to generate that is {length}, and the model "
                f"has {config.max_position_embeddings} learned positions; shorten it or lower --tokens-to-generate"
            )


class _Batch:
    """Hold prompts of equal length, the cache of what the model saw of them, and each one's random stream."""

    def __init__(
        self,
        model: GPTModel,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingConfig,
        tp: Group,
    ) -> None:
        self.model = model
        self.numbers = numbers
        self.sampling = sampling
        self.tp = tp
        device = model.output_weight.device
        self.tokens = torch.tensor([list(prompts[number]) for number in numbers], device=device)
        # The last token that is chosen is never looked at again.
        self.cache = PreallocatedKeyValueCache(self.tokens.shape[1] + max_new_tokens - 1)
        self.position = 0
        self.generators = [
            torch.Generator(device).manual_seed(stream_seed(sampling.seed, "sampling", (number,))) for number in numbers
        ]

    def run(self, max_new_tokens: int, eod_id: int | None) -> Iterator[tuple[int, int]]:
        """Yield (prompt number, token) step by step until every prompt has ended."""
        running = [True] * len(self.numbers)
        for _ in range(max_new_tokens):
            for row, token in enumerate(self._step()):
                running[row] = running[row] and token != eod_id
                if running[row]:
                    yield self.numbers[row], token
            if not any(running):
                return

    def _step(self) -> list[int]:
        """Show the model the tokens that it has not seen and return the next one of every row."""
        batch, length = self.tokens.shape
        positions = torch.arange(self.position, self.position + length, device=self.tokens.device)
        logits = self.model(self.tokens, positions.expand(batch, -1), cache=self.cache, last_position_only=True)
        logits = gather_logits(logits.squeeze(0), self.model.config.vocab_size, self.tp)
        if not bool(logits.isfinite().all()):
            raise InputError(
                f"the model's logits are not finite at position {self.position + length - 1}: its weights hold NaN or "
                f"overflow {self.model.config.params_dtype}; use another checkpoint"
            )
        chosen = choose_tokens(logits, self.sampling, self.generators)
        # All ranks chose from the same bytes; but a GPU's sums may differ in their last bit from one rank to another.
        broadcast(chosen, self.tp)
        self.position += length
        self.tokens = chosen[:, None]
        return chosen.tolist()


def gather_logits(logits: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Return the logits of the whole vocabulary on every rank, without the columns that pad it.

    Shapes: ``[b, v/tp] -> [b, vocab_size]``.
    """
    return all_gather_last_dim(logits, tp)[:, :vocab_size]


def _batches(prompts: Sequence[Sequence[int]], max_batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of prompts that run together: of equal length, in order."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), max_batch_size):
            yield numbers[start : start + max_batch_size]


def _check_model(model: GPTModel, state: ParallelState) -> None:
    problems = []
    if model.config.sequence_parallel:
        problems.append("sequence parallelism cannot cut single tokens; build the model with sequence_parallel=False")
    if state.pp.size > 1 or state.cp.size > 1:
        problems.append(
            f"generation runs over tensor-parallel processes only, here pipeline({state.pp.size}) x "
            f"context({state.cp.size}); change the number of processes"
        )
    if problems:
        raise ConfigurationError(problems)
