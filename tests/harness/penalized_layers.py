"""An auxiliary loss for any model: the mean square of what its feed-forwards put out."""

from __future__ import annotations

from typing import Any

import torch

import pretrain_gpt
from megatron.config.run_config import RunConfig
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.transformer.mlp import FeedForward
from megatron.training.initialize import Runtime

COEFFICIENT = 0.7


def penalize(model: Model) -> Model:
    """Add the loss, and a metric that is no loss, to every feed-forward of a chunk."""
    model.auxiliary_loss_names = ("output square", "output size")
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.register_forward_hook(_add_losses)
    return model


def _add_losses(module: torch.nn.Module, inputs: Any, output: LayerOutput) -> LayerOutput:
    squares, sizes = output.hidden.square().mean(dim=-1), output.hidden.detach().abs().mean(dim=-1)
    num_tokens = torch.tensor(squares.numel())
    losses = (
        AuxiliaryLoss("output square", squares.sum(), num_tokens, COEFFICIENT),
        AuxiliaryLoss("output size", sizes.sum(), num_tokens, 0.0),
    )
    return LayerOutput(output.hidden, losses)


def provide_penalized_gpt(config: RunConfig, runtime: Runtime, contents: StageContents) -> Model:
    """Return the chunk of ``pretrain_gpt.py`` with these losses."""
    return penalize(pretrain_gpt.provide_model(config, runtime, contents))
