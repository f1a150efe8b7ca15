"""A choice that an earlier start of this run made by measuring, as its checkpoint holds it."""

from __future__ import annotations

from pathlib import Path

from megatron.core.collectives import broadcast_object
from megatron.core.errors import InputError
from megatron.core.object_store import as_path
from megatron.training.checkpointing.folder import candidate_folders
from megatron.training.checkpointing.native import is_release
from megatron.training.config.checkpoint_arguments import recorded_config
from megatron.training.config.run_config import RunConfig
from megatron.training.process.initialize import Runtime

AUTO = "auto"


def recorded_choice(config: RunConfig, runtime: Runtime, field: str) -> str | None:
    """Return a model's field in the checkpoint that the run goes on from, as rank 0 reads it.

    It is ``auto`` where the checkpoint does not say, and None where the run begins anew. Collective.
    """
    load, world = config.checkpoint.load, runtime.state.world
    if load is None or config.checkpoint.finetune:
        return None
    found = _field_of(as_path(load), config.checkpoint.ckpt_step, field) if world.is_first else None
    agreed: str | None = broadcast_object(found, world)
    return agreed


def _field_of(directory: Path, ckpt_step: int | None, field: str) -> str | None:
    try:
        folders = candidate_folders(directory, ckpt_step)
        if not folders or is_release(folders[0]):
            return None
        recorded = recorded_config(folders[0])["model"].get(field, AUTO)
    except (InputError, LookupError, TypeError, ValueError):
        return AUTO  # what is wrong with it is said where it is loaded
    return str(recorded)
