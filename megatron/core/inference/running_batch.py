"""Continuous batching: prompts of many requests share a batch, which each joins on arrival and leaves at its end.

Yu et al. 2022, "Orca", https://www.usenix.org/conference/osdi22/presentation/yu.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.core.errors import InputError, MegatronError
from megatron.core.inference.inference_request import (
    GenerationRequest,
    NewToken,
    Progress,
    PromptEnded,
    PromptFailed,
    PromptSeen,
    TokenValue,
)
from megatron.core.inference.prompt_batch import gather_logits
from megatron.core.inference.sampling import add_bias, choose_tokens, forbid_pairs, forbid_repeats, penalize
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import StagedModel
from megatron.core.ops import AttentionPattern
from megatron.core.precision import arithmetic_dtype
from megatron.core.tensor_parallel import stream_seed
from megatron.core.transformer import KeyValueCache


class Row:
    """Row of the batch: a prompt of a request, its text so far, and the number of positions in the KV cache.

    The row has its own random stream, which is a function of the request's seed and the prompt's index.
    """

    def __init__(self, job: int, request: GenerationRequest, prompt: int, device: torch.device) -> None:
        self.job = job
        self.request = request
        self.prompt = prompt
        self.text = list(request.prompts[prompt])
        self.prompt_length = len(self.text)
        self.num_seen = 0
        self.has_failed = False
        self.values: list[TokenValue] = []
        self.generator = torch.Generator(device)
        self.generator.manual_seed(stream_seed(request.sampling.seed, "sampling", (prompt,)))

    @property
    def full_length(self) -> int:
        return self.prompt_length + max(self.request.max_new_tokens - 1, 0)

    @property
    def num_new(self) -> int:
        return len(self.text) - self.prompt_length

    @property
    def num_unseen(self) -> int:
        """Number of tokens of the text that are not in the KV cache."""
        return len(self.text) - self.num_seen

    @property
    def wants_new_values(self) -> bool:
        return self.request.log_probabilities or self.request.new_log_probabilities

    @property
    def wants_prompt_values(self) -> bool:
        return self.request.log_probabilities


NOT_FINITE = -1
NOTHING_LEFT = -2
NOT_CHOSEN = -3
"""Error codes that replace the token of a row that has no valid choice, so that all ranks learn of the failure."""


def choose_for_rows(logits: torch.Tensor, rows: Sequence[Row], num_alternatives: int) -> torch.Tensor:
    """Return each row's token, its log-probability, and the most likely tokens with theirs, in `read_value`'s format.

    The choice for a row depends only on its own logits and request.

    Shapes: ``logits: [b, v] -> [b, 2 + 2 * num_alternatives]`` float64.
    """
    chosen = logits.new_zeros((len(rows), 2 + 2 * num_alternatives), dtype=torch.float64)
    finite = logits.isfinite().all(dim=-1)
    chosen[:, 0] = torch.where(finite, NOT_CHOSEN, NOT_FINITE)
    groups: dict[SamplingConfig, list[int]] = defaultdict(list)
    for number, (row, is_finite) in enumerate(zip(rows, finite.tolist(), strict=True)):
        if is_finite:
            # The row's generator already includes the seed.
            groups[dataclasses.replace(row.request.sampling.at_step(row.num_new), seed=0)].append(number)
    for sampling, members in groups.items():
        _choose_group(logits, [rows[member] for member in members], members, sampling, chosen)
    wanted = [number for number, row in enumerate(rows) if row.wants_new_values and chosen[number, 0] >= 0]
    if wanted:
        chosen[wanted, 1:] = values_of_tokens(logits[wanted], chosen[wanted, 0].long(), num_alternatives)
    return chosen


def _choose_group(
    logits: torch.Tensor, rows: Sequence[Row], members: Sequence[int], sampling: SamplingConfig, chosen: torch.Tensor
) -> None:
    """Choose tokens for rows with the same sampling parameters."""
    texts = [row.text for row in rows]
    allowed = logits if len(members) == len(logits) else logits[members]
    allowed = add_bias(allowed, [row.request.bias for row in rows])
    allowed = penalize(allowed, texts, [row.num_new for row in rows], sampling)
    for number, row in enumerate(rows):
        if row.request.never.first:
            place = slice(number, number + 1)
            allowed = torch.cat(
                (
                    allowed[:number],
                    forbid_pairs(allowed[place], [row.text[-1]], row.request.never),
                    allowed[number + 1 :],
                )
            )
    allowed = forbid_repeats(allowed, texts, sampling.no_repeat_ngram_size)
    left = allowed.isfinite().any(dim=-1)
    if not bool(left.all()):
        kept = left.nonzero()[:, 0].tolist()
        for number in set(range(len(members))) - set(kept):
            chosen[members[number], 0] = NOTHING_LEFT
        if not kept:
            return
        allowed, rows, members = allowed[kept], [rows[k] for k in kept], [members[k] for k in kept]
    try:
        tokens = choose_tokens(allowed, sampling, [row.generator for row in rows])
    except RuntimeError:  # the other stages wait for the tokens: these rows keep NOT_CHOSEN
        return
    chosen[members, 0] = tokens.to(torch.float64)


def values_of_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_alternatives: int) -> torch.Tensor:
    """Return the log-probability of each row's token at temperature 1, and the most likely tokens with theirs.

    Shapes: ``logits: [n, v], tokens: [n] -> [n, 1 + 2 * num_alternatives]`` float64.
    """
    known = logits.to(arithmetic_dtype(logits.dtype)).log_softmax(dim=-1)
    parts = [known.gather(1, tokens[:, None]).double()]
    if num_alternatives:
        best = known.topk(min(num_alternatives, known.shape[1]), dim=-1)
        missing = (0, num_alternatives - best.indices.shape[1])
        parts.append(torch.nn.functional.pad(best.indices.double(), missing, value=-1))
        parts.append(torch.nn.functional.pad(best.values.double(), missing))
    return torch.cat(parts, dim=1)


def read_value(numbers: Sequence[float], num_alternatives: int) -> TokenValue:
    """Parse a row of `values_of_tokens`, with at most ``num_alternatives`` alternatives."""
    width = (len(numbers) - 1) // 2
    tokens, values = numbers[1 : 1 + width], numbers[1 + width :]
    found = [(int(token), value) for token, value in zip(tokens, values, strict=True) if token >= 0]
    return TokenValue(numbers[0], tuple(found[:num_alternatives]))


@dataclass(frozen=True, eq=False)
class RowPattern(AttentionPattern):
    """Attention pattern whose mask was built from the positions of each row's queries.

    Shapes: ``positions: [b, s]``.
    """

    positions: torch.Tensor | None = None

    def within(self, window: int) -> AttentionPattern:
        """Return this pattern restricted to a sliding window before each query's position; layers share the result."""
        if window not in self._narrowed:
            assert self.positions is not None
            assert self.mask is not None
            columns = torch.arange(self.mask.shape[-1], device=self.mask.device)
            near = columns[None, None] > self.positions[:, :, None] - window
            self._narrowed[window] = AttentionPattern(mask=self.mask & near[:, None])
        return self._narrowed[window]

    @cached_property
    def _narrowed(self) -> dict[int, AttentionPattern]:
        return {}


