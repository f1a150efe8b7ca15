"""A pickle is read, never run: what it names is on the list, or the file is refused by that name."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_file_reader import GlobalName, StorageKey, StoredArray, read_pickle
from megatron.core.errors import CheckpointError

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
    with pytest.raises(CheckpointError, match=r"some/model_optim_rng.pt: the file asks for posix.mkdir"):
        read(pickle.dumps({"model": Reduced(os.mkdir, str(victim))}, protocol))
    assert not victim.exists()


@pytest.mark.parametrize(
    "function",
    [eval, getattr, __import__, open, pickle.loads, torch.load, np.load, OrderedDict.fromkeys, torch.nn.Linear],
)
def test_nothing_else_is_on_the_list(function: Any) -> None:
    with pytest.raises(CheckpointError, match="the file asks for"):
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
    with pytest.raises(ValueError, match=re.escape("reaches beyond its 1 stored values")):
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
