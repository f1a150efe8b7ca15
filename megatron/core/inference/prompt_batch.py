"""Some prompts of a request on their way through the model: padded, cached, seen a stretch of positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.collectives import all_gather_last_dim, all_reduce, broadcast
from megatron.core.errors import InputError
from megatron.core.inference.padded_prompts import pad_left
from megatron.core.inference.request import GenerationCancelled, GenerationRequest
from megatron.core.inference.staged_model import StagedModel
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.kv_cache import KeyValueCache

_PROMPT_TOKENS_AT_ONCE = 1024


class PromptBatch:
    """Hold some prompts of a request and the cache of what the model saw of them.

    ``is_cancelled`` is asked before every pass, on every rank alike.
    """

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
        self.prompt_values: list[torch.Tensor] = []

    def see_prompts(self) -> torch.Tensor | None:
        """Show the model the prompts, a stretch of positions at a time, and return the logits of the last position."""
        logits = None
        for start, end in self.stretches():
            tokens = self.prompts.tokens[:, start:end]
            logits = self._forward(tokens, start, all_positions=self.request.log_probabilities)
            if self.request.log_probabilities:
                self.prompt_values.append(self._values_of_prompts(logits, start, end))
        return None if logits is None else logits[-1:]

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield the columns of the prompts, from and to, that the model is shown at once."""
        stretch = max(1, _PROMPT_TOKENS_AT_ONCE // len(self.numbers))
        for start in range(0, self.length, stretch):
            yield start, min(start + stretch, self.length)

    def see_tokens(self, tokens: Sequence[int], step: int) -> torch.Tensor | None:
        """Show the model every row's token of the step before, and return what follows.

        Shapes: ``-> [1, b, v/tp]``.
        """
        return self._forward(torch.tensor(tokens, device=self.staged.device)[:, None], self.length + step - 1)

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary behind every row.

        Shapes: ``[s, b, v/tp] -> [b, v]``.
        """
        return gather_logits(logits[-1], self.staged.model.config.vocab_size, self.state.tp)

    def share(self, values: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Give every rank what the first rank of the last stage, which has ``logits``, wrote into ``values``."""
        self.staged.share(values, logits)

    def not_finite(self, row: int, step: int) -> InputError:
        """Return what to report of a row whose logits are not finite at a step."""
        position = self.length + step - 1 - int(self.prompts.starts[row])
        return InputError(
            f"the model's logits are not finite at position {position}: its weights hold NaN or "
            f"overflow {self.staged.model.config.params_dtype}; use another checkpoint"
        )

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


def gather_logits(logits: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Return the logits of the whole vocabulary on every rank, without the columns that pad it.

    Shapes: ``[b, v/tp] -> [b, vocab_size]``.
    """
    return all_gather_last_dim(logits, tp)[:, :vocab_size]
