"""The index file: what it keeps, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.index import (
    CheckpointIndex,
    StoredFile,
    StoredShard,
    StoredTensor,
    check_run_state,
    read_index,
    write_index,
)
from megatron.core.dist_checkpointing.validation import check_geometry
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box


def make_index() -> CheckpointIndex:
    shard = StoredShard(Box((0, 2), (3, 4)), "shard_00000.safetensors", "a[0:3,2:6]", 96, 48, "0badf00d")
    return CheckpointIndex(
        tensors={
            "a": StoredTensor("a", (3, 6), "float32", (shard,)),
            "none": StoredTensor("none", (0,), "int64", ()),
        },
        files={"shard_00000.safetensors": StoredFile(144, 96, "12345678")},
        common={"iteration": 12, "loss": 0.1, "list": [1, 2.5e-310], "text": "ü → x", "nothing": None},
    )


def test_round_trip(tmp_path: Path) -> None:
    write_index(tmp_path, make_index())
    assert read_index(tmp_path) == make_index()


def test_keys_that_are_numbers_become_text_and_stay_intact(tmp_path: Path) -> None:
    write_index(tmp_path, CheckpointIndex({}, {}, {"groups": {2: "a", 10: "b"}}))
    found = read_index(tmp_path)
    assert found.is_intact
    assert found.common == {"groups": {"2": "a", "10": "b"}}


def test_a_changed_value_is_noticed(tmp_path: Path) -> None:
    write_index(tmp_path, make_index())
    path = tmp_path / "index.json"
    path.write_text(path.read_text().replace('"iteration": 12', '"iteration": 13'))
    found = read_index(tmp_path)
    assert found.common["iteration"] == 13
    assert not found.is_intact


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": "x"}'])
def test_what_is_no_index_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
        read_index(tmp_path)


def test_missing_and_binary_files_are_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DamagedCheckpointError, match="not readable"):
        read_index(tmp_path)


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    write_index(tmp_path, make_index())
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format_version": 9}))
    with pytest.raises(CheckpointError, match="version 9 is newer than 2") as caught:
        read_index(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_only_files_in_subfolders_have_the_newer_version(tmp_path: Path) -> None:
    index = make_index()
    write_index(tmp_path, index)
    flat = (tmp_path / "index.json").read_text()
    assert json.loads(flat)["format_version"] == 1
    (tmp_path / "index.json").write_text(flat.replace('"shard_00000', '"shards_00000/shard_00000'))
    nested = read_index(tmp_path)
    assert set(nested.files) == {f"shards_00000/{name}" if "00000" in name else name for name in index.files}
    write_index(tmp_path, nested)
    assert json.loads((tmp_path / "index.json").read_text())["format_version"] == 2
    assert read_index(tmp_path) == replace(nested, is_intact=True)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format_version": 1', '"format_version": 1e999'),
        ('"format_version": 1', f'"format_version": {DEEP}'),
        ('"iteration": 12', f'"iteration": {DEEP}'),
        ('"bytes": 144', '"bytes": Infinity'),
        ('"bytes": 144', '"bytes": 1e999'),
        ('"bytes": 144', '"bytes": NaN'),
        ('"bytes": 144', '"bytes": -1'),
        ('"bytes": 144', f'"bytes": {2**63}'),
        ('"start": 96', '"start": -96'),
        ('"shape": [3, 4]', '"shape": [3.5, 4]'),
        ('"shape": [3, 4]', f'"shape": [{2**70}, 4]'),
        ('"shape": [3, 6]', '"shape": [true, 6]'),
        ('"shape": [3, 6]', f'"shape": {DEEP}'),
        ('"file": "shard_00000.safetensors"', '"file": "/dev/zero"'),
        ('"file": "shard_00000.safetensors"', '"file": "../../etc/passwd"'),
        ('"file": "shard_00000.safetensors"', '"file": ".."'),
        ('"file": "shard_00000.safetensors"', '"file": "shards_00000/../shard_00000.safetensors"'),
        ('"file": "shard_00000.safetensors"', '"file": "shards_00000//shard_00000.safetensors"'),
        ('"file": "shard_00000.safetensors"', '"file": "../shard_00000.safetensors"'),
        ('"file": "shard_00000.safetensors"', '"file": 3'),
        ('"shard_00000.safetensors": {', '"../shard_00000.safetensors": {'),
    ],
)
def test_an_index_that_was_made_to_harm_is_damage(old: str, new: str, tmp_path: Path) -> None:
    write_index(tmp_path, make_index())
    path = tmp_path / "index.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
        read_index(tmp_path)


def test_the_largest_number_of_bytes_is_one(tmp_path: Path) -> None:
    index = make_index()
    files = {name: replace(file, num_bytes=2**63 - 1, header_bytes=0) for name, file in index.files.items()}
    write_index(tmp_path, replace(index, files=files))
    assert read_index(tmp_path).files == files


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_formats_up_to_the_newest_are_read(version: int, tmp_path: Path) -> None:
    write_index(tmp_path, make_index())
    path = tmp_path / "index.json"
    path.write_text(path.read_text().replace('"format_version": 1', f'"format_version": {version}'))
    if version <= 2:
        assert read_index(tmp_path) == make_index()
    else:
        with pytest.raises(CheckpointError, match="version 3 is newer than 2"):
            read_index(tmp_path)


def test_pieces_are_found_by_their_file() -> None:
    index = make_index()
    assert index.shards_of("shard_00000.safetensors") == list(index.tensors["a"].shards)
    assert index.shards_of("shard_00001.safetensors") == []


GEOMETRY = {"offset": (0, 2), "shape": (3, 4), "start": 96, "num_bytes": 48}


def with_piece(**changes: Any) -> CheckpointIndex:
    index, values = make_index(), GEOMETRY | changes
    (shard,) = index.tensors["a"].shards
    shard = replace(
        shard,
        box=Box(values["offset"], values["shape"]),
        start=values["start"],
        num_bytes=values["num_bytes"],
        file=values.get("file", shard.file),
    )
    shards = (shard,) * values.get("copies", 1)
    tensors = {"a": replace(index.tensors["a"], shards=shards, dtype=values.get("dtype", "float32"))}
    return replace(index, tensors=index.tensors | tensors)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"offset": (2,), "shape": (12,)}, "has 1 dimensions, but the tensor has 2"),
        ({"offset": (2,)}, "has 2 dimensions, but the tensor has 2"),
        ({"offset": (1, 2)}, "is outside of"),
        ({"offset": (0, 3)}, "is outside of"),
        ({"num_bytes": 44}, "with shape \\(3, 4\\) has 44 bytes"),
        ({"dtype": "float64"}, "with shape \\(3, 4\\) has 48 bytes"),
        ({"dtype": "float31"}, "has the dtype float31"),
        ({"start": 97}, "at byte 97 of shard_00000.safetensors, beyond its end"),
        ({"file": "shard_00001.safetensors"}, "at byte 96 of shard_00001.safetensors, beyond its end"),
        ({"copies": 2}, "shards of a overlap: 24 elements for a shape of"),
    ],
)
def test_pieces_that_fit_no_tensor_or_no_file_are_damage(changes: dict[str, Any], problem: str) -> None:
    check_geometry(Path("folder"), with_piece())
    with pytest.raises(DamagedCheckpointError, match=problem):
        check_geometry(Path("folder"), with_piece(**changes))


def test_tensors_that_share_bytes_are_damage() -> None:
    index = make_index()
    several = {name: replace(index.tensors["a"], name=name) for name in "abcd"}
    three = {name: several[name] for name in "abc"}
    check_geometry(Path("folder"), replace(index, tensors=three))
    with pytest.raises(DamagedCheckpointError, match="the shards need 192 bytes, but the files have 144 bytes"):
        check_geometry(Path("folder"), replace(index, tensors=several))


def test_an_index_that_is_a_pipe_is_damage(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(DamagedCheckpointError, match="is a pipe, not a file"):
        read_index(tmp_path)


RUN_STATE = {
    "progress": {"iteration": 3, "floating_point_operations_so_far": 1.5e20, "train_data": None},
    "config": {"model": {}},
    "layout": {},
    "optimizer": None,
    "scheduler": None,
    "tokenizer": "tokenizer",
}


def test_a_run_state_is_one() -> None:
    check_run_state(Path("folder"), RUN_STATE)
    begun = {"iteration": 0, "floating_point_operations_so_far": 0.0, "train_data": {}}
    check_run_state(Path("folder"), RUN_STATE | {"progress": begun, "tokenizer": None})
    check_run_state(Path("folder"), RUN_STATE | {"progress": {"iteration": 2**63 - 1}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("progress", []),
        ("progress", {"iteration": float("inf")}),
        ("progress", {"iteration": -1}),
        ("progress", {"iteration": 1.5}),
        ("progress", {"iteration": "3"}),
        ("progress", {"iteration": 2**63}),
        ("progress", {"iteration": True}),
        ("progress", {"iteration": 3.0}),
        ("progress", {"floating_point_operations_so_far": float("nan")}),
        ("progress", {"floating_point_operations_so_far": -1.0}),
        ("progress", {"train_data": 3}),
        ("config", None),
        ("config", {"model": 3}),
        ("layout", [1]),
        ("optimizer", "none"),
        ("tokenizer", "../../etc"),
        ("tokenizer", 3),
    ],
)
def test_values_that_no_run_records_are_damage(name: str, value: object) -> None:
    with pytest.raises(DamagedCheckpointError, match=name):
        check_run_state(Path("folder"), RUN_STATE | {name: value})


@pytest.mark.parametrize(("length", "shown"), [(78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 76 + "...")])
def test_a_long_value_is_cut_in_the_message(length: int, shown: str) -> None:
    with pytest.raises(DamagedCheckpointError) as caught:
        check_run_state(Path("folder"), RUN_STATE | {"layout": "x" * length})
    assert f"layout has the invalid value {shown}" in str(caught.value)
