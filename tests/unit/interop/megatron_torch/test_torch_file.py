"""Files that torch wrote, of both of its formats, are read in place; damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_file_reader import TorchFile
from megatron.core.errors import CheckpointError, DamagedCheckpointError

VALUES = {
    "half": torch.arange(24.0).view(2, 3, 4).half(),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "part": torch.arange(40.0)[7:19].view(3, 4),
    "bfloat": torch.arange(5.0).bfloat16(),
    "step": torch.tensor(5.0),
    "state": torch.arange(9, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "number": 3,
}


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
def test_every_tensor_is_what_was_saved(is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save(VALUES, path, _use_new_zipfile_serialization=is_zip)
    file = TorchFile(path)
    for name, values in VALUES.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(file.view(file.value[name]), values), name
            assert file.value[name].dtype is values.dtype
    assert file.value["number"] == 3
    for key in file.places:
        file.check_storage(key)


def test_a_view_of_a_view_in_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    whole = torch.arange(30.0)
    torch.save([whole, whole[4:10], whole[10:]], path, _use_new_zipfile_serialization=False)
    file = TorchFile(path)
    for found, values in zip(file.value, (whole, whole[4:10], whole[10:])):
        assert torch.equal(file.view(found), values)


def test_attributes_of_a_tensor_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    values = torch.nn.Parameter(torch.arange(6.0))
    values.shared = True  # type: ignore[attr-defined]
    torch.save({"parameter": values, "tensor": values.detach().requires_grad_()}, path)
    file = TorchFile(path)
    assert torch.equal(file.view(file.value["parameter"]), values.detach())
    assert torch.equal(file.view(file.value["tensor"]), values.detach())


class Malicious:
    """Pickle as a command."""

    def __reduce__(self) -> object:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
def test_a_file_that_would_run_something_is_refused_by_name(is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save({"model": VALUES, "args": Malicious()}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=rf"{path}: the file asks for posix.system"):
        TorchFile(path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_a_file_that_is_cut_short_is_damaged(is_zip: bool, share: float, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(1000.0)}, path, _use_new_zipfile_serialization=is_zip)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(DamagedCheckpointError, match=str(path)):
        TorchFile(path)


def test_a_flipped_byte_is_found_where_the_format_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save(VALUES, path)
    file = TorchFile(path)
    key = file.value["part"].storage.key
    with open(path, "r+b") as raw:
        raw.seek(file.places[key].start + 30)
        raw.write(b"\x55")
    with pytest.raises(DamagedCheckpointError, match=f"storage {key}"):
        TorchFile(path).check_storage(key)


def test_a_changed_number_in_the_pickle_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save({"iteration": 77}, path)
    content = path.read_bytes()
    assert content.count(b"K\x4d") == 1  # the operation that pushes 77
    path.write_bytes(content.replace(b"K\x4d", b"K\x4c"))
    with pytest.raises(DamagedCheckpointError, match="Bad CRC-32"):
        TorchFile(path)


def test_a_storage_that_is_not_there_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save(VALUES, path)
    key = TorchFile(path).value["part"].storage.key
    path.write_bytes(path.read_bytes().replace(f"/data/{key}".encode(), b"/data/x"))
    file = TorchFile(path)
    for use in (lambda: file.check_storage(key), lambda: file.view(file.value["part"])):
        with pytest.raises(DamagedCheckpointError, match=f"the values of storage {key} are missing"):
            use()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no zip", b"\x80\x02}."])
def test_another_file_is_damaged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=str(path)):
        TorchFile(path)


def test_a_missing_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        TorchFile(tmp_path / "values.pt")
