"""Tensors saved at one layout and loaded at others, bit by bit, and everything that must be refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import shard_reader
from megatron.core.dist_checkpointing.index import read_index, write_index
from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import ShardedTensor, from_spec, whole_tensor
from megatron.core.dist_checkpointing.validation import STRICTNESS, Misfits, Strictness
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.ranged_file import RangedFile, open_ranged
from megatron.core.sharding import Box, ParamSpec, Shard
from tests.unit.core.dist_checkpointing.toy import (
    SHAPES,
    all_ranks,
    assert_equal_tensors,
    global_values,
    save_tensors,
    toy_tensors,
)

STATE = describe_parallel_state(0, 1)
WORLD = STATE.world
SHARD = "shard_00000.safetensors"


def save(folder: Path, tensors: list[ShardedTensor], max_shard_bytes: int = 2**20) -> None:
    save_tensors(folder, tensors, {"iteration": 3}, STATE, max_shard_bytes)


def load(folder: Path, tensors: list[ShardedTensor], verify: bool = True, allow_cast: bool = False) -> int:
    index = load_index(folder, WORLD, verify)
    return load_tensors(folder, index, tensors, ["model."], STATE, verify, allow_cast).bytes_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [2**20, 40], ids=["whole", "cut"])
@pytest.mark.parametrize("source", [1, 2, 4])
@pytest.mark.parametrize("verify", [True, False])
def test_any_layout_loads_at_any_other(
    tmp_path: Path, source: int, max_shard_bytes: int, dtype: torch.dtype, verify: bool
) -> None:
    save(tmp_path, all_ranks(source, dtype=dtype), max_shard_bytes)
    for target in (1, 2, 4):
        for rank in range(target):
            tensors = toy_tensors(rank, target, dtype=dtype, filled=False)
            load(tmp_path, tensors, verify)
            assert_equal_tensors(tensors, toy_tensors(rank, target, dtype=dtype))


def test_the_vocabulary_is_stored_without_padding(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(4))
    stored = read_index(tmp_path).tensors["model.embedding.weight"]
    assert stored.global_shape == SHAPES["embedding.weight"]
    assert sum(shard.box.num_elements for shard in stored.shards) == 11 * 5


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, all_ranks(2))
    for file in (SHARD, "index.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_rank_reads_each_piece_once_and_only_what_it_needs(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(4))
    tensors = toy_tensors(1, 4, filled=False)
    needed = sum(shard.global_box.num_elements * 4 for tensor in tensors for shard in tensor.shards)
    assert load(tmp_path, tensors) == needed


def test_the_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    told: list[tuple[int, int]] = []
    index = load_index(tmp_path, WORLD)
    load_tensors(
        tmp_path,
        index,
        toy_tensors(0, 1, filled=False),
        ["model."],
        STATE,
        progress=lambda *counts: told.append(counts),
    )
    total = sum(shard.num_bytes for tensor in index.tensors.values() for shard in tensor.shards)
    assert told == sorted(told)
    assert told[0] != told[-1] == (total, total)


def test_several_local_tensors_are_parts_of_one(tmp_path: Path) -> None:
    values = global_values("x", (7, 5), torch.float32)
    # A flat range of a matrix, elements 3 to 27, as an optimizer's shard holds it: three boxes.
    boxes = [Box((0, 3), (1, 2)), Box((1, 0), (4, 5)), Box((5, 0), (1, 3))]
    rest = [Box((0, 0), (1, 3)), Box((5, 3), (1, 2)), Box((6, 0), (1, 5))]

    def part(box: Box, data: torch.Tensor) -> ShardedTensor:
        return from_spec(ParamSpec("model.x", (7, 5), (Shard(box, (0, 0)),)), data)

    save(tmp_path, [part(box, values[box.slices].clone()) for box in [*boxes, *rest]])
    targets = [torch.zeros(box.shape) for box in boxes]
    load(tmp_path, [part(box, target) for box, target in zip(boxes, targets)])
    assert torch.equal(torch.cat([target.view(-1) for target in targets]), values.view(-1)[3:28])
    whole = torch.zeros(7, 5)
    load(tmp_path, [whole_tensor("model.x", whole)])
    assert torch.equal(whole, values)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    save(tmp_path, [whole_tensor("model.s", torch.tensor(2.5)), whole_tensor("model.e", torch.empty(0, 3))])
    scalar = torch.tensor(0.0)
    load(tmp_path, [whole_tensor("model.s", scalar), whole_tensor("model.e", torch.empty(0, 3))])
    assert scalar.item() == 2.5


def test_every_misfit_is_listed_by_name(tmp_path: Path) -> None:
    save(tmp_path, [whole_tensor(f"model.{name}", torch.ones(4, 3)) for name in "abcd"])
    wanted = [
        whole_tensor("model.a", torch.zeros(4, 3)),
        whole_tensor("model.b", torch.zeros(5, 3)),
        whole_tensor("model.c", torch.zeros(4, 3, dtype=torch.bfloat16)),
        whole_tensor("model.new", torch.zeros(2)),
    ]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, wanted)
    _, _, problems = str(caught.value).partition(" does not match this run: ")
    assert problems.split("; ") == [
        "missing in the checkpoint: model.new",
        "unexpected in the checkpoint: model.d",
        "model.b: shape [4, 3] in the checkpoint, but [5, 3] in this run, model.c: dtype float32 in the "
        "checkpoint, but bfloat16 in this run",
    ]
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert not wanted[0].data.any()


def test_of_many_misfits_the_first_are_named_in_one_line(tmp_path: Path) -> None:
    save(tmp_path, [whole_tensor("model.a", torch.ones(4, 3))])
    wanted = [whole_tensor(f"model.{name}", torch.zeros(2)) for name in "bcdefgh"]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, wanted)
    assert "missing in the checkpoint: model.b, model.c, model.d, model.e and 3 more;" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: model\.b, model\.c, model\.d, model\.e;"):
        load(tmp_path, wanted[:4])
    assert "\n" not in str(caught.value)


def test_another_dtype_is_converted_where_that_is_asked_for(tmp_path: Path) -> None:
    values = global_values("x", (4, 3), torch.float32)
    save(tmp_path, [whole_tensor("model.a", values)])
    target = torch.zeros(4, 3, dtype=torch.bfloat16)
    load(tmp_path, [whole_tensor("model.a", target)], allow_cast=True)
    assert torch.equal(target, values.bfloat16())


def test_a_missing_box_is_named(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    index = read_index(tmp_path)
    proj = index.tensors["model.proj.weight"]
    write_index(
        tmp_path,
        replace(index, tensors={**index.tensors, "model.proj.weight": replace(proj, shards=proj.shards[:1])}),
    )
    with pytest.raises(CheckpointError, match=r"lacks model\.proj\.weight\[0:5,6:12\]"):
        load(tmp_path, toy_tensors(0, 1, filled=False))


def test_flipped_byte_anywhere_in_a_shard_is_found(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    path = tmp_path / SHARD
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        data = bytearray(whole)
        data[position] ^= 0x40
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=SHARD):
            load(tmp_path, toy_tensors(0, 1, filled=False))
    path.write_bytes(whole)
    load(tmp_path, toy_tensors(0, 1, filled=False))


def test_verification_can_be_turned_off(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    data = bytearray((tmp_path / SHARD).read_bytes())
    data[-1] ^= 1
    (tmp_path / SHARD).write_bytes(data)
    load(tmp_path, toy_tensors(0, 1, filled=False), verify=False)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    (tmp_path / SHARD).unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{SHARD}: No such file"):
        load(tmp_path, toy_tensors(0, 1, filled=False))


def test_tensor_taken_out_of_the_index_is_named_and_counts_as_damage(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    del content["tensors"]["model.norm.weight"]
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpointError, match=r"missing in the checkpoint: model\.norm\.weight"):
        load(tmp_path, toy_tensors(0, 1, filled=False))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: model\.norm\.weight"):
        load(tmp_path, toy_tensors(0, 1, filled=False), verify=False)


def test_no_file_is_a_pickle_or_an_archive(tmp_path: Path) -> None:
    save(tmp_path, all_ranks(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", SHARD]
    for path in tmp_path.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK"))
    sources = Path(__file__).parents[4] / "megatron"
    found = list((sources / "core" / "dist_checkpointing").glob("*.py"))
    assert found
    for source in found:
        text = source.read_text()
        assert "pickle" not in text.replace("picklable", ""), source
        assert "torch.load" not in text, source
        assert "torch.save" not in text, source


def test_a_load_closes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, all_ranks(2))
    opened: list[RangedFile] = []

    def open_and_keep(path: Path) -> RangedFile:
        opened.append(open_ranged(path))
        return opened[-1]

    monkeypatch.setattr(shard_reader, "open_ranged", open_and_keep)
    before = set(os.listdir("/proc/self/fd"))
    load(tmp_path, toy_tensors(0, 1, filled=False))
    assert len(opened) == 1
    assert set(os.listdir("/proc/self/fd")) <= before


def test_each_strictness_says_what_is_allowed_and_listed() -> None:
    assert {name: (s.allows_missing, s.allows_unexpected, s.lists_unexpected) for name, s in STRICTNESS.items()} == {
        "raise_all": (False, False, False),
        "raise_unexpected": (False, True, False),
        "assume_ok_unexpected": (False, True, False),
        "log_all": (True, True, True),
        "log_unexpected": (True, True, False),
        "return_all": (True, True, True),
        "return_unexpected": (True, True, False),
        "ignore_all": (True, True, False),
    }


@pytest.mark.parametrize(
    ("strictness", "problems"),
    [
        (Strictness(), ["missing in the checkpoint: a", "unexpected in the checkpoint: b", "c differs"]),
        (Strictness(allows_missing=True), ["unexpected in the checkpoint: b", "c differs"]),
        (Strictness(allows_unexpected=True), ["missing in the checkpoint: a", "c differs"]),
        (Strictness(allows_missing=True, allows_unexpected=True), ["c differs"]),
    ],
)
def test_a_difference_is_rejected_at_any_strictness(strictness: Strictness, problems: list[str]) -> None:
    assert Misfits(("a",), ("b",), ("c differs",)).problems(strictness) == problems
    assert Misfits((), (), ()).problems(strictness) == []
