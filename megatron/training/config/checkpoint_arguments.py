"""The shape of a model as a checkpoint records it, for ``--use-checkpoint-args``; read without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config_base import IDENTITY, Role
from megatron.core.dist_checkpointing.index import read_index_file
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.training.checkpointing.folder import candidate_folders
from megatron.training.config.run_config import command_line_fields

MEGATRON_FILES = "mp_rank_*/model_optim_rng.pt"
"""Where the files of Megatron's own format are in a folder."""

_ROLES: tuple[Role, ...] = (*IDENTITY, "recipe")


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
    from megatron.interop.megatron_torch.common_state import recorded_config

    return recorded_config(folder)


def _shape_of(folder: Path) -> dict[str, Any]:
    try:
        config = _config_of(folder)
        recorded = [(spec, dict(config[part])) for part, spec in command_line_fields() if spec.options.role in _ROLES]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder}: the index records no configuration ({error!r})") from error
    values: dict[str, Any] = {}
    for spec, section in recorded:
        if spec.name not in section:
            continue
        value = section[spec.name]
        if spec.item_type is float and type(value) is int:
            value = float(value)
        if type(value) is not spec.item_type and not (value is None and spec.is_optional):
            raise DamagedCheckpointError(f"{folder}: {spec.name} is recorded as {value!r}")
        values[spec.name] = value
    return values
