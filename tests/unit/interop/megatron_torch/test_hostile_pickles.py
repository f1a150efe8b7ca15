"""What a pickle may ask for is bounded: each of these once ended the process, never ended, or filled the memory."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from megatron.checkpoint.formats.megatron.torch_file_reader import TorchFile
from megatron.core.errors import DamagedCheckpointError
from tests.harness.bounded import bad_cases

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
    "lists doubled": (DOUBLED_LISTS, "repeat each other without end"),
    "a list in itself": (IN_ITSELF, "a value that holds itself"),
    "deep lists": (DEEP, "nest more than 100 deep"),
    "a million sets": (SETS, " operations"),
    "400,000 objects": (OBJECTS, " operations"),
    "a text copied 3000 times": (COPIES, "bytes of memory"),
    "a shape beyond 64 bits": (LARGE_SHAPE % (HUGE + HUGE), "a tensor of shape"),
    "a shape of 2^62 and 0": (LARGE_SHAPE % (HUGE + b"K\x02"), "a tensor of shape"),
    "a bytes object of 8 EiB": (b"\x8e" + b"\xff" * 7 + b"\x7f.", "not a whole file"),
    "a number that is a text of 5000 digits": (b"I" + b"9" * 5000 + b"\n.", "not a whole file"),
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
