"""Files that are no files, and JSON that goes on and on: refused at once."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from megatron.core.safe_io import is_plain_name, open_plain_file, parse_json, read_plain_file, read_plain_text
from tests.harness.recorded_calls import record_opened


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("ü")
    (tmp_path / "link").symlink_to("file")
    assert read_plain_text(tmp_path / "link") == "ü"


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert len(read_plain_file(tmp_path / "file")) == 1000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "link to a device"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    opened = record_opened(monkeypatch)
    with pytest.raises(OSError, match=r"not a file|No such device"):
        open_plain_file(path)
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_json_has_a_depth() -> None:
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for depth in (65, 900, 100_000):
        with pytest.raises(ValueError, match="nests too deeply"):
            parse_json("[" * depth + "]" * depth)
        with pytest.raises(ValueError, match="nests too deeply"):
            parse_json('{"a":' * depth + "1" + "}" * depth)
    assert parse_json("[" * 64 + "]" * 64)
    with pytest.raises(json.JSONDecodeError):
        parse_json("")


@pytest.mark.parametrize("name", ["", ".", "..", "/dev/zero", "../../etc/passwd", "a/b", "a\\b", "a\0", None, 3])
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_plain_name(name)
    assert is_plain_name("shard_00000.safetensors")


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_plain_file(path, 10) == b"0123456789"
    with open_plain_file(path) as file:
        assert file.read(1) == b"0"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 1, "no more is read than is asked for"
    with pytest.raises(OSError, match="it has 10 bytes, and 9 are read at most"):
        read_plain_file(path, 9)
    with pytest.raises(OSError, match="it has 10 bytes, and 9 are read at most"):
        read_plain_text(path, 9)
    with open(path, "wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(OSError, match="it has 268435457 bytes, and 268435456 are read at most"):
        read_plain_file(path)


@pytest.mark.parametrize(("kind", "words"), [("folder", "a folder"), ("pipe", "a pipe"), ("/dev/null", "a device")])
def test_what_is_no_file_is_named(kind: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match=f"is {words}, not a file"):
        open_plain_file(path)
