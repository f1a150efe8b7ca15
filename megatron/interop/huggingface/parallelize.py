"""Make a Hugging Face model, in a folder or in memory, a tensor-parallel one that is ready for inference."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import overload

import torch.distributed as dist

from megatron.core.device import Device, select_device
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.interop.huggingface.loaded_model import LoadedModel, LoadedModelSource
from megatron.interop.huggingface.source import HuggingFaceSource
from megatron.interop.huggingface.spawned.spawned_model import SpawnedModel
from megatron.interop.inference_model import load_model_from


@overload
def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel: ...


@overload
def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: int | None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel | SpawnedModel: ...


def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: int | None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel | SpawnedModel:
    """Return a Hugging Face model as ours, tensor-parallel over all processes, ready for inference.

    ``model`` is its folder, or a model that transformers has loaded: each process takes its part of it and leaves it as
    it is. Under torchrun the processes meet first, unless they have met already; without it the model is whole. With
    ``state`` the model is sharded as it says. ``model.tp`` is the group that shares the model, its logits are sharded
    over it. ``fp16`` stands for ``params_dtype="float16"``; without either the model keeps its own precision.
    With ``num_gpus`` of 2 or more a program that plain ``python`` runs starts so many processes, one for each GPU, and
    is given a `SpawnedModel` with ``generate``; where there are processes already, it says how many are meant to be.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over so many processes; there are others
            than ``num_gpus``; or ``fp16`` goes with another ``params_dtype``.
    """
    if fp16 and params_dtype not in (None, "float16"):
        raise ConfigurationError(f'fp16=True and params_dtype="{params_dtype}" are two precisions; leave one out')
    if not isinstance(model, str | Path | LoadedModel):
        raise ConfigurationError(f"a {type(model).__name__} is neither a model folder nor a model of transformers")
    if num_gpus is not None and num_gpus < 1:
        raise ConfigurationError(f"num_gpus={num_gpus} is not positive; give 1 or more, or leave it out")
    is_alone = state is None and not dist.is_initialized() and not dist.is_torchelastic_launched()
    if is_alone and num_gpus is not None and num_gpus > 1:
        with contextlib.closing(_source_of(model)) as source:
            check_tensor_parallel_size(source.config, num_gpus)
        return SpawnedModel(model, num_gpus, "float16" if fp16 else params_dtype)
    device = _occupy_device()
    if state is None:
        if not dist.is_initialized() and dist.is_torchelastic_launched():
            dist.init_process_group(device.default_backend, device_id=device.torch_device if device.is_cuda else None)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        _check_world_size(num_gpus, world_size)
        state = create_parallel_state(ParallelSizes(tp=world_size))
    _check_world_size(num_gpus, state.world_size)
    return load_hugging_face_model(model, state, device, "float16" if fp16 else params_dtype)


def _check_world_size(num_gpus: int | None, world_size: int) -> None:
    if num_gpus not in (None, world_size):
        raise ConfigurationError(
            f"num_gpus={num_gpus}, but the number of processes is {world_size}; start one for each GPU: "
            f"torchrun --nproc-per-node {num_gpus} SCRIPT, or leave num_gpus out"
        )


def _occupy_device() -> Device:
    device = select_device(int(os.environ.get("LOCAL_RANK", "0")))
    device.make_current()
    return device


def load_hugging_face_model(
    model: str | Path | LoadedModel, state: ParallelState, device: Device, params_dtype: str | None = None
) -> GPTModel:
    """Return this rank's part of a Hugging Face model, in its own precision or in ``params_dtype``.

    ``model`` is its folder or a loaded model. Nothing communicates; a rank reads the values that it holds and no
    others.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over so many processes.
    """
    with contextlib.closing(_source_of(model)) as source:
        check_tensor_parallel_size(source.config, state.tp.size)
        return load_model_from(source, state, device, params_dtype)


def _source_of(model: str | Path | LoadedModel) -> HuggingFaceSource | LoadedModelSource:
    return HuggingFaceSource(model) if isinstance(model, str | Path) else LoadedModelSource(model)


def check_tensor_parallel_size(config: GPTConfig, size: int) -> None:
    """Refuse a model whose layers cannot be sharded over so many processes.

    Raises:
        ConfigurationError: its heads or its feed-forward layer do not divide; every reason.
    """
    heads, groups = config.num_attention_heads, config.num_query_groups
    problems = []
    if heads % size:
        problems.append(f"{heads} attention heads are not divisible by tensor-parallel size {size}")
    if groups % size and size % groups:
        problems.append(
            f"{groups} key-value heads and tensor-parallel size {size}: one must be a multiple of the other"
        )
    widths = {"a feed-forward layer": config.ffn_hidden_size if not all(config.moe_layers) else 0}
    if config.num_experts is not None:
        widths |= {"an expert": config.moe_ffn_hidden_size}
        widths |= {"the shared expert": config.moe_shared_expert_intermediate_size or 0}
    for name, width in widths.items():
        if width % size:
            problems.append(f"{name} {width} wide is not divisible by tensor-parallel size {size}")
    if problems:
        raise ConfigurationError(f"{'; '.join(problems)}; change the number of processes")
