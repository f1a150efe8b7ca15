"""What all ranks of a checkpoint of this format share: ``common.pt``, and the objects beside the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.interop.megatron_torch.megatron_arguments import config_of_arguments
from megatron.interop.megatron_torch.pickle_reader import NAMESPACE
from megatron.interop.megatron_torch.stored_values import Record
from megatron.interop.megatron_torch.torch_file import TorchFile
from megatron.interop.torch_dist.bucket_states import GROUP_PREFIX
from megatron.interop.torch_dist.folder_files import COMMON_FILE
from megatron.interop.torch_dist.stored_metadata import StoredMetadata

Complete = Callable[[Any, TorchFile], Any]
"""Makes of a file's value one that needs the file no more."""

_FIRST_GROUP = re.compile(r"(?:chained_0\.)?" + re.escape(GROUP_PREFIX) + r"0\.(optimizer|grad_scaler)/shard_0_1")
_RNG_STATE = re.compile(r"rng_state/shard_(\d+)\.(\d+)_\d+\.\d+")


def read_common(folder: Path) -> dict[str, Any]:
    """Return the values of ``common.pt``, its tensors read.

    Raises:
        DamagedCheckpointError: the file is missing or damaged.
        CheckpointError: it holds something else, or records no ``args``.
    """
    file = TorchFile(folder / COMMON_FILE)
    try:
        values = file.with_tensors(file.value)
    finally:
        file.close()
    if not isinstance(values, dict) or not isinstance(values.get("args"), Record) or values["args"].kind != NAMESPACE:
        raise CheckpointError(f"{file.path} records no args: what model was saved cannot be told")
    return values


def recorded_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration that ``args`` of a folder tell.

    Raises:
        CheckpointError: the file is damaged, or holds something else.
    """
    return config_of_arguments(read_common(folder)["args"].attributes)


def number(value: Any) -> Any:
    """Return the number that a tensor of one element holds; another value as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def with_optimizer_objects(common: Mapping[str, Any], metadata: StoredMetadata) -> dict[str, Any]:
    """Return the shared values with what the distributed optimizer saved apart of each model-parallel rank.

    The step and the loss scale are the same on all of them: the first one's are taken.
    """
    values = dict(common)
    if isinstance(values.get("optimizer"), Mapping) and 0 in values["optimizer"]:
        values["optimizer"] = values["optimizer"][0]  # experts have another
    for key in metadata.objects:
        match = _FIRST_GROUP.fullmatch(key)
        if match is not None:
            values["optimizer"] = {**(values.get("optimizer") or {}), match[1]: read_object(metadata, key)}
    return values


def _with_tensors(value: Any, file: TorchFile) -> Any:
    return file.with_tensors(value)


def read_random_states(metadata: StoredMetadata, complete: Complete = _with_tensors) -> dict[tuple[int, int], Any]:
    """Return what each model-parallel rank stored of its streams of random numbers, by (tensor, pipeline) rank.

    ``complete`` makes of a file's value what is returned; by default its tensors are read.

    Raises:
        DamagedCheckpointError: an entry is damaged.
    """
    found = {}
    for key in metadata.objects:
        match = _RNG_STATE.fullmatch(key)
        if match is not None:
            found[int(match[2]), int(match[1])] = read_object(metadata, key, complete)
    return found


def read_object(metadata: StoredMetadata, key: str, complete: Complete = _with_tensors) -> Any:
    """Return a stored object, completed: by default its tensors are read.

    Raises:
        DamagedCheckpointError: the entry is missing or damaged.
    """
    file = metadata.objects[key].open()
    try:
        value = complete(file.value, file)
    finally:
        file.close()
    if not isinstance(value, list) or len(value) != 1:
        raise DamagedCheckpointError(f"{file.path}: the entry of {key} holds no object")
    return value[0]
