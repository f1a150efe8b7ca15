"""Metadata that do not fit the files beside them, or are no data, are refused in one line."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.core.errors import CheckpointError, DamagedCheckpointError

SMALL = Path(__file__).parents[3] / "golden" / "torch_dist" / "fully_reshardable" / "iter_0000002"
WEIGHT = "embedding.word_embeddings.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SMALL, tmp_path / SMALL.name))


def change(folder: Path, how: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def move_first(**fields: Any) -> Callable[[Metadata], None]:
    """Give the first chunk's place other values."""

    def how(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
        metadata.storage_data[index] = _StorageInfo(**{**vars(metadata.storage_data[index]), **fields})

    return how


def test_every_entry_has_its_place() -> None:
    metadata = read_metadata(SMALL)
    entry = metadata.tensors[WEIGHT]
    assert (entry.shape, entry.dtype, entry.original_shape) == ((48, 24), torch.bfloat16, None)
    assert [chunk.box.offset for chunk in entry.chunks] == [(0, 0), (24, 0)]
    assert {segment.path.suffix for _, segment in metadata.segments()} == {".distcp"}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (move_first(relative_path="__7_0.distcp"), "__7_0.distcp: No such file or directory; .* says it holds embed"),
        (move_first(relative_path="../../secret"), "in the place of a file's name"),
        (move_first(offset=10**12), "ends within embedding.word_embeddings.weight"),
        (move_first(length=100), r"a chunk of embedding.word_embeddings.weight of shape \(24, 24\) in 100 bytes"),
        (move_first(offset=-1), "in the place of sizes"),
        (lambda metadata: metadata.storage_data.clear(), "not the metadata of a checkpoint"),
        (
            lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT], "size", torch.Size((48, 20))),
            "is outside of",
        ),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 7), "not the metadata of a checkpoint"),
    ],
)
def test_metadata_that_lie_are_damage(folder: Path, how: Callable[[Metadata], None], message: str) -> None:
    change(folder, how)
    with pytest.raises(DamagedCheckpointError, match=message):
        read_metadata(folder)


def test_transformed_values_are_refused(folder: Path) -> None:
    change(folder, move_first(transform_descriptors=["zstd"]))
    with pytest.raises(CheckpointError, match="transformed"):
        read_metadata(folder)


class Malicious:
    """Pickle as a command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_of_the_pickle_is_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(mark)))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        read_metadata(folder)
    assert not mark.exists()


def test_another_model_than_that_of_the_args_is_refused(folder: Path) -> None:
    def without_norm(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["decoder.final_layernorm.weight"]

    change(folder, without_norm)
    with pytest.raises(CheckpointError, match=r"missing: model\.decoder\.final_layernorm\.weight"):
        TorchDistSource(folder)

    def with_more(metadata: Metadata) -> None:
        norm = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
        extra = dataclasses.replace(norm, fqn="vision_model.hnorm.weight")
        metadata.storage_data[extra] = metadata.storage_data[norm]
        metadata.state_dict_metadata[extra.fqn] = dataclasses.replace(
            metadata.state_dict_metadata[WEIGHT], chunks=metadata.state_dict_metadata[WEIGHT].chunks[:1]
        )

    shutil.copy(SMALL / ".metadata", folder)
    change(folder, with_more)
    with pytest.raises(CheckpointError, match=r"another kind of model, or of its optimizer: vision_model\.hnorm"):
        TorchDistSource(folder)


def test_values_of_other_shapes_than_the_args_say_are_refused(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"].ffn_hidden_size = 44
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"shape \[80, 24\] in the files, \[88, 24\] by its args"):
        TorchDistSource(folder)
    common["args"].num_layers = 10**9
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="names 2 layers; its args say 1000000000"):
        TorchDistSource(folder)
    del common["args"]
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="records no args"):
        TorchDistSource(folder)
