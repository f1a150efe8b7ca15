"""Given texts as the model sees them: how likely their last tokens are, and whether it would have chosen them."""

from __future__ import annotations

import dataclasses

import torch

from megatron.core.errors import InputError
from megatron.core.inference.prompt_batch import PromptBatch, gather_logits
from megatron.core.inference.request import GenerationRequest
from megatron.core.inference.staged_model import StagedModel
from megatron.core.precision import arithmetic_dtype


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """Hold the tokens of a text, of which the last ``num_scored`` are to be scored."""

    tokens: tuple[int, ...]
    num_scored: int


@dataclasses.dataclass(frozen=True)
class Score:
    """Hold the log-probability of a row's scored tokens together, and whether each of them was the likeliest."""

    log_probability: float
    is_greedy: bool


def score_request(rows: tuple[ScoredRow, ...]) -> GenerationRequest:
    """Return what the model is shown: each row but its last token, which nothing follows.

    Raises:
        InputError: a row has fewer than two tokens, or all of it is to be scored, or none.
    """
    for row in rows:
        if not 0 < row.num_scored < len(row.tokens):
            raise InputError(
                f"{row.num_scored} of {len(row.tokens)} tokens cannot be scored: it takes one or more, behind another"
            )
    return GenerationRequest(prompts=tuple(row.tokens[:-1] for row in rows), max_new_tokens=0, log_probabilities=True)


class ScoredBatch(PromptBatch):
    """Score some rows together."""

    def __init__(self, staged: StagedModel, rows: tuple[ScoredRow, ...], numbers: list[int]) -> None:
        super().__init__(staged, score_request(rows), numbers, None)
        self._rows = [rows[number] for number in numbers]
        last = torch.tensor([[row.tokens[-1]] for row in self._rows], device=staged.device)
        self._targets = torch.cat([self.prompts.tokens[:, 1:], last], dim=1)
        columns = torch.arange(self.length, device=staged.device)
        counts = torch.tensor([row.num_scored for row in self._rows], device=staged.device)
        self._is_scored = columns[None, :] >= self.length - counts[:, None]

    def run(self) -> list[Score]:
        """Return the rows' scores, the same on every rank.

        Raises:
            InputError: the model's logits are not finite.
        """
        values = [torch.zeros(2, len(self._rows), 0, dtype=torch.float64, device=self.staged.device)]
        for start, end in self.stretches():
            logits = self._forward(self.prompts.tokens[:, start:end], start, all_positions=True)
            found = torch.zeros(2, len(self._rows), end - start, dtype=torch.float64, device=self.staged.device)
            if logits is not None:
                self._look_up(logits, start, end, found)
            self.share(found, logits)
            values.append(found)
        self.staged.finish()
        log_probabilities, misses = torch.cat(values, dim=2).sum(dim=2).tolist()
        for row, value in enumerate(log_probabilities):
            if value != value:
                raise self.not_finite(row, 0)
        return [Score(value, missed == 0) for value, missed in zip(log_probabilities, misses, strict=True)]

    def _look_up(self, logits: torch.Tensor, start: int, end: int, found: torch.Tensor) -> None:
        """Fill ``found`` for the columns ``[start, end)``: log-probabilities, and 1 where another token is likelier.

        Shapes: ``logits: [s, b, v/tp]``, ``found: [2, b, s]``.
        """
        chosen = self._is_scored[:, start:end]
        targets = self._targets[:, start:end][chosen]
        whole = gather_logits(logits.transpose(0, 1)[chosen], self.staged.model.config.vocab_size, self.state.tp)
        wide = whole.to(arithmetic_dtype(whole.dtype)).log_softmax(dim=-1)
        found[0][chosen] = wide.gather(1, targets[:, None]).squeeze(1).to(found.dtype)
        found[1][chosen] = (whole.argmax(dim=-1) != targets).to(found.dtype)
