"""Opening safetensors files with and without an index, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.formats.huggingface.weight_files import WeightFiles, WeightInfo, plan_files, write_weights
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box

VALUES = {
    "a": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c": torch.tensor(3.5, dtype=torch.float64),
}
NESTED = '{"weight_map": {}, "a": ' + "[" * 900 + "]" * 900 + "}"


def save_two_files(folder: Path) -> dict[str, str]:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in weight_map.items():
        save_file({name: VALUES[name]}, folder / file, metadata={"format": "pt"})
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_boxes_of_a_single_file(tmp_path: Path) -> None:
    save_file(VALUES, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("a", Box((1, 2), (3, 4))), VALUES["a"][1:4, 2:6])
    assert files.read("a", Box((1, 2), (3, 4))).is_contiguous()
    assert torch.equal(files.read("b", Box((0,), (6,))), VALUES["b"])
    assert torch.equal(files.read("c", Box((), ())), VALUES["c"])
    assert files.bytes_read == 2 * 48 + 12 + 8
    assert files.names_in("model.safetensors") == ("c", "a", "b")
    files.close()
    assert torch.equal(files.read("b", Box((4,), (2,))), VALUES["b"][4:])


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_two_files(tmp_path)
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("b", Box((2,), (3,))), VALUES["b"][2:5])
    assert sorted(files.entries) == ["a", "b"]


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "pytorch_model.bin"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, file: str) -> None:
    write_index(tmp_path, {"a": file})
    with pytest.raises(CheckpointError, match="in the same folder is expected"):
        WeightFiles(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    weight_map = save_two_files(tmp_path)
    write_index(tmp_path, weight_map | {"d": weight_map["a"]})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors lacks d"):
        WeightFiles(tmp_path)
    save_file({"b": VALUES["b"], "e": VALUES["a"]}, tmp_path / weight_map["b"])
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="does not list e"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', NESTED])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        WeightFiles(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    weight_map = save_two_files(tmp_path)
    (tmp_path / weight_map["b"]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        WeightFiles(tmp_path)


def test_files_without_their_index_are_named(tmp_path: Path) -> None:
    save_two_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"only model-00001-of-00002\.safetensors, .*index\.json too"):
        WeightFiles(tmp_path)


def test_a_pointer_of_git_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("kept", [3, 50, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(VALUES, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as a safetensors file"):
        WeightFiles(tmp_path)


def test_pickled_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: pickles can run code") as caught:
        WeightFiles(tmp_path)
    assert "\n" not in str(caught.value)


def test_written_files_are_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    values = VALUES | {"layer.ü": torch.ones(2, 3, dtype=torch.float16), "none": torch.empty(0, 4)}
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    weights = {name: WeightInfo(tuple(value.shape), value.dtype) for name, value in values.items()}
    ((name, planned),) = plan_files(weights, max_file_bytes=1000).items()
    assert name == "model.safetensors"
    write_weights(tmp_path / "ours", planned.tensors, planned.metadata, weights, values.__getitem__)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_files_are_filled_up_to_the_limit(tmp_path: Path) -> None:
    weights = {name: WeightInfo((size,), torch.float32) for name, size in {"a": 3, "b": 2, "c": 9, "d": 1}.items()}
    planned = plan_files(weights, max_file_bytes=20)
    assert {name: file.tensors for name, file in planned.items()} == {
        "model-00001-of-00003.safetensors": ("a", "b"),
        "model-00002-of-00003.safetensors": ("c",),
        "model-00003-of-00003.safetensors": ("d",),
    }
