"""Load a Hugging Face model folder as a tensor-parallel model, ready for inference."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from megatron.core.device import Device, select_device
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.interop.huggingface.source import HuggingFaceSource
from megatron.interop.inference_model import load_model_from


def parallelize(folder: str | Path, state: ParallelState | None = None, *, params_dtype: str | None = None) -> GPTModel:
    """Return a Hugging Face model as ours, tensor-parallel over all processes, ready for inference.

    Under torchrun the processes meet first, unless they have met already; without it the model is whole. With ``state``
    the model is sharded as it says. ``model.tp`` is the group that shares the model, its logits are sharded over it.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over so many processes.
    """
    device = _occupy_device()
    if state is None:
        if not dist.is_initialized() and dist.is_torchelastic_launched():
            dist.init_process_group(device.default_backend, device_id=device.torch_device if device.is_cuda else None)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        state = create_parallel_state(ParallelSizes(tp=world_size))
    return load_hugging_face_model(folder, state, device, params_dtype)


def _occupy_device() -> Device:
    device = select_device(int(os.environ.get("LOCAL_RANK", "0")))
    device.make_current()
    return device


def load_hugging_face_model(
    folder: str | Path, state: ParallelState, device: Device, params_dtype: str | None = None
) -> GPTModel:
    """Return this rank's part of a Hugging Face model, in its own precision or in ``params_dtype``.

    Nothing communicates; a rank reads the values that it holds and no others.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over so many processes.
    """
    source = HuggingFaceSource(folder)
    try:
        check_tensor_parallel_size(source.config, state.tp.size)
        return load_model_from(source, state, device, params_dtype)
    finally:
        source.close()


def check_tensor_parallel_size(config: GPTConfig, size: int) -> None:
    """Refuse a model whose layers cannot be sharded over so many processes.

    Raises:
        ConfigurationError: its heads or its feed-forward layer do not divide; every reason.
    """
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size
    problems = []
    if heads % size:
        problems.append(f"{heads} attention heads are not divisible by tensor-parallel size {size}")
    if groups % size and size % groups:
        problems.append(
            f"{groups} key-value heads and tensor-parallel size {size}: one must be a multiple of the other"
        )
    if width % size:
        problems.append(f"a feed-forward layer {width} wide is not divisible by tensor-parallel size {size}")
    if problems:
        raise ConfigurationError(f"{'; '.join(problems)}; change the number of processes")
