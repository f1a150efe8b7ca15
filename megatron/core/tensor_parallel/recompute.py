"""Activation recompute (checkpointing): drop the activations of a region and compute them again in the backward pass.

Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], *args: Any) -> Result:
    """Return ``function(*args)`` without keeping its activations; the backward pass computes them again.

    No state of a generator is kept: what ``function`` draws at random it must draw from a key that it is given, as
    dropout does, to draw the same both times.
    """
    result: Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
