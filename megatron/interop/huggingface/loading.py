"""A Hugging Face model for use: this rank's part of it, read box by box."""

from __future__ import annotations

from pathlib import Path

from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.interop.huggingface.source import HuggingFaceSource
from megatron.interop.inference_model import load_model_from


def load_hugging_face_model(
    folder: str | Path, state: ParallelState, device: Device, params_dtype: str | None = None
) -> GPTModel:
    """Return this rank's part of a Hugging Face model, in its own precision or in ``params_dtype``.

    Nothing communicates; a rank reads the values that it holds and no others.

    Raises:
        CheckpointError: the folder is not a model's, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be cut over so many processes.
    """
    source = HuggingFaceSource(folder)
    try:
        check_tensor_parallel_size(source.config, state.tp.size)
        return load_model_from(source, state, device, params_dtype)
    finally:
        source.close()


def check_tensor_parallel_size(config: GPTConfig, size: int) -> None:
    """Refuse a model whose layers cannot be cut over so many processes.

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
