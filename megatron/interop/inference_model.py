"""Build a model for inference at any layout: its configuration, its stage on this rank, and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from megatron.core.config_base import config_from_dict
from megatron.core.device import Device
from megatron.core.dist_checkpointing.load import Progress, untold
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict import model_tensors
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo

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
"""Fields of a model's configuration for one stage on each pipeline rank, of as many layers as the others."""


def inference_config(config: GPTConfig, sizes: ParallelSizes, params_dtype: str | None = None) -> GPTConfig:
    """Return a trained model's configuration at another layout, without what only training needs."""
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
    """Return what a pipeline rank holds: layers spread as evenly as they can be, the first stages one more.

    Raises:
        ConfigurationError: there are more stages than layers.
    """
    stages = pipeline_model_parallel_size
    if stages > num_layers:
        raise ConfigurationError(
            f"{num_layers} layers do not reach for --pipeline-model-parallel-size {stages}; use {num_layers} or less"
        )
    each, rest = divmod(num_layers, stages)
    start = rank * each + min(rank, rest)
    end = start + each + (rank < rest)
    return StageContents(tuple(range(start, end)), has_embedding=rank == 0, has_loss=rank == stages - 1)


def build_inference_model(config: GPTConfig, state: ParallelState, device: Device) -> GPTModel:
    """Return this rank's stage of a model with weights of 0, for a checkpoint to fill.

    Raises:
        ConfigurationError: there are more stages than layers.
    """
    contents = inference_stage(config.num_layers, state.pp.size, state.pp.rank)
    # Nothing is drawn from the streams: there is no dropout.
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
    progress: Progress = untold,
) -> GPTModel:
    """Return this rank's stage of a checkpoint's model, in its own precision or in ``params_dtype``.

    Nothing communicates: every rank reads the boxes that it holds. ``progress`` learns how much of them is there.

    Raises:
        CheckpointError: a tensor is missing, has another shape or cannot be read.
        ConfigurationError: the model cannot be spread over so many stages.
    """
    trained = config_from_dict(GPTConfig, source.common["config"]["model"])
    config = inference_config(trained, dataclasses.replace(state.sizes, dp=1, cp=1), params_dtype)
    model = build_inference_model(config, state, device)
    fill_model(model, source, progress)
    return model


def fill_model(model: GPTModel, source: CheckpointSource, progress: Progress = untold) -> None:
    """Give every parameter its boxes of a checkpoint's tensors, converted to its dtype.

    Raises:
        CheckpointError: tensors are missing or have another shape, all of them named; or one cannot be read.
    """
    wanted = model_tensors([model])
    if problems := _misfits(wanted, source.tensors):
        raise CheckpointError(f"checkpoint {source.folder} does not fit its configuration: {'; '.join(problems)}")
    done, total = 0, sum(tensor.data.nbytes for tensor in wanted)
    with torch.no_grad():
        for tensor in wanted:
            for piece in tensor.pieces:
                tensor.data[piece.local_box.slices] = source.read(tensor.name, piece.global_box).to(tensor.data)
            done += tensor.data.nbytes
            progress(done, total)


def _misfits(wanted: list[ShardedTensor], stored: Mapping[str, TensorInfo]) -> list[str]:
    problems = []
    for tensor in wanted:
        if tensor.name not in stored:
            problems.append(f"{tensor.name} is missing")
        elif stored[tensor.name].global_shape != tensor.global_shape:
            problems.append(f"{tensor.name} is {stored[tensor.name].global_shape}, expected {tensor.global_shape}")
    return problems
