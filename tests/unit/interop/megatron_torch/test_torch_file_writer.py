"""The files that are written piece by piece are those that torch and zip programs read."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.megatron import torch_file_writer
from megatron.checkpoint.formats.megatron.torch_file_reader import TorchFile
from megatron.checkpoint.formats.megatron.torch_file_writer import (
    PlannedTensor,
    TorchFileWriter,
    contiguous_runs,
    given_tensor,
    namespace,
    plan_torch_file,
)
from megatron.core.sharding import Box


def write(path: Path) -> dict[str, torch.Tensor]:
    """Write three tensors out of order, by two writers, and return what they must hold."""
    a, b, step = PlannedTensor(torch.float32, (6, 5)), PlannedTensor(torch.bfloat16, (70,)), torch.tensor(4.0)
    value = {"args": namespace({"x": 1}), "state": OrderedDict(a=a, b=b, step=given_tensor(step), none=None)}
    plan, same_plan = plan_torch_file(path, value), plan_torch_file(path, value)
    whole, rows = torch.randn(6, 5), torch.randn(4, 6).bfloat16()
    writer = TorchFileWriter(plan, create=True)
    writer.write_box(a, (6, 5), 0, Box((3, 0), (3, 5)), whole[3:])
    writer.write_box(a, (6, 5), 0, Box((0, 0), (3, 2)), whole[:3, :2])
    other = TorchFileWriter(same_plan, create=False)
    other.write_box(a, (6, 5), 0, Box((0, 2), (3, 3)), whole[:3, 2:])
    other.write_box(b, (4, 6), 10, Box((1, 0), (3, 6)), rows[1:])
    other.close()
    writer.finish()
    writer.close()
    flat = torch.zeros(70, dtype=torch.bfloat16)
    flat[16:34] = rows[1:].reshape(-1)
    return {"a": whole, "b": flat, "step": step}


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name.partition("/")[0] for name in archive.namelist()} == {path.stem}
    loaded = torch.load(path, weights_only=False)
    mapped = torch.load(path, weights_only=False, mmap=True)
    ours = TorchFile(path)
    assert vars(loaded["args"]) == {"x": 1}
    assert loaded["state"]["none"] is None
    for name, values in expected.items():
        assert torch.equal(loaded["state"][name], values)
        assert torch.equal(mapped["state"][name], values)
        assert torch.equal(ours.view(ours.value["state"][name]), values)
        assert ours.places[ours.value["state"][name].storage.key].start % 64 == 0
    for key in ours.places:
        ours.check_storage(key)


def test_torch_and_zip_read_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    check(path, write(path))


def test_files_beyond_four_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    huge = PlannedTensor(torch.uint8, (5 * 1024**3,))
    last = PlannedTensor(torch.uint8, (3,))
    plan = plan_torch_file(path, [huge, last])
    first, second = plan.entries[:2]
    assert second.data_start > 2**32
    header = torch_file_writer._local_header(first)
    assert header.count((5 * 1024**3).to_bytes(8, "little")) == 2
    assert len(header) == first.data_start - first.header_start
    directory = torch_file_writer._directory(plan.entries, plan.end)
    assert b"PK\x06\x06" in directory
    assert b"PK\x06\x07" in directory


@pytest.mark.parametrize(
    ("shape", "box", "runs"),
    [
        ((4, 5), Box((0, 0), (4, 5)), [(0, 20)]),
        ((4, 5), Box((1, 0), (2, 5)), [(5, 10)]),
        ((4, 5), Box((1, 2), (2, 3)), [(7, 3), (12, 3)]),
        ((7,), Box((2,), (3,)), [(2, 3)]),
        ((), Box((), ()), [(0, 1)]),
        ((2, 3, 4), Box((0, 1, 0), (2, 2, 4)), [(4, 8), (16, 8)]),
    ],
)
def test_runs_of_a_box(shape: tuple[int, ...], box: Box, runs: list[tuple[int, int]]) -> None:
    assert list(contiguous_runs(shape, box)) == runs
