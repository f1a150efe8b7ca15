"""An estimate of the activations that a rank keeps, before anything runs: what each matrix of a layer reads and writes.

The matrices are those of the model that the code builds on the meta device. Inputs and outputs of the linear layers are
what a layer with fused norms, attention and activations saves, but for a few numbers per token. The estimate decides
how much to offload. The planner measures saved tensors instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.in_flight import first_actions, most_in_flight
from megatron.core.pipeline_parallel.stage_layout import StageContents

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig


def saved_layer_bytes(model: GPTConfig, tokens: int, number: int) -> int:
    """Return what a layer keeps of a micro-batch of so many tokens of the tensor-parallel group, without recompute."""
    return _saved_bytes(model, tokens, chunk_parameters(model, StageContents((number,))))


def kept_layer_bytes(model: GPTConfig, tokens: int, number: int, place: int) -> int:
    """Return what a layer keeps with the recompute that is configured; ``place`` counts the layers of its chunk."""
    if model.recompute_granularity != "full":
        return saved_layer_bytes(model, tokens, number)
    length = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        return _input_bytes(model, tokens) if place < length else saved_layer_bytes(model, tokens, number)
    return _input_bytes(model, tokens) if place % length == 0 else 0


def offloaded_bytes(config: RunConfig) -> int:
    """Return the most that a rank leaves in host memory: weights, and activations of the passes in flight."""
    model, most = config.model, 0
    for stage in range(model.pipeline_model_parallel_size):
        chunks = config.stage_layout.chunks(stage)
        first = [StageContents(chunk.layer_numbers[: model.num_offloaded_layers]) for chunk in chunks]
        weights = sum(parameter.size for chunk in first for parameter in chunk_parameters(model, chunk))
        weights *= ELEMENT_BYTES[model.params_dtype] * model.cpu_offloading_weights
        kept = [_kept_by(config, chunk) * model.cpu_offloading_activations for chunk in first]
        most = max(most, weights + most_of_chunks(config, stage, kept))
    return most


def least_offloaded_bytes(config: RunConfig) -> int:
    """Return the least that a rank leaves in host memory: the inputs of offloaded layers in flight. Needs no torch."""
    model, most = config.model, 0
    is_uniform = model.recompute_granularity == "full" and model.recompute_method != "block"
    length = (model.recompute_num_layers or 1) if is_uniform else 1
    for stage in range(model.pipeline_model_parallel_size if model.cpu_offloading_activations else 0):
        numbers = (chunk.layer_numbers[: model.num_offloaded_layers] for chunk in config.stage_layout.chunks(stage))
        inputs = [math.ceil(len(first) / length) for first in numbers]
        most = max(most, most_of_chunks(config, stage, inputs))
    return most * _input_bytes(model, tokens_of_rank(config))


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Return the activations on a rank's device at the fullest moment of a step, offloaded ones left out.

    Beside what waits for backward passes there is either a layer's backward pass, which makes no more than the layer
    saves, or the loss. Layers that are computed again are there once more, and so are two layers on their way to the
    host.
    """
    model, stage = config.model, config.parallel_sizes.place(rank)["pp"]
    chunks, tokens = config.stage_layout.chunks(stage), tokens_of_rank(config)
    offloaded = model.num_offloaded_layers if model.cpu_offloading_activations else 0
    own = [StageContents(chunk.layer_numbers[offloaded:]) for chunk in chunks]
    waiting = most_of_chunks(config, stage, [_kept_by(config, chunk) for chunk in own])
    layers = [saved_layer_bytes(model, tokens, number) for chunk in chunks for number in chunk.layer_numbers]
    again = (model.recompute_num_layers or 1) if model.recompute_granularity is not None else 0
    working, loss = max(again, 1) * max(layers, default=0), 0
    if chunks[-1].has_loss:
        predictions = tokens * (1 + model.num_further_tokens)
        element = ELEMENT_BYTES[model.params_dtype]
        loss = 2 * (1 + model.num_further_tokens) * _input_bytes(model, tokens)
        loss += predictions * (model.padded_vocab_size // model.tensor_model_parallel_size) * (element + 8)
    return waiting + max(working, loss) + 2 * max(layers, default=0) * bool(offloaded)


def tokens_of_rank(config: RunConfig) -> int:
    """Return the tokens of a micro-batch that a tensor-parallel group holds."""
    return config.data.seq_length // config.model.context_parallel_size * config.training.micro_batch_size


def most_of_chunks(config: RunConfig, stage: int, sizes: Sequence[int]) -> int:
    """Return the most that a stage's passes in flight keep at once, if those of its chunks keep ``sizes``."""
    model, parallel, layout = config.model, config.parallel_sizes, config.stage_layout
    num_microbatches = config.training.global_batch_size // (config.training.micro_batch_size * parallel.dp)
    group_size = model.microbatch_group_size_per_virtual_pipeline_stage
    actions = first_actions(
        config.pipeline_schedule, parallel.pp, stage, num_microbatches, layout.num_chunks, group_size
    )
    return most_in_flight(actions, sizes)


def _kept_by(config: RunConfig, chunk: StageContents) -> int:
    tokens = tokens_of_rank(config)
    return sum(
        kept_layer_bytes(config.model, tokens, number, place) for place, number in enumerate(chunk.layer_numbers)
    )


def _input_bytes(model: GPTConfig, tokens: int) -> int:
    """Return the bytes of the hidden states that a rank holds of so many tokens."""
    is_sharded = model.sequence_parallel or model.distribute_saved_activations
    rows = tokens // (model.tensor_model_parallel_size if is_sharded else 1)
    return rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype]


def _saved_bytes(model: GPTConfig, tokens: int, parameters: Sequence[ChunkParameter]) -> int:
    """Return what matrices read and write; an even load gives each rank's experts their share of the choices."""
    sizes = model.parallel_sizes
    choices = tokens * model.moe_router_topk * sizes.expert_tp // sizes.tp
    width = sum((choices if each.is_expert else tokens) * each.width for each in parameters)
    return width * ELEMENT_BYTES[model.params_dtype]
