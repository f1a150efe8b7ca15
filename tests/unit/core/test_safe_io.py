"""Files and values that are not what they seem are refused at once, within bounds."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from megatron.checkpoint.formats.megatron.torch_file_reader import (
    PickleBudget,
    check_key,
    check_value,
    dict_of,
    hashable,
)
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
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json("[" * depth + "]" * depth)
        with pytest.raises(ValueError, match="nested too deeply"):
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
    with pytest.raises(OSError, match="it has 10 bytes, but at most 9 are supported"):
        read_plain_file(path, 9)
    with pytest.raises(OSError, match="it has 10 bytes, but at most 9 are supported"):
        read_plain_text(path, 9)
    with open(path, "wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(OSError, match="it has 268435457 bytes, but at most 268435456 are supported"):
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


class Record:
    arguments: tuple[object, ...] = ()
    attributes: tuple[object, ...] = ()


@pytest.mark.parametrize(("repeats", "is_rejected"), [(30, False), (60, True)])
def test_numbers_of_a_list_that_is_repeated_count_each_time(repeats: int, is_rejected: bool) -> None:
    value = [[*range(30_000)]] * repeats
    if is_rejected:
        with pytest.raises(ValueError, match="values refer to each other in an endless cycle"):
            check_value(value, Record)
    else:
        check_value(value, Record)


def test_memory_is_bounded_by_what_was_read() -> None:
    """All of 600 MiB and 32 bytes for each byte of the pickle may be asked for, and no byte more."""
    budget = PickleBudget()
    budget.spend((600 << 20) + 32 * 1000, 1000)
    budget.spend(32, 1001)
    with pytest.raises(ValueError, match="its first 1001 bytes need 629177633 bytes of memory"):
        budget.spend(1, 1001)


def test_operations_are_bounded_by_what_was_read() -> None:
    """There may be 250,000 operations, and one more for each 1.8 bytes of the pickle."""
    budget = PickleBudget()
    budget.operations = 249_999
    budget.begin(7, 0)
    budget.operations += 9
    budget.begin(7, 18)
    with pytest.raises(ValueError, match="its first 18 bytes have 250011 pickle operations"):
        budget.begin(7, 18)
    assert budget.spent == 14


def test_items_that_are_copied_take_32_bytes_each() -> None:
    budget = PickleBudget()
    budget.spend_items(["abc", b"ab", [1], (1, 2), {1: 2}, {1}, 5, None], 0)
    assert budget.spent == 32 * 10


@pytest.mark.parametrize("key", [(*range(64),), ((*range(62),), ()), "a" * 1000, 5])
def test_keys_of_64_parts_are_hashed_and_larger_ones_are_not(key: object) -> None:
    check_key(key)
    assert list(hashable([key])) == [key]
    assert dict_of([key, 1, "b", 2]) == {key: 1, "b": 2}
    if isinstance(key, tuple):
        for larger in ((*key, 1), (*key[:-1], (key[-1],))):
            with pytest.raises(ValueError, match="a key of more than 64 parts"):
                dict_of([larger, 1])


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_values_nest_100_deep_at_most() -> None:
    check_value(nested(100), Record)
    # Parts that are done already count with their depth.
    deep = nested(99)
    check_value([deep, [[], deep][1]], Record)
    with pytest.raises(ValueError, match="values are nested more than 100 deep"):
        check_value(nested(101), Record)
    with pytest.raises(ValueError, match="values are nested more than 100 deep"):
        check_value([[[deep]], deep], Record)


def test_a_cyclic_value_is_rejected_and_a_repeated_one_is_not() -> None:
    part: list[object] = [1]
    check_value([part, part, (part, {"a": part})], Record)
    part.append([part])
    with pytest.raises(ValueError, match="a value that contains itself"):
        check_value(part, Record)


def test_what_a_record_holds_is_walked_through() -> None:
    record = Record()
    record.attributes = (record,)
    with pytest.raises(ValueError, match="a value that contains itself"):
        check_value([record], Record)
    check_value({"a": Record()}, Record)


@pytest.mark.parametrize(("extra", "is_rejected"), [(0, False), (1, True)])
def test_parts_are_counted_each_time_that_they_occur(extra: int, is_rejected: bool, monkeypatch) -> None:
    """A value may have so many parts, and 64 times the containers and the parts of its own."""
    free = 1000
    monkeypatch.setattr("megatron.checkpoint.formats.megatron.torch_file_reader._FREE_PARTS", free)
    # The outer list of n times the inner one: 1 + n + n * (1 + len(inner)), of at most free + 64 * (1 + n).
    num_times = 10
    inner = [0] * ((free + 64 * (1 + num_times) - 1 - num_times) // num_times - 1)
    spare = free + 64 * (1 + num_times) - (1 + num_times + num_times * (1 + len(inner)))
    value = [inner] * num_times
    monkeypatch.setattr("megatron.checkpoint.formats.megatron.torch_file_reader._FREE_PARTS", free - spare - extra)
    if is_rejected:
        with pytest.raises(ValueError, match="values refer to each other in an endless cycle"):
            check_value(value, Record)
    else:
        check_value(value, Record)
