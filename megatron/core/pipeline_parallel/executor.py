"""Run a schedule: call the forward step, keep what the backward pass needs, add the losses up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron.core.pipeline_parallel.schedules import Action, Pass


@dataclass(frozen=True)
class MicrobatchLoss:
    """Hold a micro-batch's masked loss sum and the number of tokens in it.

    Under context parallelism each rank holds the sum over its own tokens and an equal share, a fraction perhaps, of
    the whole micro-batch's number.

    Shapes: both ``[]``; the sum in at least float32, differentiable.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor


@dataclass(frozen=True)
class ScheduleResult:
    """Hold the loss sum and the token count over all micro-batches of this rank, detached.

    Shapes: both ``[]`` float64.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor


ForwardStep = Callable[[int], MicrobatchLoss]
"""Run one micro-batch forward, given its number within the iteration."""


def run_schedule(
    actions: Sequence[Action],
    forward_step: ForwardStep,
    *,
    device: torch.device,
    calculate_per_token_loss: bool = False,
    loss_scale: float = 1.0,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ScheduleResult:
    """Run the actions of one iteration and return its losses.

    A micro-batch's gradient is that of its mean loss divided by the number of micro-batches, or of its loss sum with
    ``calculate_per_token_loss`` (the caller then divides by the number of tokens of the whole batch). Every backward
    pass but the last runs under ``no_sync``; ``loss_scale`` multiplies the gradients.
    """
    num_microbatches = sum(action.kind is Pass.FORWARD for action in actions)
    last_backward = max((i for i, action in enumerate(actions) if action.kind is Pass.BACKWARD), default=None)
    pending: dict[int, torch.Tensor] = {}
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = torch.zeros((), dtype=torch.float64, device=device)
    for index, action in enumerate(actions):
        if action.kind is Pass.FORWARD:
            with torch.set_grad_enabled(last_backward is not None):
                loss = forward_step(action.microbatch)
            loss_sum += loss.loss_sum.detach()
            num_tokens += loss.num_tokens
            if last_backward is not None:
                divisor = 1.0 if calculate_per_token_loss else _nonzero(loss.num_tokens) * num_microbatches
                pending[action.microbatch] = loss.loss_sum / divisor * loss_scale
        else:
            with nullcontext() if index == last_backward else no_sync():
                pending.pop(action.microbatch).backward()  # type: ignore[no-untyped-call]
    return ScheduleResult(loss_sum, num_tokens)


def _nonzero(num_tokens: torch.Tensor) -> torch.Tensor:
    """Return the divisor of a loss sum: 1 where no token counts, and the sum is 0."""
    return torch.where(num_tokens > 0, num_tokens, 1)
