"""What a sink does to attention that was computed without it, and its own gradient.

A sink is a key of one head whose score is the same for every query and whose value is 0 (Xiao et al. 2023,
https://arxiv.org/abs/2309.17453). With the log-sum-exp of a row it is one more block to merge.
"""

from __future__ import annotations

import torch


def merge_sinks(
    output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of rows that have a sink beside their keys.

    Shapes: ``output: [b, n, sq, d]``, ``logsumexp: [b, n, sq]`` in at least float32, ``sinks: [n]``.
    """
    total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    return output * (logsumexp - total).exp()[..., None].to(output.dtype), total


def sinks_gradient(
    grad: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks; output and log-sum-exp are those with the sinks in them.

    Shapes: ``grad, output: [b, n, sq, d]``, ``logsumexp: [b, n, sq]`` ``-> [n]``.
    """
    wide = logsumexp.dtype
    shares = (sinks.to(wide)[:, None] - logsumexp).exp()
    row_sums = (grad.to(wide) * output.to(wide)).sum(dim=-1)
    return -(shares * row_sums).sum(dim=(0, 2)).to(sinks.dtype)
