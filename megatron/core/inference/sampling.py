"""Sampling of the next token: pure functions of the logits and a random generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron.core.inference.inference_request import TokenPairs
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.precision import arithmetic_dtype


def choose_tokens(
    logits: torch.Tensor, sampling: SamplingConfig, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Sample one token per row. Row ``i`` draws from ``generators[i]`` only, independent of the other rows.

    ``logits`` cover the vocabulary without padding. Greedy decoding draws no random numbers.

    Shapes: ``logits: [b, v] -> [b]`` int64.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    assert len(generators) == logits.shape[0], "one generator a row"
    probabilities = token_probabilities(logits, sampling)
    drawn = [
        torch.multinomial(row, num_samples=1, generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn)


def forbid_pairs(logits: torch.Tensor, last: Sequence[int], never: TokenPairs) -> torch.Tensor:
    """Set the logits of tokens that must not follow each row's ``last`` token to minus infinity.

    Shapes: ``[b, v] -> [b, v]``.
    """
    rows = [row for row, token in enumerate(last) if token in never.first]
    if not rows or not never.second:
        return logits
    logits = logits.clone()
    place = (torch.tensor(rows)[:, None], torch.tensor(sorted(never.second))[None, :])
    logits[place] = -torch.inf
    return logits


def forbid_repeats(logits: torch.Tensor, texts: Sequence[Sequence[int]], size: int) -> torch.Tensor:
    """Set the logits of tokens that would repeat an n-gram of ``size`` tokens in a row's text to minus infinity.

    Size 0 allows all repetitions. Shapes: ``[b, v] -> [b, v]``.
    """
    if size == 0:
        return logits
    logits = logits.clone()
    for row, text in enumerate(texts):
        if repeated := repeating_tokens(text, size):
            logits[row, repeated] = -torch.inf
    return logits


def repeating_tokens(text: Sequence[int], size: int) -> list[int]:
    """Return the tokens that follow an earlier occurrence of the text's last ``size - 1`` tokens."""
    tail = list(text[len(text) - size + 1 :])
    starts = range(len(text) - size + 1)
    return sorted({text[start + size - 1] for start in starts if list(text[start : start + size - 1]) == tail})


def penalize(
    logits: torch.Tensor, texts: Sequence[Sequence[int]], num_new: int | Sequence[int], sampling: SamplingConfig
) -> torch.Tensor:
    """Apply repetition, presence and frequency penalties to the logits of tokens in each row's text.

    The repetition penalty of Keskar et al. 2019, https://arxiv.org/abs/1909.05858, includes the prompt. The others
    count only the last ``num_new`` tokens of each text, which were generated. Shapes: ``[b, v] -> [b, v]``.
    """
    if not sampling.has_penalty:
        return logits
    logits = logits.clone()
    counts = [num_new] * len(texts) if isinstance(num_new, int) else num_new
    for row, text, count in zip(logits, texts, counts, strict=True):
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(text)), device=logits.device)
            values, factor = row[seen], sampling.repetition_penalty
            row[seen] = torch.where(values > 0.0, values / factor, values * factor)
        if generated := Counter(text[len(text) - count :]):
            place = torch.tensor(list(generated), device=logits.device)
            times = torch.tensor(list(generated.values()), device=logits.device)
            row[place] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def add_bias(logits: torch.Tensor, biases: Sequence[tuple[tuple[int, float], ...]]) -> torch.Tensor:
    """Add the biases of each row's (token, bias) pairs to its logits.

    Shapes: ``[b, v] -> [b, v]``.
    """
    if not any(biases):
        return logits
    logits = logits.clone()
    for row, bias in zip(logits, biases, strict=True):
        for token, addend in bias:
            row[token] += addend
    return logits


def token_probabilities(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Compute the distribution that tokens are sampled from, in at least float32.

    Shapes: ``[b, v] -> [b, v]``.
    """
    logits = apply_temperature(logits.to(arithmetic_dtype(logits.dtype)), sampling.temperature)
    if sampling.top_k > 0:
        logits = keep_top_k(logits, sampling.top_k)
    if 0.0 < sampling.top_p < 1.0:
        logits = keep_top_p(logits, sampling.top_p)
    return torch.softmax(logits, dim=-1)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Shift the logits so that the largest is 0, and divide them by the temperature.

    With the shift, a tiny temperature keeps the largest logit finite while the others go to minus infinity.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Set all but the ``k`` largest logits of each row to minus infinity. With ties, exactly ``k`` remain.

    Shapes: ``[b, v] -> [b, v]``.
    """
    if k >= logits.shape[-1]:
        return logits
    largest = logits.topk(k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, largest.indices, largest.values)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose probabilities sum to ``p`` or more (nucleus sampling).

    The other logits become minus infinity. The most probable token always remains. Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751.

    Shapes: ``[b, v] -> [b, v]``.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered, dim=-1)
    probability_before = probabilities.cumsum(dim=-1) - probabilities
    dropped = probability_before >= p
    dropped[..., 0] = False
    return logits.scatter(-1, order, ordered.masked_fill(dropped, -torch.inf))
