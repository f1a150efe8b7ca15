"""The index file: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.index import (
    CheckpointIndex,
    StoredFile,
    StoredPiece,
    StoredTensor,
    read_index,
    write_index,
)
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box


def make_index() -> CheckpointIndex:
    piece = StoredPiece(Box((0, 2), (3, 4)), "shard_00000.safetensors", "a[0:3,2:6]", 96, 48, "0badf00d")
    return CheckpointIndex(
        tensors={
            "a": StoredTensor("a", (3, 6), "float32", (piece,)),
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
    with pytest.raises(CheckpointError, match="version 9 is newer than 1") as caught:
        read_index(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_the_folder_of_another_format_is_told_from_damage(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(
        CheckpointError, match=r"in the format torch_dist, which is not read here; write it with"
    ) as caught:
        read_index(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpointError)
