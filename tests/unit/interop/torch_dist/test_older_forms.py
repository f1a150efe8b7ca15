"""Forms of the distributed optimizer's state that megatron-core no longer writes: flattened before they were cut."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource, read_object
from megatron.checkpoint.formats.megatron.torch_dist_writer import ChunkFile, ChunkPlace, build_metadata
from megatron.checkpoint.formats.megatron.torch_file_writer import pickle_values
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from tests.harness.torch_loader import read_with_torch

SMALL = Path(__file__).parents[3] / "golden" / "torch_dist"
Chunks = Iterator[tuple[ChunkPlace, torch.Tensor]]


def rewrite(form: str, folder: Path, chunks: Chunks, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a small checkpoint anew with these chunks in the place of the optimizer's tensors."""
    origin = SMALL / form / "iter_0000002"
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
    for key, values in read_with_torch(SMALL / "fully_reshardable" / "iter_0000002").items():
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
    origin = SMALL / "dp_reshardable" / "iter_0000002"
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
    expected = TorchDistSource(SMALL / "fully_reshardable" / "iter_0000002")
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
    with pytest.raises(CheckpointError, match="do not lie as Megatron lays out"):
        TorchDistSource(folder)
