"""The shape of a model as a checkpoint records it, for ``--use-checkpoint-args``; read without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config_base import field_specs
from megatron.core.dist_checkpointing.index import read_index_file
from megatron.core.dist_checkpointing.validation import DamagedCheckpointError
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.training.checkpointing.folder import candidate_folders
from megatron.training.config.data_config import DataConfig

MEGATRON_FILES = "mp_rank_*/model_optim_rng.pt"
"""Where the files of Megatron's own format are in a folder."""

_MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "openai_gelu",
    "bias_gelu_fusion",
    "add_bias_linear",
    "add_qkv_bias",
    "hidden_dropout",
    "attention_dropout",
    "max_position_embeddings",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "add_position_embedding",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "untie_embeddings_and_output_weights",
)
_FIELDS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("model", GPTConfig, _MODEL_FIELDS),
    ("data", DataConfig, ("seq_length",)),
)


@dataclasses.dataclass(frozen=True)
class CheckpointArguments:
    """Hold the values that a checkpoint gives, by field; ``folder`` is None where there is no checkpoint."""

    folder: Path | None
    values: Mapping[str, Any]


def read_checkpoint_arguments(directory: str, ckpt_step: int | None) -> CheckpointArguments:
    """Return the shape of the model in the checkpoint that ``--load`` will take, as its index records it.

    Raises:
        CheckpointError: there is no readable one where there should be one.
    """
    first_error: CheckpointError | None = None
    folders = candidate_folders(Path(directory), ckpt_step)
    for folder in folders:
        try:
            return CheckpointArguments(folder, _shape_of(folder))
        except DamagedCheckpointError as error:
            first_error = first_error or error
    if first_error is not None:
        raise CheckpointError(f"--use-checkpoint-args: {first_error}; give the model's flags instead")
    return CheckpointArguments(None, {})


def _config_of(folder: Path) -> Mapping[str, Any]:
    if next(folder.glob(MEGATRON_FILES), None) is None:
        config: Mapping[str, Any] = read_index_file(folder)["common"]["config"]
        return config
    # Megatron keeps these values beside its tensors: this format alone cannot be read without torch.
    from megatron.interop.megatron_torch.recorded_config import recorded_config

    return recorded_config(folder)


def _shape_of(folder: Path) -> dict[str, Any]:
    try:
        config = _config_of(folder)
        sections = {part: dict(config[part]) for part, _, _ in _FIELDS}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder}: the index records no configuration ({error!r})") from error
    values: dict[str, Any] = {}
    for part, config_class, names in _FIELDS:
        for spec in field_specs(config_class):
            if spec.name not in names or spec.name not in sections[part]:
                continue
            value = sections[part][spec.name]
            if spec.item_type is float and type(value) is int:
                value = float(value)
            if type(value) is not spec.item_type and not (value is None and spec.is_optional):
                raise DamagedCheckpointError(f"{folder}: {spec.name} is recorded as {value!r}")
            values[spec.name] = value
    return values
