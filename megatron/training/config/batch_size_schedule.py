"""The text of --step-batch-size-schedule, read into batch sizes and the samples at which they end."""

from __future__ import annotations

import itertools
import re

from megatron.core.errors import ConfigurationError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d+\.?\d*|\.\d+)([KMBT]?):(\d+)", re.IGNORECASE)


def read_batch_size_schedule(text: str, seq_length: int) -> tuple[tuple[int, ...], int]:
    """Read steps ``TOKENS:SIZE`` in rising order, from 0 tokens on; commas may stand for spaces.

    As in Megatron, a number of tokens is cut down to whole samples.

    Returns:
        Each size but the last and the number of samples at which it ends, in turn; and the last size.

    Raises:
        ConfigurationError: the text cannot be read, or its steps do not rise from 0.
    """
    typed = f"--step-batch-size-schedule {text!r}"
    found = [_STEP.fullmatch(word) for word in text.replace(",", " ").split()]
    steps = [(float(match[1]) * _FACTORS[match[2].upper()], int(match[3])) for match in found if match]
    if not steps or len(steps) < len(found):
        raise ConfigurationError(f"{typed} cannot be read; give TOKENS:SIZE pairs, such as '0:16 2.4B:320'")
    starts = [int(tokens) // max(seq_length, 1) for tokens, _ in steps]
    if starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        raise ConfigurationError(
            f"{typed}: steps must begin at 0 tokens and rise by a sequence or more; they begin at samples {starts}"
        )
    if any(size == 0 for _, size in steps):
        raise ConfigurationError(f"{typed}: a batch size of 0; give sizes above 0")
    ended = [number for (_, size), end in zip(steps, starts[1:]) for number in (size, end)]
    return tuple(ended), steps[-1][1]
