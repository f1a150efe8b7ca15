"""The native format as source and sink: every bit arrives, damage is named, memory stays small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.checkpoint_folder import detect_format
from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.formats.native import NativeSource, plan_files, write_native
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.index import read_index
from megatron.core.dist_checkpointing.planner import whole_tensor
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import Box
from tests.unit.checkpoint.small_checkpoint import COMMON, MemorySource, sample_tensors
from tests.unit.core.dist_checkpointing.toy import save_tensors

ALONE = describe_parallel_state(0, 1)


def bits(values: torch.Tensor) -> bytes:
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def written(tmp_path: Path, **options: int) -> Path:
    return write_native(MemorySource(sample_tensors()), tmp_path, 7, **options)


def test_every_bit_comes_back(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert folder == tmp_path / "iter_0000007"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    source = NativeSource(folder)
    expected = sample_tensors()
    assert {name: (info.global_shape, info.dtype) for name, info in source.tensors.items()} == {
        name: (tuple(values.shape), values.dtype) for name, values in expected.items()
    }
    for name, values in expected.items():
        assert bits(source.read(name)) == bits(values), name
    assert source.common == COMMON
    source.close()


def test_boxes_of_cut_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    values = torch.arange(13 * 7, dtype=torch.int32).view(13, 7)
    save_tensors(folder, [whole_tensor("model.w", values)], COMMON, ALONE, max_shard_bytes=3 * 7 * 4)
    source = NativeSource(folder)
    assert len(source.stored["model.w"].shards) == 5
    assert torch.equal(source.read("model.w"), values)
    for box in (Box((2, 1), (6, 4)), Box((12, 6), (1, 1)), Box((0, 0), (13, 1)), Box((4, 0), (0, 7))):
        got = source.read("model.w", box)
        assert torch.equal(got, values[box.slices])
        assert got.is_contiguous()
    source.close()


def test_a_piece_that_serves_several_reads_is_read_once(tmp_path: Path) -> None:
    source = NativeSource(written(tmp_path))
    for row in range(11):
        source.read("model.embedding.weight", Box((row, 0), (1, 5)))
    assert source.bytes_read == 11 * 5 * 2
    source.close()


def test_what_a_run_saves_without_its_random_streams(tmp_path: Path) -> None:
    tensors = [whole_tensor("model.w", torch.ones(3)), whole_tensor("rng.pp0.dp0.cp0.tp0.a", torch.zeros(4))]
    save_tensors(tmp_path, tensors, COMMON, ALONE)
    source = NativeSource(tmp_path)
    assert list(source.tensors) == ["model.w"]
    source.close()


def test_a_lost_file_of_random_streams_matters_only_to_a_run(tmp_path: Path) -> None:
    tensors = {"model.w": torch.ones(3), "rng.pp0.dp0.cp0.tp0.a": torch.zeros(64)}
    folder = write_native(MemorySource(tensors), tmp_path, 7, max_file_bytes=100)
    index = read_index(folder)
    (name,) = {shard.file for shard in index.tensors["rng.pp0.dp0.cp0.tp0.a"].shards}
    (folder / name).unlink()
    for with_streams in (False, True):
        with pytest.raises(DamagedCheckpointError, match=name):
            NativeSource(folder, with_random_streams=with_streams)
        source = NativeSource(folder, with_random_streams=with_streams, needs_streams=False)
        assert list(source.tensors) == ["model.w"]
        assert source.lost_streams == (
            f"WARNING: {folder} lacks {name}, or it is damaged; it holds only random number streams, which are not "
            "needed here"
        )
        source.close()
    (weights,) = {shard.file for shard in index.tensors["model.w"].shards}
    (folder / weights).unlink()
    with pytest.raises(DamagedCheckpointError, match=weights):
        NativeSource(folder, needs_streams=False)


def test_the_writer_reads_each_tensor_once_and_says_where_it_lies(tmp_path: Path) -> None:
    source = MemorySource(sample_tensors())
    folder = write_native(source, tmp_path, "release", max_file_bytes=100)
    assert sorted(source.reads) == sorted(sample_tensors())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    index = read_index(folder)
    assert index.is_intact
    assert len(index.files) == 6
    for name, tensor in index.tensors.items():
        assert len({shard.file for shard in tensor.shards}) == 1, name
        for shard in tensor.shards:
            assert shard.start % sample_tensors()[name].element_size() == 0


def test_files_hold_wide_types_first_and_whole_tensors() -> None:
    wide, narrow = TensorInfo((4, 6), torch.float32), TensorInfo((5, 3), torch.bfloat16)
    files = plan_files([("b", narrow), ("a", wide), ("c", wide)], max_file_bytes=130, max_shard_bytes=48)
    assert [[(shard.name, shard.box.shape) for shard in file] for file in files] == [
        [("a", (2, 6)), ("a", (2, 6))],
        [("c", (2, 6)), ("c", (2, 6)), ("b", (5, 3))],
    ]


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    (origin / "tokenizer").mkdir(parents=True)
    (origin / "tokenizer" / "tokenizer_record.json").write_text("{}")
    source = MemorySource(sample_tensors(), {**COMMON, "tokenizer": "tokenizer"})
    source.folder = origin
    folder = write_native(source, tmp_path / "result", 3)
    assert (folder / "tokenizer" / "tokenizer_record.json").read_text() == "{}"
    assert read_index(folder).common["tokenizer"] == "tokenizer"


def test_a_flipped_byte_is_named_only_by_the_tensor_that_has_it(tmp_path: Path) -> None:
    folder = written(tmp_path)
    shard = read_index(folder).tensors["model.norm.bias"].shards[0]
    file = folder / shard.file
    data = bytearray(file.read_bytes())
    data[shard.start + 3] ^= 1
    file.write_bytes(data)
    source = NativeSource(folder)
    source.read("model.embedding.weight")
    with pytest.raises(DamagedCheckpointError, match=r"shard_00000.*model\.norm\.bias do not match"):
        source.read("model.norm.bias")
    source.close()
    unchecked = NativeSource(folder, verify=False)
    assert bits(unchecked.read("model.norm.bias")) != bits(sample_tensors()["model.norm.bias"])
    unchecked.close()


def test_damage_is_refused_on_opening(tmp_path: Path) -> None:
    folder = written(tmp_path)
    index = folder / "index.json"
    text = index.read_text()
    index.write_text(text.replace('"consumed_train_samples": 56', '"consumed_train_samples": 57'))
    with pytest.raises(DamagedCheckpointError, match="does not match its checksum"):
        NativeSource(folder)
    index.write_text(text)
    shard = folder / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(DamagedCheckpointError, match="bytes"):
        NativeSource(folder)
    shard.unlink()
    with pytest.raises(DamagedCheckpointError, match="shard_00000"):
        NativeSource(folder)


def test_a_gap_is_refused_with_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    values = torch.arange(12.0).view(6, 2)
    save_tensors(folder, [whole_tensor("model.w", values)], COMMON, ALONE, max_shard_bytes=2 * 2 * 4)
    path = folder / "index.json"
    content = json.loads(path.read_text())
    del content["tensors"]["model.w"]["pieces"][1]
    path.write_text(json.dumps(content))
    source = NativeSource(folder, verify=False)
    assert torch.equal(source.read("model.w", Box((0, 0), (2, 2))), values[:2])
    with pytest.raises(DamagedCheckpointError, match=r"no shard contains model\.w\[2:4,0:2\]"):
        source.read("model.w")
    source.close()


def test_a_file_system_that_refuses_is_reported_with_path_and_bytes(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file.*bytes are needed"):
        write_native(MemorySource(sample_tensors()), blocked, 1)


def test_formats_are_told_apart(tmp_path: Path) -> None:
    folder = written(tmp_path / "native")
    assert detect_format(folder) == "native"
    (tmp_path / "torch" / "mp_rank_00").mkdir(parents=True)
    assert detect_format(tmp_path / "torch") == "torch"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert detect_format(tmp_path / "hf") == "hf"
    assert detect_format(tmp_path) is None
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        open_checkpoint(tmp_path)
    for name, expected in ((".metadata", "torchtitan"), ("common.pt", "torch_dist"), ("metadata.json", None)):
        folder_of_part = tmp_path / f"only {name}"
        folder_of_part.mkdir()
        (folder_of_part / name).touch()
        assert detect_format(folder_of_part) == expected
    source = open_checkpoint(folder)
    assert source.common["progress"]["iteration"] == 7
    source.close()
