"""Prompts of many requests that run together: each joins when it comes and leaves when it has ended.

Yu et al. 2022, "Orca", https://www.usenix.org/conference/osdi22/presentation/yu.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megatron.core.errors import InputError, MegatronError
from megatron.core.inference.continuous.progress import NewToken, Progress, PromptEnded, PromptFailed, PromptSeen
from megatron.core.inference.continuous.row import Row
from megatron.core.inference.continuous.row_choice import (
    NOT_CHOSEN,
    NOT_FINITE,
    NOTHING_LEFT,
    choose_for_rows,
    read_value,
    values_of_tokens,
)
from megatron.core.inference.continuous.row_pattern import pattern_of_rows
from megatron.core.inference.continuous.slot_cache import SlotCache
from megatron.core.inference.prompt_batch import gather_logits
from megatron.core.inference.staged_model import StagedModel

_PROMPT_TOKENS_AT_ONCE = 512
_SCORED_TOKENS_AT_ONCE = 256
"""Where the logits of all positions are needed."""

News = tuple[int, Progress]
"""(number of the job, what happened to one of its prompts)."""


class RunningBatch:
    """Continue rows together, a token of each running row and some prompt tokens of new ones at every step.

    Row ``i`` has slot ``i`` of the cache. The running rows come first, those with a prompt not seen whole behind them.
    What follows a prompt does not depend on the other rows, but for the rounding of another size of batch. Every rank
    makes the same calls.
    """

    def __init__(self, staged: StagedModel) -> None:
        self.staged = staged
        self.rows: list[Row] = []
        self.num_running = 0
        self._cache = SlotCache()

    def add(self, row: Row) -> None:
        """Let a row join at the next step."""
        self.rows.append(row)
        self._cache.grow(len(self.rows))

    def drop(self, jobs: Collection[int]) -> None:
        """Take the rows of jobs out."""
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].job in jobs:
                self._release(slot)

    def step(self) -> list[News]:
        """Choose a token for every running row, show the model new prompts, and return what happened."""
        news: list[News] = []
        ended: list[Row] = []
        if self.num_running:
            rows = self.rows[: self.num_running]
            logits = self._forward(rows, 0, [1] * len(rows), all_positions=False)
            self._advance(rows, logits, news, ended)
        if self.num_running < len(self.rows):
            self._see_prompts(news, ended)
        for row in ended:
            self._release(self.rows.index(row), is_spoilt=row.has_failed)
        self.staged.finish()
        return news

    def _see_prompts(self, news: list[News], ended: list[Row]) -> None:
        """Show the model the next tokens of new rows; those whose prompt it has then seen run from now on."""
        waiting = self.rows[self.num_running :]
        scored = any(row.wants_prompt_values for row in waiting)
        counts = _counts_within(waiting, _SCORED_TOKENS_AT_ONCE if scored else _PROMPT_TOKENS_AT_ONCE)
        rows = waiting[: len(counts)]
        starts = [row.num_seen for row in rows]
        scored = any(row.wants_prompt_values for row in rows)
        logits = self._forward(rows, self.num_running, counts, all_positions=scored)
        if scored:
            self._score_prompts(rows, starts, counts, logits)
        # Only the first row may be shown in part, and then alone.
        if rows[0].num_unseen:
            return
        self.num_running += len(rows)
        for row in rows:
            news.append((row.job, PromptSeen(row.prompt, tuple(row.values))))
        if logits is not None:
            logits = logits[-1:]
        last = [row for row in rows if row.request.max_new_tokens == 0]
        for row in last:
            news.append((row.job, PromptEnded(row.prompt, "length")))
        ended += last
        going = [number for number, row in enumerate(rows) if row.request.max_new_tokens > 0]
        if going:
            logits = logits[:, going] if logits is not None else None
            self._advance([rows[number] for number in going], logits, news, ended)

    def _forward(
        self, rows: Sequence[Row], first_slot: int, counts: Sequence[int], *, all_positions: bool
    ) -> torch.Tensor | None:
        """Show the model the next tokens of rows in neighbouring slots; the last stage returns logits.

        The tokens of a row end in the last column. What pads it on the left repeats its first token, and is not kept.

        Shapes: ``-> [longest count or 1, rows, v/tp]``.
        """
        longest = max(counts)
        end = max(row.num_seen + count for row, count in zip(rows, counts, strict=True))
        tokens, positions, columns = [], [], []
        for row, count in zip(rows, counts, strict=True):
            seen, padding = row.num_seen, longest - count
            tokens.append([row.text[seen]] * padding + row.text[seen : seen + count])
            positions.append([seen] * padding + list(range(seen, seen + count)))
            columns.append([-1] * padding + positions[-1][padding:])
            row.num_seen += count
        device = self.staged.device
        places = torch.tensor(positions, device=device)
        self._cache.begin_pass(first_slot, torch.tensor(columns, device=device), end)
        return self.staged.forward(
            torch.tensor(tokens, device=device),
            places,
            pattern_of_rows(places, end),
            self._cache,
            last_position_only=not all_positions,
        )

    def _advance(self, rows: Sequence[Row], logits: torch.Tensor | None, news: list[News], ended: list[Row]) -> None:
        """Choose the next token of each row on the last stage, and keep the books on every rank."""
        width = max(row.request.num_alternatives for row in rows)
        chosen = torch.zeros(len(rows), 2 + 2 * width, dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            whole = gather_logits(logits[-1], self.staged.model.config.vocab_size, self.staged.state.tp)
            chosen = choose_for_rows(whole, rows, width)
        self.staged.share(chosen, logits)
        for row, numbers in zip(rows, chosen.tolist(), strict=True):
            token = int(numbers[0])
            if token < 0:
                row.has_failed = True
                news.append((row.job, PromptFailed(row.prompt, self._failure(row, token))))
                ended.append(row)
                continue
            value = read_value(numbers[1:], row.request.num_alternatives) if row.wants_new_values else None
            for happened in _take(row, NewToken(row.prompt, token, value)):
                news.append((row.job, happened))
                if isinstance(happened, PromptEnded):
                    ended.append(row)

    def _score_prompts(
        self, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int], logits: torch.Tensor | None
    ) -> None:
        """Add the values of those tokens of the prompts that stand behind the positions just seen."""
        width = max(row.request.num_alternatives for row in rows)
        longest = max(counts)
        places = [
            (number, longest - count + offset, row.text[start + offset + 1])
            for number, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True))
            if row.wants_prompt_values
            for offset in range(min(count, row.prompt_length - start - 1))
        ]
        if not places:
            return
        values = torch.zeros(len(places), 1 + 2 * width, dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            in_group, columns, tokens = torch.tensor(places, device=logits.device).unbind(1)
            vocab_size, tp = self.staged.model.config.vocab_size, self.staged.state.tp
            values = values_of_tokens(gather_logits(logits[columns, in_group], vocab_size, tp), tokens, width)
        self.staged.share(values, logits)
        for (number, _, _), numbers in zip(places, values.tolist(), strict=True):
            rows[number].values.append(read_value(numbers, rows[number].request.num_alternatives))

    def _failure(self, row: Row, code: int) -> MegatronError:
        if code == NOT_FINITE:
            return InputError(
                f"the model's logits are not finite at position {row.num_seen - 1}: its weights hold NaN or "
                f"overflow {self.staged.model.config.params_dtype}; use another checkpoint"
            )
        if code == NOTHING_LEFT:
            size = row.request.sampling.no_repeat_ngram_size
            return InputError(
                f"no_repeat_ngram_size {size} leaves no token to choose at token {row.num_new + 1}; raise it"
            )
        assert code == NOT_CHOSEN
        return MegatronError(f"no token can be chosen at token {row.num_new + 1}")

    def _release(self, slot: int, *, is_spoilt: bool = False) -> None:
        """Take a row out; the last running row takes its slot, and the last of all the slot of that one."""
        is_running = slot < self.num_running
        if is_spoilt or not is_running:
            self._cache.clear(slot)
        if is_running:
            self.num_running -= 1
            slot = self._move(self.num_running, slot)
        self._move(len(self.rows) - 1, slot)
        self.rows.pop()

    def _move(self, source: int, target: int) -> int:
        if source != target:
            self._cache.move(source, target, self.rows[source].num_seen)
            self.rows[target] = self.rows[source]
        return source


def _counts_within(rows: Sequence[Row], budget: int) -> list[int]:
    """Return how many tokens of the first rows are shown at once; padded to the longest they are within the budget."""
    counts = [min(rows[0].num_unseen, budget)]
    for row in rows[1:]:
        if (len(counts) + 1) * max(*counts, row.num_unseen) > budget:
            break
        counts.append(row.num_unseen)
    return counts


def _take(row: Row, new: NewToken) -> Iterator[Progress]:
    """Add a token to its row and tell what that means."""
    stop, before = row.request.stop, row.text[-1]
    row.text.append(new.token)
    if new.token in stop.end_tokens:
        yield PromptEnded(row.prompt, "stop")
        return
    yield new
    if stop.closes(before, new.token):
        yield PromptEnded(row.prompt, "stop")
    elif row.num_new == row.request.max_new_tokens:
        yield PromptEnded(row.prompt, "length")
