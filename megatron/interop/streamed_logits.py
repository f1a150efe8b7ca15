"""Compute the logits of a checkpoint's model on a few tokens, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.config_base import config_from_dict
from megatron.core.device import Device
from megatron.core.dist_checkpointing.mapping import from_spec
from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ONE_RANK
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of, split_box
from megatron.core.tensor_parallel.random import RngStreams
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.inference_model import inference_config

MAX_READ_BYTES = 64 * 1024 * 1024
_SEED = 20


def sample_tokens(config: GPTConfig, length: int = 12) -> torch.Tensor:
    """Return two sequences of tokens from all over the vocabulary, the same ones for every model of its size.

    Shapes: ``-> [2, s]``; ``s`` is ``length``, or what the model's learned positions have room for.
    """
    if config.position_embedding_type == "learned_absolute":
        length = min(length, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(config.vocab_size, (2, length), generator=generator)


def source_config(source: CheckpointSource) -> GPTConfig:
    """Return the model that the source's configuration describes.

    Raises:
        ConfigurationError: it is no configuration of a model.
    """
    return config_from_dict(GPTConfig, source.common["config"]["model"])


@torch.no_grad()
def streamed_logits(source: CheckpointSource, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the source's model in float32, whatever its weights are stored in.

    Embedding, layers and output layer are built, filled and dropped one after the other: no more than one of them is
    in memory, in float32.

    Shapes: ``tokens: [b, s] -> [b, s, v]`` float32, ``v`` without padding.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    config = inference_config(source_config(source), ONE_RANK, "float32")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden: torch.Tensor | None = None
    for contents in _one_by_one(config.num_layers):
        stage = _build_stage(config, contents)
        _fill(stage, source)
        hidden = stage(tokens, positions, hidden=hidden)
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
    for parameter in stage.parameters():
        tensor = from_spec(spec_of(parameter).with_prefix(MODEL_PREFIX), parameter)
        for piece in tensor.pieces:
            for box in split_box(piece.global_box, parameter.element_size(), MAX_READ_BYTES):
                room = tensor.view(box)
                assert room is not None, "a part of a piece lies in that piece"
                room.copy_(source.read(tensor.name, box))
