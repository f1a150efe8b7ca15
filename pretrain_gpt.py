"""Pretrain a GPT: how its model and its data sets are made, and what a forward step computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron.training.arguments import parse_arguments_or_exit
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import Runtime, read_launch_environment

if TYPE_CHECKING:
    from megatron.core.datasets.batch import Batch
    from megatron.core.datasets.blended_dataset_builder import BlendedDatasetBuilder
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.executor import MicrobatchLoss
    from megatron.core.tokenizers.tokenizer import Tokenizer
    from megatron.training.data_setup import SampleTargets

# Whatever needs torch is imported by the functions that use it: a wrong command line is refused before that.


def provide_model(config: RunConfig, runtime: Runtime) -> GPTModel:
    """Return this rank's part of the model, initialised."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config.model,
        runtime.state.tp,
        runtime.rng,
        seed=config.initialization.seed,
        device=runtime.device.torch_device,
    )


def provide_datasets(
    config: RunConfig, tokenizer: Tokenizer, targets: SampleTargets, report: Callable[[str], None]
) -> BlendedDatasetBuilder:
    """Return what builds the training, validation and test data that the flags name."""
    from megatron.core.datasets.blended_dataset_builder import BlendedDatasetBuilder
    from megatron.training.data_setup import dataset_config

    samples = (targets.train, targets.valid, targets.test)
    return BlendedDatasetBuilder(dataset_config(config, tokenizer), samples, report)


def forward_step(batch: Batch, model: GPTModel) -> MicrobatchLoss:
    """Return the masked loss sum of a micro-batch and the number of tokens in it."""
    from megatron.core.pipeline_parallel.executor import MicrobatchLoss

    losses = model(batch.tokens, batch.position_ids, labels=batch.labels, document_ids=batch.document_ids)
    mask = batch.loss_mask.to(losses.dtype)
    return MicrobatchLoss(loss_sum=(losses * mask).sum(), num_tokens=mask.sum())


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    launch = read_launch_environment()
    config = parse_arguments_or_exit(argv, launch.world_size, launch.rank)
    from megatron.training.pretrain import pretrain

    return pretrain(config, launch, provide_model, provide_datasets, forward_step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
