"""torch_dist files: metadata that do not fit, and forms of the state that megatron-core no longer writes."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource, read_object
from megatron.checkpoint.formats.megatron.torch_dist_writer import ChunkFile, ChunkPlace, build_metadata
from megatron.checkpoint.formats.megatron.torch_file_writer import pickle_values
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box
from tests.harness.torch_loader import read_with_torch

SMALL = Path(__file__).parents[4] / "golden" / "torch_dist" / "fully_reshardable" / "iter_0000002"
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
        (
            move_first(relative_path="__7_0.distcp"),
            ("__7_0.distcp: No such file or directory; according to .* it contains embed"),
        ),
        (move_first(relative_path="../../secret"), "instead of a file name"),
        (move_first(offset=10**12), "ends within embedding.word_embeddings.weight"),
        (
            move_first(length=100),
            r"a chunk of embedding.word_embeddings.weight has shape \(24, 24\), but only 100 bytes",
        ),
        (move_first(offset=-1), "instead of sizes"),
        (lambda metadata: metadata.storage_data.clear(), "not valid checkpoint metadata"),
        (
            lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT], "size", torch.Size((48, 20))),
            "is outside of",
        ),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 7), "not valid checkpoint metadata"),
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
    with pytest.raises(CheckpointError, match=r"requests posix\.mkdir"):
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
    with pytest.raises(CheckpointError, match=r"an unsupported kind of model or optimizer: vision_model\.hnorm"):
        TorchDistSource(folder)


def test_values_of_other_shapes_than_the_args_say_are_refused(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"].ffn_hidden_size = 44
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"shape \[80, 24\] in the files, but \[88, 24\] according to its args"):
        TorchDistSource(folder)
    common["args"].num_layers = 10**9
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="contains 2 layers, but its args say 1000000000"):
        TorchDistSource(folder)
    del common["args"]
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="contains no args"):
        TorchDistSource(folder)


OLDER_SMALL = Path(__file__).parents[4] / "golden" / "torch_dist"
Chunks = Iterator[tuple[ChunkPlace, torch.Tensor]]


def rewrite(form: str, folder: Path, chunks: Chunks, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a small checkpoint anew with these chunks instead of the optimizer's tensors."""
    origin = OLDER_SMALL / form / "iter_0000002"
    metadata = read_metadata(origin)
    folder.mkdir()
    shutil.copy(origin / "common.pt", folder)
    with ChunkFile(folder / "__0_0.distcp") as file:
        for key in metadata.objects:
            file.append_object(key, read_object(metadata, key))
        for key, values in read_with_torch(origin).items():
            if not key.startswith("optimizer."):
                shape = tuple(values.shape)
                file.append_chunk(ChunkPlace(key, shape, Box((0,) * len(shape), shape)), values)
        for place, part in chunks:
            file.append_chunk(place, part)
    described = build_metadata(file.written)
    described.mcore_data = {key: {"nd_reformulated_orig_global_shape": shape} for key, shape in shapes.items()}
    (folder / ".metadata").write_bytes(pickle_values(described, lambda tensor: ""))
    return folder


def model_space(shapes: dict[str, tuple[int, ...]]) -> Chunks:
    """Yield every tensor as a grid of two cells along its rows, each flattened and cut at an odd place."""
    for key, values in read_with_torch(OLDER_SMALL / "fully_reshardable" / "iter_0000002").items():
        if not key.startswith("optimizer.state."):
            continue
        key, shape = key.replace(".param.", ".fp32_param."), tuple(values.shape)
        shapes[key] = shape
        rows = 1 if ".layers." in key else 0
        grid = tuple(size if dim < rows else 2 if dim == rows else 1 for dim, size in enumerate(shape))
        cell = tuple(size // count for size, count in zip(shape, grid))
        cut = math.prod(cell) // 3 | 1
        for place in product(*map(range, grid)):
            corner = tuple(index * size for index, size in zip(place, cell))
            flat = values[Box(corner, cell).slices].reshape(-1)
            for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
                box = Box((*place, start), (*(1 for _ in place), len(part)))
                yield ChunkPlace(key, (*grid, flat.numel()), box), part


def bucket_space(shapes: dict[str, tuple[int, ...]]) -> Chunks:
    """Yield every bucket as one row a data-parallel rank, padded at the end, cut at an odd place."""
    origin = OLDER_SMALL / "dp_reshardable" / "iter_0000002"
    for key, values in read_with_torch(origin).items():
        if key.startswith("optimizer.distributed."):
            row = -(-values.numel() // 128) * 64
            padded = torch.cat([values, torch.full((2 * row - values.numel(),), 9.0)])
            shapes[key] = (2 * row,)
            for rank, part in product(range(2), ((0, 77), (77, row - 77))):
                box = Box((rank, part[0]), (1, part[1]))
                yield ChunkPlace(key, (2, row), box), padded[rank * row + part[0] :][: part[1]]


@pytest.mark.parametrize(("form", "chunks_of"), [("fully_reshardable", model_space), ("dp_reshardable", bucket_space)])
def test_flattened_state_is_found(form: str, chunks_of: Callable[..., Chunks], tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    written = list(chunks_of(shapes))
    found = TorchDistSource(rewrite(form, tmp_path / "iter_0000002", iter(written), shapes))
    expected = TorchDistSource(OLDER_SMALL / "fully_reshardable" / "iter_0000002")
    assert len(expected.tensors) == 4 * 17
    assert [str(tensor) for tensor in compare_sources(expected, found) if not tensor.is_equal] == []


def test_cells_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    written = list(model_space(shapes))
    key = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    shapes[key] = (shapes[key][0] + 1, shapes[key][1])
    folder = rewrite("fully_reshardable", tmp_path / "iter_0000002", iter(written), shapes)
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(49, 24\) was flattened as \(2, 1, 576\)"):
        TorchDistSource(folder)


def test_buffers_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    written = [(place, values + (1 if place.key.endswith(".param") else 0)) for place, values in bucket_space(shapes)]
    folder = rewrite("dp_reshardable", tmp_path / "iter_0000002", iter(written), shapes)
    with pytest.raises(CheckpointError, match="does not match Megatron's layout"):
        TorchDistSource(folder)