def pattern_of_rows(positions: torch.Tensor, end: int) -> RowPattern:
    """Return the causal pattern of queries at ``positions`` over the first ``end`` columns of the cache.

    Shapes: ``positions: [b, s]``.
    """
    columns = torch.arange(end, device=positions.device)
    return RowPattern(mask=(columns[None, None] <= positions[:, :, None])[:, None], positions=positions)


_FEWEST_COLUMNS = 64


class SlotCache(KeyValueCache):
    """KV cache with one slot per row. A forward pass processes the rows of consecutive slots.

    The buffers grow by doubling with the number of rows and the longest row. Unwritten columns are 0, so that masked
    values are finite. The states of recurrent layers are 0 where a row starts.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._num_slots = 0
        self._rows = slice(0, 0)
        self._columns = torch.empty(0, 0, dtype=torch.long)
        self._end = 0

    def begin_pass(self, first_slot: int, columns: torch.Tensor, end: int) -> None:
        """Set where the next pass writes and reads: row ``i`` writes to ``columns[i]`` of slot ``first_slot + i`` and
        reads the columns below ``end``.

        A column of -1 is written to a scratch column that no pass reads. Shapes: ``columns: [b, s]``.
        """
        self._rows = slice(first_slot, first_slot + columns.shape[0])
        self._columns = columns
        self._end = end
        self.grow(self._rows.stop, end)

    def update(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values of a layer and return views of the rows' keys and values.

        Shapes: ``[s, b, g/tp, d] -> [end, b, g/tp, d]``.
        """
        if layer_number not in self._buffers:
            shape = (self._num_slots, self.max_length + 1)
            self._buffers[layer_number] = (
                key.new_zeros((*shape, *key.shape[2:])),
                value.new_zeros((*shape, *value.shape[2:])),
            )
        slots = torch.arange(self._rows.start, self._rows.stop, device=key.device)[:, None]
        seen = []
        for buffer, new in zip(self._buffers[layer_number], (key, value), strict=True):
            buffer[slots, self._columns] = new.transpose(0, 1)
            seen.append(buffer[self._rows, : self._end].transpose(0, 1))
        return seen[0], seen[1]

    @property
    def padding(self) -> torch.Tensor:
        return (self._columns < 0).sum(dim=1)

    def states(self, layer_number: int) -> tuple[torch.Tensor, ...] | None:
        """Return the states of the pass's rows, or None before the layer's first pass."""
        if layer_number not in self._states:
            return None
        continues = self._columns.amax(dim=1) >= self._columns.shape[1] - self.padding
        rows = (state[self._rows] for state in self._states[layer_number])
        return tuple(state.where(continues.view(-1, *(1,) * (state.dim() - 1)), 0.0) for state in rows)

    def set_states(self, layer_number: int, states: tuple[torch.Tensor, ...]) -> None:
        if layer_number not in self._states:
            self._states[layer_number] = tuple(state.new_zeros((self._num_slots, *state.shape[1:])) for state in states)
        for stored, state in zip(self._states[layer_number], states, strict=True):
            stored[self._rows] = state

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns and the states of the slot ``source`` to the slot ``target``."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[target, :length] = buffer[source, :length]
        for states in self._states.values():
            for state in states:
                state[target] = state[source]

    def clear(self, slot: int) -> None:
        """Zero a slot, because non-finite values would propagate through masked attention."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[slot] = 0
        for states in self._states.values():
            for state in states:
                state[slot] = 0

    def grow(self, num_slots: int, length: int = 0) -> None:
        """Grow the buffers to at least ``num_slots`` slots of ``length`` columns."""
        if num_slots <= self._num_slots and length <= self.max_length:
            return
        self._num_slots = max(self._num_slots, 1 << (num_slots - 1).bit_length())
        self.max_length = max(self.max_length, _FEWEST_COLUMNS, 1 << (length - 1).bit_length())
        for layer_number, buffers in self._buffers.items():
            grown = []
            for old in buffers:
                new = old.new_zeros((self._num_slots, self.max_length + 1, *old.shape[2:]))
                # Copy all but the last column, which is the scratch column.
                new[: old.shape[0], : old.shape[1] - 1] = old[:, :-1]
                grown.append(new)
            self._buffers[layer_number] = (grown[0], grown[1])
        for layer_number, states in self._states.items():
            self._states[layer_number] = tuple(
                torch.cat((state, state.new_zeros((self._num_slots - len(state), *state.shape[1:]))))
                for state in states
            )


_PROMPT_TOKENS_AT_ONCE = 512
_SCORED_TOKENS_AT_ONCE = 256
"""Limit on prompt tokens per pass if the logits of all positions are needed."""

News = tuple[int, Progress]
"""(job number, progress of one of its prompts)."""


class RunningBatch:
    """Batch of rows that decodes one token per running row and prefills some prompt tokens of new rows at every step.

    Row ``i`` has slot ``i`` of the cache. Running rows come first, followed by rows in prefill. A continuation does not
    depend on the other rows, except for rounding at different batch sizes. Every rank must make the same calls.
    """

    def __init__(self, staged: StagedModel) -> None:
        self.staged = staged
        self.rows: list[Row] = []
        self.num_running = 0
        self._cache = SlotCache()

    def add(self, row: Row) -> None:
        """Add a row, which joins at the next step."""
        self.rows.append(row)
        self._cache.grow(len(self.rows))

    def drop(self, jobs: Collection[int]) -> None:
        """Remove the rows of some jobs."""
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].job in jobs:
                self._release(slot)

    def step(self) -> list[News]:
        """Decode a token for every running row, prefill new prompts, and return the progress."""
        news: list[News] = []
        ended: list[Row] = []
        if self.num_running:
            rows = self.rows[: self.num_running]
            logits = self._forward(rows, 0, [1] * len(rows), all_positions=False)
            self._advance(rows, logits, news, ended)
        if self.num_running < len(self.rows):
            self._see_prompts(news, ended)
        for row in ended:
            self._release(self.rows.index(row), is_spoiled=row.has_failed)
        self.staged.finish()
        return news

    def _see_prompts(self, news: list[News], ended: list[Row]) -> None:
        """Prefill the next prompt tokens of new rows. Rows with a complete prompt start to run."""
        waiting = self.rows[self.num_running :]
        scored = any(row.wants_prompt_values for row in waiting)
        counts = _counts_within(waiting, _SCORED_TOKENS_AT_ONCE if scored else _PROMPT_TOKENS_AT_ONCE)
        rows = waiting[: len(counts)]
        starts = [row.num_seen for row in rows]
        scored = any(row.wants_prompt_values for row in rows)
        logits = self._forward(rows, self.num_running, counts, all_positions=scored)
        if scored:
            self._score_prompts(rows, starts, counts, logits)
        # Only the first row may be prefilled in part, and then without other rows.
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
        """Run the model on the next tokens of rows in consecutive slots; return the logits on the last stage.

        The tokens of a row are right-aligned. Padding on the left repeats its first token and is not cached.

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
        lengths = None
        if self.staged.model.config.longrope_length is not None:
            lengths = torch.tensor([row.prompt_length for row in rows], device=device)
        return self.staged.forward(
            torch.tensor(tokens, device=device),
            places,
            pattern_of_rows(places, end),
            self._cache,
            last_position_only=not all_positions,
            sequence_lengths=lengths,
        )

    def _advance(self, rows: Sequence[Row], logits: torch.Tensor | None, news: list[News], ended: list[Row]) -> None:
        """Choose the next token of each row on the last stage, and update the rows on every rank."""
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
        """Append the log-probabilities of the prompt tokens that follow the positions of the last pass."""
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
                f"the model's logits are not finite at position {row.num_seen - 1}: its weights contain NaN, or its "
                f"activations overflow {self.staged.model.config.params_dtype}; use a different checkpoint"
            )
        if code == NOTHING_LEFT:
            size = row.request.sampling.no_repeat_ngram_size
            return InputError(
                f"no_repeat_ngram_size {size} excludes every token at position {row.num_new + 1}; raise it"
            )
        assert code == NOT_CHOSEN
        return MegatronError(f"no token can be selected at position {row.num_new + 1}")

    def _release(self, slot: int, *, is_spoiled: bool = False) -> None:
        """Remove a row. The last running row moves to its slot, and the last row to the slot of that row."""
        is_running = slot < self.num_running
        if is_spoiled or not is_running:
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
    """Return the token counts of the first rows that fit the budget when padded to the longest."""
    counts = [min(rows[0].num_unseen, budget)]
    for row in rows[1:]:
        if (len(counts) + 1) * max(*counts, row.num_unseen) > budget:
            break
        counts.append(row.num_unseen)
    return counts


def _take(row: Row, new: NewToken) -> Iterator[Progress]:
    """Append a token to its row and yield the resulting progress."""
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
