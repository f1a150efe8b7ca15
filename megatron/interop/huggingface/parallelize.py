"""Two lines of Python from a Hugging Face model folder to a model that is cut over all processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from megatron.core.device import Device, select_device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.interop.huggingface.loading import load_hugging_face_model


def parallelize(folder: str | Path, state: ParallelState | None = None, *, params_dtype: str | None = None) -> GPTModel:
    """Return a Hugging Face model as ours, tensor-parallel over all processes, ready for inference.

    Under torchrun the processes meet first, unless they have met already; without it the model is whole. With ``state``
    the model is cut as it says. ``model.tp`` is the group that shares the model, its logits are cut over it.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be cut over so many processes.
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
