"""Activation recompute (checkpointing): drop the activations of a region and compute them again in the backward pass.

Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel.random import RngStreams

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], rng: RngStreams, *args: Any) -> Result:
    """Return ``function(*args)`` without keeping its activations; the backward pass computes them again.

    Dropout draws the same numbers both times, from whichever stream.
    """
    states = rng.state_dict()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), rng.replay(states)

    result: Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result
