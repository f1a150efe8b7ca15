"""Add flags to the command line: ``megatron train --script FILE --label-noise 0.1``.

The flags are in ``--help``, checkpoints record them, and ``get_args()`` has their values, as in Megatron-LM.
"""

import argparse

import torch

import megatron.training
from megatron.core.datasets import Batch
from megatron.core.models import Model
from megatron.core.pipeline_parallel import ChunkResult
from megatron.training import get_args, pretrain


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("label noise")
    group.add_argument("--label-noise", type=float, default=0.0, help="Fraction of the labels that are excluded.")
    group.add_argument("--noise-pattern", choices=["even", "odd"], default="even", help="Labels to exclude from.")
    return parser


def forward_step(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
    """Exclude some labels from the loss of the last pipeline stage."""
    noise = get_args().label_noise
    if batch.labels is not None and batch.loss_mask is not None and batch.num_tokens is not None and noise:
        offset = 1 if get_args().noise_pattern == "odd" else 0
        is_excluded = (batch.labels % 2 == offset) & (batch.labels % 100 < 100 * noise)
        batch.loss_mask[is_excluded] = 0.0
        batch.num_tokens.copy_(torch.count_nonzero(batch.loss_mask))
    return megatron.training.forward_step(batch, model, hidden)


if __name__ == "__main__":
    pretrain(forward_step=forward_step, extra_args=add_arguments, args_defaults={"lr_decay_style": "cosine"})
