"""Model providers with one thing wrong: what the verification must find, or survive."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.config.run_config import RunConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import attach_spec, spec_of
from megatron.training.initialize import Runtime

NORM = "decoder.layers.2.pre_mlp_layernorm.weight"
INPUT_NORM = "decoder.layers.2.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def _without_sum(model: GPTModel, name: str) -> GPTModel:
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.name == name:
            attach_spec(parameter, replace(spec, gradient_sum_axes=()))
    return model


def norm_is_not_summed(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Forget that a tensor-parallel rank's gradient of one norm is only its part of the sequence."""
    return _without_sum(pretrain_gpt.provide_model(config, runtime, contents), NORM)


def input_norm_is_not_summed(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Forget the same of a norm that layers without feed-forward have, too."""
    return _without_sum(pretrain_gpt.provide_model(config, runtime, contents), INPUT_NORM)


def tied_embedding_is_not_summed(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Forget that both ends of the pipeline hold the word embedding."""
    return _without_sum(pretrain_gpt.provide_model(config, runtime, contents), EMBEDDING)


def one_rank_scales_a_gradient(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Multiply one norm's gradient on rank 1."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    if runtime.state.rank == 1:
        for parameter in model.parameters():
            if spec_of(parameter).name == NORM:
                parameter.register_hook(lambda grad: grad * (1 + 1e-6))
    return model


def gradients_are_one_percent_too_large(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Scale the gradients of the losses in a world of several ranks, but not the losses."""
    model = pretrain_gpt.provide_model(config, runtime, contents)

    def scale(module: torch.nn.Module, given: Any, losses: torch.Tensor) -> None:
        if losses.requires_grad:
            losses.register_hook(lambda grad: grad * 1.01)

    if runtime.state.world_size > 1:
        model.register_forward_hook(scale)
    return model


def losses_are_one_percent_too_large(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Scale the losses in a world of several ranks, but not their gradients."""
    model = pretrain_gpt.provide_model(config, runtime, contents)

    def scale(module: torch.nn.Module, given: Any, losses: torch.Tensor) -> torch.Tensor:
        return losses + 0.01 * losses.detach()

    if runtime.state.world_size > 1:
        model.register_forward_hook(scale)
    return model


def gradients_double_after_the_first_step(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Scale the gradients of the losses in a world of several ranks, once the weights have changed."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    weight = next(model.parameters())
    first = weight.detach().clone()

    def scale(module: torch.nn.Module, given: Any, losses: torch.Tensor) -> None:
        if losses.requires_grad and not torch.equal(weight, first):
            losses.register_hook(lambda grad: grad * 2.0)

    if runtime.state.world_size > 1:
        model.register_forward_hook(scale)
    return model


def one_weight_starts_otherwise(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Change one element of one weight on the last rank of a world of several."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    if 1 < runtime.state.world_size == runtime.state.rank + 1:
        with torch.no_grad():
            model.decoder.layers["3"].mlp.linear_fc2.weight[5, 7] += 1e-5
    return model


def last_rank_keys_dropout_one_position_late(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Drop what belongs to the next position, on the last rank of a world of several."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    keys_of_rank = model._dropout

    def late(*args: Any) -> DropoutKeys | None:
        keys = keys_of_rank(*args)
        return None if keys is None else replace(keys, positions=keys.positions + 1)

    if 1 < runtime.state.world_size == runtime.state.rank + 1:
        model._dropout = late
    return model


def raises_on_rank_1(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Raise where the model should be made; the others wait for this rank in a collective."""
    if runtime.state.rank == 1:
        raise ZeroDivisionError("planted")
    return pretrain_gpt.provide_model(config, runtime, contents)


def dies_on_rank_1(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """End the process as a signal would."""
    if runtime.state.rank == 1:
        os._exit(7)
    return pretrain_gpt.provide_model(config, runtime, contents)


def hang_on_rank_1() -> None:
    """Never come back, as a job."""
    if dist.get_rank() == 1:
        time.sleep(600)


def races_on_rank_1(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    """Change a weight on a second stream, which waits for nothing, and swallow the error: no value is other."""
    model = pretrain_gpt.provide_model(config, runtime, contents)
    if runtime.state.rank == 1:
        weight = next(model.parameters())
        with torch.no_grad():
            weight.mul_(1)
            with torch.cuda.stream(torch.cuda.Stream()), contextlib.suppress(RuntimeError):
                weight.mul_(1)
    return model
