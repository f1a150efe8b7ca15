"""Measure the loss on data that is not trained on."""

from __future__ import annotations

import torch

from megatron.core.pipeline_parallel.executor import MicrobatchLoss, ModelChunk, run_schedule
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.training.config.run_config import RunConfig
from megatron.training.data_setup import BatchSource
from megatron.training.initialize import Runtime
from megatron.training.model_setup import TrainingParts
from megatron.training.training_step import ForwardStep, agree


def evaluate(
    config: RunConfig, runtime: Runtime, parts: TrainingParts, forward_step: ForwardStep, source: BatchSource
) -> float:
    """Return the mean loss over the tokens of ``--eval-iters`` global batches, equal on all ranks."""
    per_batch = config.training.global_batch_size // (config.training.micro_batch_size * config.data_parallel_size)
    module = parts.module

    def forward(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        return forward_step(source.next(), module)

    module.eval()
    result = run_schedule(
        forward_only(1, 0, per_batch * config.validation.eval_iters),
        [ModelChunk(forward)],
        device=runtime.device.torch_device,
    )
    module.train()
    return agree(result, None, runtime).lm_loss
