"""The next token of each row of a running batch, where every row has a request of its own."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch

from megatron.core.inference.continuous.progress import TokenValue
from megatron.core.inference.continuous.row import Row
from megatron.core.inference.sampling import add_bias, choose_tokens, forbid_pairs, forbid_repeats, penalize
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.precision import arithmetic_dtype

NOT_FINITE = -1
NOTHING_LEFT = -2
NOT_CHOSEN = -3
"""What stands in the place of a token that cannot be chosen: all ranks must learn it."""


def choose_for_rows(logits: torch.Tensor, rows: Sequence[Row], num_alternatives: int) -> torch.Tensor:
    """Return each row's token, its log-probability and the likeliest tokens with theirs, as `read_value` reads them.

    What is chosen for a row depends on its own logits and request alone.

    Shapes: ``logits: [b, v] -> [b, 2 + 2 * num_alternatives]`` float64.
    """
    chosen = logits.new_zeros((len(rows), 2 + 2 * num_alternatives), dtype=torch.float64)
    finite = logits.isfinite().all(dim=-1)
    chosen[:, 0] = torch.where(finite, NOT_CHOSEN, NOT_FINITE)
    groups: dict[SamplingConfig, list[int]] = defaultdict(list)
    for number, (row, is_finite) in enumerate(zip(rows, finite.tolist(), strict=True)):
        if is_finite:
            # The seed is in the row's generator.
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
    """Choose for rows whose tokens are drawn in the same way."""
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
    except RuntimeError:  # the other stages wait for what is chosen: these rows keep NOT_CHOSEN
        return
    chosen[members, 0] = tokens.to(torch.float64)


def values_of_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_alternatives: int) -> torch.Tensor:
    """Return the log-probability of a token of each row at temperature 1, and the likeliest tokens with theirs.

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
    """Return what a row of `values_of_tokens` says, with so many of its alternatives."""
    width = (len(numbers) - 1) // 2
    tokens, values = numbers[1 : 1 + width], numbers[1 + width :]
    found = [(int(token), value) for token, value in zip(tokens, values, strict=True) if token >= 0]
    return TokenValue(numbers[0], tuple(found[:num_alternatives]))
