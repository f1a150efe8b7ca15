"""An estimate of the activations that a rank keeps, before anything runs: saved by layers and passes in flight.

What a layer saves is read from the matrices of the model that the code builds on the meta device
(`saved_activations`), how many passes are in flight from the pipeline schedule's order. The estimate decides how much
to offload. The planner measures saved activations in traces of the layers instead (`megatron.planner.traces`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.schedules import first_actions, most_in_flight
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.training.saved_activations import hidden_bytes, saved_layer_bytes

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig


def kept_layer_bytes(model: GPTConfig, tokens: int, number: int, place: int) -> int:
    """Return what a layer keeps with the recompute that is configured; ``place`` counts the layers of its chunk.

    A layer of a multi-token prediction (MTP) module is alone, with place 0.
    """
    if model.recompute_granularity != "full":
        return saved_layer_bytes(model, tokens, number, model.recomputed_modules)
    length = model.recompute_num_layers or 1
    if number >= model.num_layers:
        # The states before it and the embedded tokens.
        return 2 * _input_bytes(model, tokens)
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
        kept = [sum(_kept_by_offloaded(config, chunk)) for chunk in chunks]
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

    In addition to the activations of micro-batches in flight, the device holds either those of one layer's backward
    pass, which are no more than the layer saves, or those of the loss. It holds recomputed layers once more, and also
    two layers that are being copied to the host.
    """
    model, stage = config.model, config.parallel_sizes.place(rank)["pp"]
    chunks, tokens = config.stage_layout.chunks(stage), tokens_of_rank(config)
    waiting = most_of_chunks(config, stage, [_kept_on_device(config, chunk) for chunk in chunks])
    numbers = [number for chunk in chunks for number in (*chunk.layer_numbers, *_mtp_layers(model, chunk))]
    largest = max((saved_layer_bytes(model, tokens, number) for number in numbers), default=0)
    is_grouped = model.recompute_granularity == "full" and model.recompute_method != "block"
    working, loss = largest * (model.recompute_num_layers or 1 if is_grouped else 1), 0
    if chunks[-1].has_loss:
        predictions = tokens * (1 + model.num_further_tokens)
        element = ELEMENT_BYTES[model.params_dtype]
        loss = 2 * (1 + model.num_further_tokens) * _input_bytes(model, tokens)
        loss += predictions * (model.padded_vocab_size // model.tensor_model_parallel_size) * (element + 8)
    moving = max(sum(sorted(_kept_by_offloaded(config, chunk))[-2:]) for chunk in chunks)
    return waiting + max(working, loss) + moving


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


def _mtp_layers(model: GPTConfig, chunk: StageContents) -> range:
    """Return the numbers of the layers of the MTP modules that a chunk has."""
    return range(model.num_layers, model.num_layers + model.num_further_tokens * chunk.has_loss)


def _kept_on_device(config: RunConfig, chunk: StageContents) -> int:
    """Return what a chunk's layers keep on the device of one micro-batch; layers of MTP modules are not offloaded."""
    model, tokens = config.model, tokens_of_rank(config)
    mtp = sum(kept_layer_bytes(model, tokens, number, 0) for number in _mtp_layers(model, chunk))
    return _kept_by(config, chunk) - sum(_kept_by_offloaded(config, chunk)) + mtp


def _kept_by_offloaded(config: RunConfig, chunk: StageContents) -> list[int]:
    """Return what each of a chunk's layers keeps whose activations are offloaded."""
    model, tokens = config.model, tokens_of_rank(config)
    numbers = chunk.layer_numbers[: model.num_offloaded_layers * model.cpu_offloading_activations]
    return [kept_layer_bytes(model, tokens, number, place) for place, number in enumerate(numbers)]


def _kept_by(config: RunConfig, chunk: StageContents) -> int:
    tokens = tokens_of_rank(config)
    return sum(
        kept_layer_bytes(config.model, tokens, number, place) for place, number in enumerate(chunk.layer_numbers)
    )


def _input_bytes(model: GPTConfig, tokens: int) -> int:
    """Return the bytes of the hidden states that a rank holds of so many tokens, as they are saved."""
    return hidden_bytes(model, tokens, is_sharded=model.sequence_parallel or model.distribute_saved_activations)
