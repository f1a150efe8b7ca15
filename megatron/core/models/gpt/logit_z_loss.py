"""The z-loss of a model's logits, which keeps their normalizers near 1.

Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311.
"""

from __future__ import annotations

import torch

from megatron.core.collectives import all_reduce
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.process_group import Group

LOGIT_Z_LOSS = "logit_z_loss"
"""What it is called in the log: the mean of the squared logarithms, without its coefficient."""


def logit_z_loss(
    log_normalizers: torch.Tensor, loss_mask: torch.Tensor | None, coefficient: float, cp: Group
) -> AuxiliaryLoss:
    """Return the squared logarithms of the normalizers of the tokens that count; collective over context parallelism.

    Shapes: ``log_normalizers, loss_mask: [b, s/cp]``.
    """
    squares = log_normalizers.square()
    counts = torch.ones_like(squares) if loss_mask is None else (loss_mask != 0).to(squares.dtype)
    num_tokens = counts.sum()
    all_reduce(num_tokens, cp)
    return AuxiliaryLoss(LOGIT_Z_LOSS, (squares * counts).sum(), num_tokens / cp.size, coefficient)
