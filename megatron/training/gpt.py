"""Components of a GPT run: its model, its data sets, and its forward step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import megatron
from megatron.config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.training.initialize import Runtime

if TYPE_CHECKING:
    import torch

    from megatron.core.datasets import Batch
    from megatron.core.models import Model
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import ChunkResult, StageContents
    from megatron.core.tokenizers import Tokenizer
    from megatron.training.data_plan import DatasetSplitsBuilder, SampleTargets

# Functions import modules that need torch locally: wrong data is rejected before torch is imported.


def provide_model(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Build one initialized model chunk of this rank: the whole model without pipeline parallelism."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.parallel_state import ExpertGroups

    return GPTModel(
        config.model,
        runtime.state.tp,
        runtime.rng,
        seed=config.initialization.seed,
        device=runtime.device.torch_device,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
        cp=runtime.state.cp,
        experts=ExpertGroups.of(runtime.state),
        fills_later=config.ddp.shards_weights,
        parallel_state=runtime.state,
    )


def provide_datasets(
    config: RunConfig, tokenizer: Tokenizer, targets: SampleTargets, report: Callable[[str], None]
) -> DatasetSplitsBuilder:
    """Create the builder of the training, validation and test data that the flags name."""
    from megatron.core.datasets import BlendedDatasetBuilder
    from megatron.training.data_plan import dataset_config, run_position
    from megatron.training.registered_dataset import RegisteredDatasetBuilder

    if config.data.is_registered:
        return RegisteredDatasetBuilder(config, tokenizer, targets, report)
    if config.data.dataloader_type == "external":
        raise ConfigurationError(
            "--dataloader-type external: this script does not create samples itself; use single or cyclic, or call "
            "pretrain() with a data sets provider that returns them"
        )
    samples = (targets.train, targets.valid, targets.test)
    position = run_position(config, targets.done)
    return BlendedDatasetBuilder(
        dataset_config(config, tokenizer),
        samples,
        report,
        position=position,
        one_epoch_below=targets.one_epoch_below,
    )


def forward_step(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
    """Return the masked loss sum of a micro-batch and its number of tokens.

    A model chunk that is not the last one returns its hidden states; a chunk that is not the first one gets ``hidden``.
    Both kinds of result include the layers' auxiliary losses.

    Each context-parallel rank computes the losses of its own sequence shard and counts an equal share of the whole
    micro-batch's tokens, independent of its own mask. Gradients are averaged over these ranks, so their average is the
    gradient of the mean loss of the whole micro-batch. The shares add up to the count.
    """
    import torch

    from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
    from megatron.core.ops import AttentionPattern
    from megatron.core.pipeline_parallel import MicrobatchLoss

    pattern, losses = AttentionPattern(document_ids=batch.document_ids), list[AuxiliaryLoss]()
    # A CUDA graph of the loss includes its sum. The losses of each data set are summed here.
    is_summed = model.captures_loss and batch.data_sets is None
    output: torch.Tensor = model(
        batch.tokens,
        batch.position_ids,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        padding_mask=batch.padding_mask,
        pattern=pattern,
        hidden=hidden,
        losses=losses,
        dropout_samples=batch.dropout_samples,
        **({"reduction": "sum"} if is_summed else {}),
    )
    if not model.post_process:
        return LayerOutput(output, tuple(losses))
    assert batch.loss_mask is not None, "the last stage is given what the loss needs"
    assert batch.num_tokens is not None, "the last stage is given what the loss needs"
    num_tokens = batch.num_tokens
    if model.config.context_parallel_size > 1:
        num_tokens = num_tokens.to(output.dtype) / model.config.context_parallel_size
    if is_summed:
        return MicrobatchLoss(output, num_tokens, losses)
    mask = batch.loss_mask.to(output.dtype)
    counted = output * mask
    samples = None
    if batch.data_sets is not None:
        samples = torch.stack([each.sum(dim=1, dtype=torch.float64) for each in (counted.detach(), mask)], dim=-1)
    return MicrobatchLoss(counted.sum(), num_tokens, losses, samples)


def training_script() -> Path:
    """Return the path of the GPT training script, next to the package in a checkout and in an installation."""
    package = megatron.__file__
    assert package is not None
    return Path(package).resolve().parents[1] / "pretrain_gpt.py"
