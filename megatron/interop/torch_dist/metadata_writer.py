"""The files of this format that say what is in the others: ``.metadata``, ``common.pt`` and ``metadata.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.disk import sync_folder, write_text
from megatron.core.dist_checkpointing.mapping import dtype_of
from megatron.core.errors import CheckpointError
from megatron.interop.megatron_torch.pickle_writer import PlannedTensor, pickle_values
from megatron.interop.megatron_torch.torch_file_writer import TorchFileWriter, plan_torch_file
from megatron.interop.torch_dist.chunk_file import WrittenEntry
from megatron.interop.torch_dist.folder_files import BACKEND_FILE, COMMON_FILE, METADATA_FILE

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_shared_files(folder: Path, common: Any, written: Sequence[WrittenEntry]) -> None:
    """Complete a folder whose data files are on disk; ``.metadata`` comes last.

    Raises:
        CheckpointError: what was written does not make up whole tensors.
        OSError: a file cannot be written.
    """
    metadata = pickle_values(build_metadata(written), _no_tensor)
    write_text(folder / BACKEND_FILE, json.dumps(_BACKENDS))
    writer = TorchFileWriter(plan_torch_file(folder / COMMON_FILE, common), create=True)
    try:
        writer.finish()
    finally:
        writer.close()
    with open(folder / METADATA_FILE, "wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def build_metadata(written: Sequence[WrittenEntry]) -> Metadata:
    """Return what torch.distributed.checkpoint is to find, for everything that was written.

    Raises:
        CheckpointError: chunks of a tensor are missing, or are of several shapes or dtypes.
    """
    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for entry in written:
        info = _StorageInfo(entry.file, entry.start, entry.num_bytes)
        if entry.place is None or entry.dtype is None:
            described[entry.key] = BytesStorageMetadata()
            storage[MetadataIndex(entry.key)] = info
            continue
        place = entry.place
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        whole = described.setdefault(entry.key, TensorStorageMetadata(properties, torch.Size(place.shape), []))
        assert isinstance(whole, TensorStorageMetadata), entry.key
        if (whole.size, whole.properties.dtype) != (torch.Size(place.shape), properties.dtype):
            raise CheckpointError(f"{entry.key} was written with several shapes or dtypes; nothing was saved")
        offset = torch.Size(place.box.offset)
        whole.chunks.append(ChunkStorageMetadata(offset, torch.Size(place.box.shape)))
        storage[MetadataIndex(entry.key, offset)] = info
    for key, found in described.items():
        if isinstance(found, TensorStorageMetadata):
            held = sum(chunk.sizes.numel() for chunk in found.chunks)
            if held != found.size.numel():
                raise CheckpointError(f"the ranks hold {held} of the {found.size.numel()} values of {key}")
    return Metadata(described, storage_data=storage)


def _no_tensor(tensor: PlannedTensor) -> str:
    raise AssertionError("metadata hold no tensors")
