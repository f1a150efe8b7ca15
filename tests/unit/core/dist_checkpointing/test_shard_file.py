"""Shard files: readable by the safetensors library, damage found and named, and checksums joined from parts."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing.disk import join_checksums, partial_checksum
from megatron.core.dist_checkpointing.index import StoredFile, StoredShard, StoredTensor
from megatron.core.dist_checkpointing.planner import dtype_name, plan_reads
from megatron.core.dist_checkpointing.shard_file import ShardEntry, check_file, shard_bytes, write_shard
from megatron.core.dist_checkpointing.shard_reader import ShardReader
from megatron.core.errors import DamagedCheckpointError
from megatron.core.sharding import Box, Shard, full_shards

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def write(path: Path, **tensors: torch.Tensor) -> tuple[StoredFile, dict[str, StoredTensor]]:
    entries = [ShardEntry(name, values) for name, values in tensors.items()]
    written = write_shard(path, entries)
    file = written.file
    assert file is not None
    stored, start = {}, file.header_bytes
    for entry, checksum in zip(entries, written.checksums, strict=True):
        shape = tuple(entry.values.shape)
        box = Box((0,) * len(shape), shape)
        shard = StoredShard(box, path.name, entry.key, start, entry.values.nbytes, checksum)
        start += entry.values.nbytes
        stored[entry.key] = StoredTensor(entry.key, shape, dtype_name(entry.values.dtype), (shard,))
    assert path.stat().st_size == file.num_bytes == shard_bytes(entries)
    return file, stored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_any_view_is_read_back_bitwise_and_by_the_library_too(tmp_path: Path, dtype: torch.dtype) -> None:
    wide = (torch.randn(6, 9) * 50).to(dtype)
    tensors = {
        "columns": wide[:, 2:5],
        "transposed": wide.t(),
        "scalar": wide[3, 4],
        "none": wide[:0],
    }
    _, stored = write(tmp_path / "s.safetensors", **tensors)
    by_library = load_file(tmp_path / "s.safetensors")
    for name, values in tensors.items():
        assert by_library[name].dtype == dtype
        assert torch.equal(by_library[name], values)
        target = torch.zeros_like(values)
        reads = plan_reads([(name, full_shards(values.shape))], stored)
        with ShardReader(tmp_path) as reader:
            for read in reads:
                reader.read(read, [target])
        assert torch.equal(target, values)


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0xFF800000 - 2**32, 0x80000000 - 2**32, 1], dtype=torch.int32)
    values = bits.view(torch.float32)
    _, stored = write(tmp_path / "s.safetensors", a=values)
    target = torch.zeros(4)
    (read,) = plan_reads([("a", full_shards((4,)))], stored)
    with ShardReader(tmp_path) as reader:
        reader.read(read, [target])
    assert torch.equal(target.view(torch.int32), bits)


def test_without_verification_only_the_needed_bytes_are_read(tmp_path: Path) -> None:
    values = torch.arange(70.0).view(10, 7)
    _, stored = write(tmp_path / "s.safetensors", a=values)
    target = torch.zeros(3, 2)
    wanted = [("a", [Shard(Box((4, 5), (3, 2)), (0, 0))])]
    for verify, num_bytes in ((False, 3 * 2 * 4), (True, 10 * 7 * 4)):
        target.zero_()
        (read,) = plan_reads(wanted, stored, verify=verify)
        with ShardReader(tmp_path, verify) as reader:
            reader.read(read, [target])
            assert reader.bytes_read == num_bytes
        assert torch.equal(target, values[4:7, 5:7])


def test_flipped_byte_is_named_with_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "shard_00003.safetensors"
    file, stored = write(path, first=torch.randn(5, 3), second=torch.randn(4))
    data = bytearray(path.read_bytes())
    data[stored["second"].shards[0].start + 6] ^= 0x10
    path.write_bytes(data)
    check_file(path, file, [])
    target = torch.zeros(4)
    (read,) = plan_reads([("second", full_shards((4,)))], stored)
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(DamagedCheckpointError, match=r"shard_00003\.safetensors: the bytes of second do not"),
    ):
        reader.read(read, [target])


def test_flipped_byte_in_the_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    file, _ = write(path, first=torch.randn(5, 3))
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"s\.safetensors: the header does not match"):
        check_file(path, file, [])
    check_file(path, file, [], verify=False)


def test_truncated_file_names_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    file, stored = write(path, first=torch.randn(5, 3), second=torch.randn(4), third=torch.randn(2))
    path.write_bytes(path.read_bytes()[:-10])
    shards = [tensor.shards[0] for tensor in stored.values()]
    with pytest.raises(DamagedCheckpointError, match=r"bytes, but \d+ were written; lost: second, third"):
        check_file(path, file, shards)
    target = torch.zeros(4)
    (read,) = plan_reads([("second", full_shards((4,)))], stored, verify=False)
    with ShardReader(tmp_path, verify=False) as reader, pytest.raises(DamagedCheckpointError, match="ends within"):
        reader.read(read, [target])


def test_file_rewritten_without_a_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    file, stored = write(path, first=torch.randn(5, 3), second=torch.randn(4))
    kept = load_file(path)
    del kept["first"]
    save_file(kept, path)
    shards = [tensor.shards[0] for tensor in stored.values()]
    with pytest.raises(DamagedCheckpointError, match=r"lost: first$"):
        check_file(path, file, shards)


def test_missing_file_is_named_with_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "gone.safetensors"
    file, stored = write(path, **{f"t{number:02d}": torch.randn(2) for number in range(23)})
    path.unlink()
    shards = [tensor.shards[0] for tensor in stored.values()]
    with pytest.raises(DamagedCheckpointError, match=r"gone\.safetensors: No such file or directory$"):
        check_file(path, file, [])
    with pytest.raises(DamagedCheckpointError, match=r"No such file or directory; lost: t00, t01$"):
        check_file(path, file, shards[:2])
    with pytest.raises(DamagedCheckpointError, match=r"lost: t00, .*, t19$"):
        check_file(path, file, shards[:20])
    with pytest.raises(DamagedCheckpointError, match=r"lost: t00, .*, t19 and 3 more$"):
        check_file(path, file, shards)


def test_header_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    for name in ("a", "ab", "abcdefgh"):
        file, stored = write(path, **{name: torch.randn(3)})
        assert file.header_bytes % 8 == 0
        assert stored[name].shards[0].start == file.header_bytes
        with safe_open(path, framework="pt") as opened:
            assert list(opened.keys()) == [name]


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 257, 4096, 100_003])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_join_to_the_checksum_of_the_whole(num_bytes: int, num_parts: int) -> None:
    rng = random.Random(num_bytes * 10 + num_parts)
    data = memoryview(rng.randbytes(num_bytes))
    cuts = sorted(rng.randrange(num_bytes + 1) for _ in range(20))
    runs = [(start, data[start:end]) for start, end in zip([0, *cuts], [*cuts, num_bytes])]
    parts = [partial_checksum(runs[part::num_parts], num_bytes) for part in range(num_parts)]
    assert join_checksums(parts, num_bytes) == f"{zlib.crc32(data):08x}"


def test_a_large_gap_is_crossed_without_its_bytes() -> None:
    gap = 3 * 2**20 + 7
    part = partial_checksum([(5, memoryview(b"abc")), (8 + gap, memoryview(b"de"))], gap + 12)
    assert join_checksums([part], gap + 12) == f"{zlib.crc32(bytes(5) + b'abc' + bytes(gap) + b'de' + bytes(2)):08x}"


@pytest.mark.parametrize("bit", range(0, 8 * 60, 7))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    data = bytearray(random.Random(3).randbytes(60))
    expected = f"{zlib.crc32(data):08x}"
    data[bit // 8] ^= 1 << bit % 8
    view = memoryview(data)
    parts = [partial_checksum([(start, view[start : start + 15])], 60) for start in range(0, 60, 15)]
    assert join_checksums(parts, 60) != expected
