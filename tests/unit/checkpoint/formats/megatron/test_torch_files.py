"""Files that torch wrote or could have written: read in place, never run, bounded, and written piece by piece."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.formats.megatron import torch_file_writer
from megatron.checkpoint.formats.megatron.torch_file_reader import (
    GlobalName,
    StorageKey,
    StoredArray,
    TorchFile,
    read_pickle,
)
from megatron.checkpoint.formats.megatron.torch_file_writer import (
    PlannedTensor,
    TorchFileWriter,
    contiguous_runs,
    given_tensor,
    namespace,
    plan_torch_file,
)
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box
from tests.harness.bounded import bad_cases

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
    with pytest.raises(CheckpointError, match=rf"{path}: the file requests posix.system"):
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


PATH = Path("some") / "model_optim_rng.pt"


def read(data: bytes) -> Any:
    return read_pickle(data, PATH, lambda description: StorageKey(str(description), torch.float32, 1))


class Reduced:
    """Pickle as a call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_a_call_of_a_function_is_refused_and_not_made(protocol: int, tmp_path: Path) -> None:
    victim = tmp_path / "made"
    with pytest.raises(CheckpointError, match=r"some/model_optim_rng.pt: the file requests posix.mkdir"):
        read(pickle.dumps({"model": Reduced(os.mkdir, str(victim))}, protocol))
    assert not victim.exists()


@pytest.mark.parametrize(
    "function",
    [eval, getattr, __import__, open, pickle.loads, torch.load, np.load, OrderedDict.fromkeys, torch.nn.Linear],
)
def test_nothing_else_is_on_the_list(function: Any) -> None:
    with pytest.raises(CheckpointError, match="the file requests"):
        read(pickle.dumps(Reduced(function, "x"), 2))


@pytest.mark.parametrize("opcode", ["INST", "OBJ", "NEWOBJ_EX", "EXT1", "PERSID"])
def test_other_ways_to_make_an_object_are_refused(opcode: str) -> None:
    programs = {
        "INST": b"(S'x'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'x'\no.",
        "NEWOBJ_EX": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pstorage\n.",
    }
    with pytest.raises(CheckpointError):
        read(programs[opcode])


def test_allowed_names_are_given_no_attributes() -> None:
    # BUILD on a class would set its attributes for the whole process.
    with pytest.raises(CheckpointError, match="attributes to be set"):
        read(b"\x80\x02cargparse\nNamespace\n}X\x01\x00\x00\x00aK\x01sb.")


def test_a_name_is_not_called_through_the_memo() -> None:
    with pytest.raises(CheckpointError, match="a call of"):
        read(b"\x80\x02X\x01\x00\x00\x00a)R.")


def test_what_megatron_pickles_is_read() -> None:
    values = {
        "args": argparse.Namespace(lr=1e-3, dtype=torch.bfloat16, layers=[1, 2], none=None, on=True),
        "enum": signal.SIGTERM,
        "state": OrderedDict(a=(1, -5, 2**40), b="text", c=b"\x00\xff"),
        "rng": (3, tuple(range(5)), None),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        (torch.float32, torch.bfloat16): {1.5},
    }
    found = read(pickle.dumps(values, 2))
    assert found["args"].kind == GlobalName("argparse", "Namespace")
    assert found["args"].attributes == vars(values["args"])
    assert found["enum"].kind == GlobalName("signal", "Signals")
    assert found["enum"].arguments == (15,)
    assert found["state"] == values["state"]
    assert isinstance(found["state"], OrderedDict)
    assert found["rng"] == values["rng"]
    assert found[torch.float32, torch.bfloat16] == {1.5}
    array = found["array"]
    assert isinstance(array, StoredArray)
    assert np.array_equal(np.frombuffer(array.data, array.dtype).reshape(array.shape), values["array"])
    backend = read(b"\x80\x02cmegatron.core.transformer.enums\nAttnBackend\nK\x05\x85R.")
    assert (str(backend.kind), backend.arguments) == ("megatron.core.transformer.enums.AttnBackend", (5,))


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b"\x80\x02K", b"\x80\x02]K\x01.."[:4], b"\x80\x02a.", b"\x80\x02h\x07."]
)
def test_what_is_no_pickle_is_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises(ValueError):
        read(data)


def test_a_tensor_beyond_its_storage_is_refused() -> None:
    program = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(X\x01\x00\x00\x00sQK\x00K\x02\x85K\x01\x85\x89"
        b"ccollections\nOrderedDict\n)RtR."
    )
    with pytest.raises(ValueError, match=re.escape("extends beyond its storage of 1 values")):
        read(program)


def test_a_tensor_with_attributes_is_the_tensor() -> None:
    tensor = torch.zeros(3)
    tensor.shared = True  # type: ignore[attr-defined]
    # As half-precision optimizers have them; the storage's place is all that is left of it here.
    rebuild, (inner, kind, arguments, state) = tensor.__reduce_ex__(2)
    assert rebuild is torch._tensor._rebuild_from_type_v2
    assert (kind, state) == (torch.Tensor, {"shared": True})
    program = pickle.dumps(Reduced(rebuild, eval, kind, ("1",), state), 2)
    with pytest.raises(CheckpointError, match="eval"):
        read(program)
    assert inner is torch._utils._rebuild_tensor_v2
    assert len(arguments) == 6


