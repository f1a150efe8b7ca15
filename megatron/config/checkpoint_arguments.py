"""Configuration recorded in a checkpoint, for ``--use-checkpoint-args``; only other formats than ours need torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint import TRACKER_FILE, candidate_folders, detect_format
from megatron.config.deprecated_names import with_current_fields
from megatron.config.run_config import TokenizerConfig, command_line_fields
from megatron.core.config_base import IDENTITY, Role, field_specs
from megatron.core.dist_checkpointing import read_index_file
from megatron.core.errors import CheckpointError, DamagedCheckpointError, TokenizerError
from megatron.core.object_store import as_path, local_copy
from megatron.core.tokenizers import RECORD_FILE, TOKENIZER_FOLDER, NullTokenizer, read_json_object, recorded_arguments

PRECISION = ("fp16", "bf16")
"""Fields of the precision: the checkpoint's values apply if no flag sets one of these fields."""
TOKENIZER = tuple(spec.name for spec in field_specs(TokenizerConfig))
"""Fields of the tokenizer: as for the precision."""

_ROLES: tuple[Role, ...] = (*IDENTITY, "recipe")
_UNPADDED = ("native", "hf", "peft")
_COUNTED = ("extra_vocab_size", "padded_vocab_size", "patch_tokenizer_type")
"""Tokenizer settings that determine the model's number of embedding rows."""
_EXPECTED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length")


@dataclasses.dataclass(frozen=True)
class CheckpointArguments:
    """Configuration values that a checkpoint records, by field; ``folder`` is None if there is no checkpoint."""

    folder: Path | None
    values: Mapping[str, Any]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the expected fields that the checkpoint lacks."""
        return tuple(name for name in (*_EXPECTED, "tokenizer_type") if name not in self.values)


def read_checkpoint_arguments(directory: str, ckpt_step: int | None) -> CheckpointArguments:
    """Return the model shape, precision and tokenizer of the checkpoint that ``--load`` selects.

    Raises:
        CheckpointError: the folder does not exist, or none of its checkpoints is readable.
    """
    if not as_path(directory).exists():
        raise CheckpointError(
            f"--use-checkpoint-args: --load {directory} does not exist; pass the folder that a run saved to, or the "
            "folder of a model (hf download NAME --local-dir DIR fetches one from the Hugging Face Hub)"
        )
    first_error: CheckpointError | None = None
    folders = candidate_folders(as_path(directory), ckpt_step)
    for folder in folders:
        try:
            return CheckpointArguments(folder, _values_of(folder))
        except DamagedCheckpointError as error:
            first_error = first_error or error
    if first_error is not None:
        raise CheckpointError(f"--use-checkpoint-args: {first_error}; pass the model's flags instead")
    return CheckpointArguments(None, {})


def no_checkpoint(directory: str) -> str:
    """Return the message for an existing folder without checkpoints."""
    return (
        f"--use-checkpoint-args: --load {directory} contains no checkpoint (it has no {TRACKER_FILE}); pass the folder "
        "that a run saved to, the folder of a model, or the model's flags"
    )


def recorded_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration that a checkpoint of any format records; fields that it does not record are absent."""
    found = detect_format(folder)
    if found == "torch_dist":
        from megatron.checkpoint.formats.megatron import recorded_torch_dist_config

        return recorded_torch_dist_config(folder)
    if found == "torchtitan":
        from megatron.checkpoint.formats import recorded_torchtitan_config

        return recorded_torchtitan_config(folder)
    if found == "peft":
        from megatron.checkpoint.formats import base_of, read_settings

        config, adapters = recorded_config(base_of(folder)), read_settings(folder)
        scaling = {"lora_rank": adapters["r"], "lora_alpha": adapters["lora_alpha"]}
        return {**config, "model": {**config["model"], **scaling}}
    if found == "hf":
        from megatron.checkpoint.formats.huggingface import recorded_hugging_face_config

        return recorded_hugging_face_config(folder)
    if found == "torch":
        # Megatron stores these values with its tensors: only the native format can be read without torch.
        from megatron.checkpoint.formats.megatron import recorded_torch_config

        return recorded_torch_config(folder)
    return with_current_fields(read_index_file(folder)["common"]["config"])


def _tokenizer_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the checkpoint's copy of the tokenizer, or else the tokenizer flags of its run."""
    if (folder / TOKENIZER_FOLDER / RECORD_FILE).is_file():
        record = local_copy(folder / TOKENIZER_FOLDER) / RECORD_FILE
        with contextlib.suppress(TokenizerError):  # another tokenizer may be configured
            return recorded_arguments(read_json_object(record), record.parent)
    return dict(config.get("tokenizer", {}))


def _with_all_rows(folder: Path, config: Mapping[str, Any], tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Add the model's number of embedding rows, which may exceed the vocabulary size; Megatron's formats pad it."""
    rows = config["model"].get("vocab_size")
    is_told = any(tokenizer.get(name) for name in _COUNTED)
    is_told |= tokenizer.get("tokenizer_type") in (None, NullTokenizer.name)
    if not rows or is_told or detect_format(folder) not in _UNPADDED:
        return tokenizer
    return {**tokenizer, "padded_vocab_size": rows}


def _values_of(folder: Path) -> dict[str, Any]:
    try:
        config = recorded_config(folder)
        sections = {**config, "tokenizer": _with_all_rows(folder, config, _tokenizer_of(folder, config))}
        recorded = [
            (spec, dict(sections[part]))
            for part, spec in command_line_fields()
            if spec.options.role in _ROLES or spec.name in (*PRECISION, *TOKENIZER)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder}: the index contains no configuration ({error!r})") from error
    values: dict[str, Any] = {}
    for spec, section in recorded:
        if spec.name not in section:
            continue
        value = section[spec.name]
        if spec.item_type is float and type(value) is int:
            value = float(value)
        if spec.is_sequence and isinstance(value, (list, tuple)):
            values[spec.name] = tuple(value)
            continue
        if type(value) is not spec.item_type and not (value is None and spec.is_optional):
            raise DamagedCheckpointError(f"{folder}: the recorded value {value!r} of {spec.name} is invalid")
        values[spec.name] = value
    return values
