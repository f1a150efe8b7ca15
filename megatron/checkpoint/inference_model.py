"""Build a checkpoint's model for inference at any layout, or stream its layers one by one to compute logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource, TensorInfo
from megatron.core.config_base import config_from_dict
from megatron.core.device import Device
from megatron.core.dist_checkpointing import (
    Progress,
    ShardedTensor,
    ignore_progress,
    model_tensors,
)
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.ops import CAUSAL, SelectedKeys
from megatron.core.parallel_config import ONE_RANK, ParallelSizes
from megatron.core.parallel_state import ExpertGroups, ParallelState
from megatron.core.pipeline_parallel import StageContents
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import split_box
from megatron.core.tensor_parallel import RngStreams

EVEN_PIPELINE: Final[Mapping[str, Any]] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "pipeline_schedule": None,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
}
"""Configuration fields of an even pipeline split, with one stage per pipeline rank."""


def inference_config(config: GPTConfig, sizes: ParallelSizes, params_dtype: str | None = None) -> GPTConfig:
    """Return a trained model's configuration at another layout, without training-only settings."""
    return dataclasses.replace(
        config,
        **sizes.model_fields(),
        sequence_parallel=False,
        **EVEN_PIPELINE,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp16=config.fp16 and params_dtype is None,
        bf16=config.bf16 and params_dtype is None,
        params_dtype=config.params_dtype if params_dtype is None else params_dtype,
    )


def inference_stage(num_layers: int, pipeline_model_parallel_size: int, rank: int) -> StageContents:
    """Return the contents of a pipeline rank; the first stages have one more layer if the split is uneven.

    Raises:
        ConfigurationError: there are more stages than layers.
    """
    stages = pipeline_model_parallel_size
    if stages > num_layers:
        raise ConfigurationError(
            f"--pipeline-model-parallel-size {stages} is greater than the number of layers {num_layers}; use "
            f"{num_layers} or less"
        )
    each, rest = divmod(num_layers, stages)
    start = rank * each + min(rank, rest)
    end = start + each + (rank < rest)
    return StageContents(tuple(range(start, end)), has_embedding=rank == 0, has_loss=rank == stages - 1)


def build_inference_model(config: GPTConfig, state: ParallelState, device: Device) -> GPTModel:
    """Build this rank's stage of a model with zero weights, for a checkpoint to fill.

    Raises:
        ConfigurationError: there are more stages than layers.
    """
    contents = inference_stage(config.num_layers, state.pp.size, state.pp.rank)
    # The streams are not used, since there is no dropout.
    rng = RngStreams(device, 0, state.place)
    model = GPTModel(
        config,
        state.tp,
        rng,
        seed=None,
        device=device.torch_device,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
        experts=ExpertGroups.of(state),
    )
    return model.eval()


def load_model_from(
    source: CheckpointSource,
    state: ParallelState,
    device: Device,
    params_dtype: str | None = None,
    progress: Progress = ignore_progress,
) -> GPTModel:
    """Load this rank's stage of a checkpoint's model, in its own precision or in ``params_dtype``.

    There is no communication; every rank reads the boxes that it holds. ``progress`` is called with the bytes loaded so
    far.

    Raises:
        CheckpointError: a tensor is missing, has another shape or cannot be read.
        ConfigurationError: the model cannot be split into this number of stages.
    """
    trained = config_from_dict(GPTConfig, source.common["config"]["model"])
    config = inference_config(trained, dataclasses.replace(state.sizes, dp=1, cp=1), params_dtype)
    model = build_inference_model(config, state, device)
    fill_model(model, source, progress)
    return model


def fill_model(model: GPTModel, source: CheckpointSource, progress: Progress = ignore_progress) -> None:
    """Fill every parameter from a checkpoint's tensors, converted to its dtype.

    Raises:
        CheckpointError: tensors are missing or have other shapes, and the message lists all of them; or one is
            unreadable.
    """
    wanted = model_tensors([model], source.tensors)
    if problems := _misfits(wanted, source.tensors):
        raise CheckpointError(f"checkpoint {source.folder} does not match its configuration: {'; '.join(problems)}")
    done, total = 0, sum(tensor.data.nbytes for tensor in wanted)
    with torch.no_grad():
        for tensor in wanted:
            with tensor.opened():
                for shard in tensor.shards:
                    tensor.data[shard.local_box.slices] = source.read(tensor.name, shard.global_box).to(tensor.data)
            done += tensor.data.nbytes
            progress(done, total)


def _misfits(wanted: list[ShardedTensor], stored: Mapping[str, TensorInfo]) -> list[str]:
    problems = []
    for tensor in wanted:
        if tensor.name not in stored:
            problems.append(f"{tensor.name} is missing")
        elif stored[tensor.name].global_shape != tensor.global_shape:
            problems.append(
                f"{tensor.name} has shape {stored[tensor.name].global_shape} instead of {tensor.global_shape}"
            )
    return problems


MAX_READ_BYTES = 64 * 1024 * 1024
_SEED = 20


def sample_tokens(config: GPTConfig, length: int = 12) -> torch.Tensor:
    """Return two sequences of random tokens, the same for every model with this vocabulary size.

    Shapes: ``-> [2, s]``; ``s`` is ``length``, limited by the number of learned positions.
    """
    if config.position_embedding_type == "learned_absolute":
        length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(config.vocab_size, (2, length), generator=generator)


def source_config(source: CheckpointSource) -> GPTConfig:
    """Return the model configuration of a source.

    Raises:
        ConfigurationError: the source's configuration does not describe a model.
    """
    return config_from_dict(GPTConfig, source.common["config"]["model"])


@torch.no_grad()
def streamed_logits(source: CheckpointSource, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the source's model in float32, regardless of the stored dtype.

    Embedding, layers and output layer are built, filled and released one after the other, so that only one of them is
    in memory, in float32.

    Shapes: ``tokens: [b, s] -> [b, s, v]`` float32, ``v`` without padding.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    config = inference_config(source_config(source), ONE_RANK, "float32")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    pattern = replace(CAUSAL, selected=SelectedKeys())
    hidden: torch.Tensor | None = None
    for contents in _one_by_one(config.num_layers):
        stage = _build_stage(config, contents)
        _fill(stage, source)
        hidden = stage(tokens, positions, hidden=hidden, pattern=pattern)
        del stage
    assert hidden is not None
    return hidden[:, :, : config.vocab_size].transpose(0, 1)


def _one_by_one(num_layers: int) -> Iterator[StageContents]:
    yield StageContents(has_embedding=True)
    for number in range(num_layers):
        yield StageContents((number,))
    yield StageContents(has_loss=True)


def _build_stage(config: GPTConfig, contents: StageContents) -> GPTModel:
    rng = RngStreams(Device("cpu"), _SEED, ONE_RANK.place())
    return GPTModel(
        config,
        single_rank_group(),
        rng,
        seed=None,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
    ).eval()


def _fill(stage: GPTModel, source: CheckpointSource) -> None:
    for tensor in model_tensors([stage], source.tensors):
        with tensor.opened():
            for shard in tensor.shards:
                for box in split_box(shard.global_box, tensor.data.element_size(), MAX_READ_BYTES):
                    room = tensor.view(box)
                    assert room is not None, "a part of a shard lies in that shard"
                    room.copy_(source.read(tensor.name, box))