NESTED_KEY = b"}q\x00h\x00)" + b"\x85" * 200_000 + b"K\x01s."
DOUBLED = b"Nq\x000" + b"h\x00h\x00\x86q\x000" * 60 + b"h\x00"
DOUBLED_IN_SET = b"\x8f(" + DOUBLED + b"\x90."
DOUBLED_AS_KEY = b"}" + DOUBLED + b"K\x01s."
DOUBLED_IN_ORDER = b"ccollections\nOrderedDict\n]" + DOUBLED + b"K\x01\x86a\x85R."
DOUBLED_LISTS = b"]q\x00" + b"]h\x00ah\x00aq\x00" * 60 + b"."
IN_ITSELF = b"]q\x00h\x00a."
DEEP = b"]" * 20_000 + b"a" * 19_999 + b"."
SETS = b"(" + b"\x8f" * 1_000_000 + b"l."
OBJECTS = b"(ccollections\nOrderedDict\nq\x00)R" + b"h\x00)R" * 400_000 + b"l."
COPIES = (
    b"(X\x00\x00\x10\x00"
    + b"x" * (1 << 20)
    + b"q\x00"
    + b"c_codecs\nencode\nq\x01"
    + (b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 3000)
    + b"l."
)
LARGE_SHAPE = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00"
    b"\x00cpuK\x01tQK\x00(%bK\x00t(K\x01K\x01K\x01t\x89ccollections\nOrderedDict\n)RtR."
)
HUGE = b"\x8a\x08" + (2**62).to_bytes(8, "little")
HOSTILE = {
    "nested tuples as a key": (NESTED_KEY, "a key of more than 64 parts"),
    "tuples doubled in a set": (DOUBLED_IN_SET, "a key of more than 64 parts"),
    "tuples doubled as a key": (DOUBLED_AS_KEY, "a key of more than 64 parts"),
    "tuples doubled as a key of an ordered dictionary": (DOUBLED_IN_ORDER, "a key of more than 64 parts"),
    "lists doubled": (DOUBLED_LISTS, "refer to each other in an endless cycle"),
    "a list in itself": (IN_ITSELF, "a value that contains itself"),
    "deep lists": (DEEP, "nested more than 100 deep"),
    "a million sets": (SETS, " operations"),
    "400,000 objects": (OBJECTS, " operations"),
    "a text copied 3000 times": (COPIES, "bytes of memory"),
    "a shape beyond 64 bits": (LARGE_SHAPE % (HUGE + HUGE), "a tensor of shape"),
    "a shape of 2^62 and 0": (LARGE_SHAPE % (HUGE + b"K\x02"), "a tensor of shape"),
    "a bytes object of 8 EiB": (b"\x8e" + b"\xff" * 7 + b"\x7f.", "not a complete torch file"),
    "a number that is a text of 5000 digits": (b"I" + b"9" * 5000 + b"\n.", "not a complete torch file"),
}


def write(path: Path, pickled: bytes, way: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", way) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled)
        archive.writestr("archive/byteorder", b"little", zipfile.ZIP_STORED)
        archive.writestr("archive/data/0", bytes(4), zipfile.ZIP_STORED)
    return path


@pytest.mark.full
def test_hostile_pickles_are_refused_soon_and_in_little_memory(tmp_path: Path) -> None:
    def refuse(number: int) -> None:
        name, (pickled, message) = list(HOSTILE.items())[number]
        with pytest.raises(DamagedCheckpointError) as caught:
            TorchFile(write(tmp_path / "model_optim_rng.pt", pickled))
        assert message in str(caught.value), (name, str(caught.value)[:500])
        assert len(str(caught.value)) < 1000

    assert bad_cases(refuse, len(HOSTILE)) == []


def test_files_before_the_zip_format_have_the_same_bounds(tmp_path: Path) -> None:
    def refuse(number: int) -> None:
        path = tmp_path / "model_optim_rng.pt"
        path.write_bytes(b"\x80\x02" + (DOUBLED_AS_KEY, DOUBLED_LISTS, DEEP, b"\x8e" + b"\xff" * 7 + b"\x7f.")[number])
        with pytest.raises(DamagedCheckpointError):
            TorchFile(path)

    assert bad_cases(refuse, 4) == []


def test_a_deflated_pickle_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    path = write(tmp_path / "model_optim_rng.pt", b"N" * (1 << 25) + b".", zipfile.ZIP_DEFLATED)

    def refuse(_: int) -> None:
        with pytest.raises(DamagedCheckpointError, match=r"data\.pkl is compressed"):
            TorchFile(path)

    assert bad_cases(refuse, 1) == []


def write_in_pieces(path: Path) -> dict[str, torch.Tensor]:
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
    check(path, write_in_pieces(path))


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
