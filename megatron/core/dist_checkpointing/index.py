"""Index of a checkpoint folder: the shards of each tensor, the size of each file, and the common state.

`check_run_state` validates the common plain values before a run uses them. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.disk import checksum, read_error, write_text
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.safe_io import is_plain_name, parse_json, read_plain_text
from megatron.core.sharding import Box

INDEX_FILE = "index.json"
RNG_PREFIX = "rng."
FLAT_VERSION = 1
FORMAT_VERSION = 2
"""The newest readable version. It is written only if shard files are in subfolders; otherwise `FLAT_VERSION` is."""
_LARGEST_COUNT = 1 << 63


@dataclass(frozen=True)
class StoredShard:
    """Location of the values of one box: ``num_bytes`` at ``start`` in ``file``, row-major.

    ``file`` is a name in the checkpoint's folder or, in large worlds, ``SUBFOLDER/NAME``. ``key`` is the entry's name
    in that safetensors file, and ``checksum`` the CRC-32 of its bytes in eight hex digits.
    """

    box: Box
    file: str
    key: str
    start: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """Global tensor of a checkpoint, with all its shards."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class StoredFile:
    """Size of a shard file, and size and CRC-32 of its header (including the length field)."""

    num_bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class CheckpointIndex:
    """Contents of ``index.json``.

    ``common`` is plain JSON. ``is_intact`` is False if the file was modified after it was written. ``lost_streams`` are
    missing or damaged files of random number streams, for a reader that does not need them.
    """

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    common: Mapping[str, Any]
    is_intact: bool = True
    lost_streams: tuple[str, ...] = ()

    def has_only_streams(self, file: str) -> bool:
        """Return whether a file holds nothing but random number streams, which only a resumed run needs."""
        names = [name for name, tensor in self.tensors.items() if any(shard.file == file for shard in tensor.shards)]
        return bool(names) and all(name.startswith(RNG_PREFIX) for name in names)

    def lost_streams_line(self, folder: Path) -> str | None:
        """Return the log line about lost files of random number streams; None if there are none."""
        if not self.lost_streams:
            return None
        return (
            f"WARNING: {folder} lacks {', '.join(self.lost_streams)}, or it is damaged; it holds only random number "
            "streams, which are not needed here"
        )

    def shards_of(self, file: str) -> list[StoredShard]:
        """Return the shards in one file."""
        return [shard for tensor in self.tensors.values() for shard in tensor.shards if shard.file == file]


def encode_common(common: Mapping[str, Any]) -> str:
    """Encode the common state as the JSON text that is stored.

    Raises:
        TypeError: a value is not plain data.
    """
    return json.dumps(common)


def index_text(index: CheckpointIndex) -> str:
    """Return the text of ``index.json``: one line per tensor, and the checksum of all other contents."""
    tensors = {name: _encode_tensor(index.tensors[name]) for name in sorted(index.tensors)}
    files = {name: _encode_file(index.files[name]) for name in sorted(index.files)}
    # Decode it again first: the checksum must cover the keys as JSON represents them.
    common = json.loads(encode_common(index.common))
    content = {"common": common, "files": files, "tensors": tensors}
    version = FORMAT_VERSION if any("/" in name for name in files) else FLAT_VERSION
    return (
        f'{{"format_version": {version},\n"checksum": "{_content_checksum(content)}",\n'
        f'"common": {json.dumps(common, sort_keys=True, indent=1)},\n'
        f'"files": {_object_by_line(files)},\n"tensors": {_object_by_line(tensors)}}}\n'
    )


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Write ``index.json``, the text of `index_text`."""
    write_text(folder / INDEX_FILE, index_text(index))


def read_index(folder: Path) -> CheckpointIndex:
    """Read ``index.json``.

    Raises:
        DamagedCheckpointError: it is missing or malformed.
        CheckpointError: it was written in a newer version of the format.
    """
    content = read_index_file(folder)
    try:
        stored_checksum = content.pop("checksum")
        return CheckpointIndex(
            tensors={name: _decode_tensor(name, entry) for name, entry in content["tensors"].items()},
            files={_name(name): _decode_file(entry) for name, entry in content["files"].items()},
            common=dict(content["common"]),
            is_intact=_content_checksum(content) == stored_checksum,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedCheckpointError(f"{folder / INDEX_FILE}: not a valid checkpoint index ({error!r})") from error


def read_index_file(folder: Path) -> dict[str, Any]:
    """Return the contents of ``index.json`` without the format version.

    Raises:
        DamagedCheckpointError: it is missing or malformed.
        CheckpointError: it was written in a newer version of the format.
    """
    path = folder / INDEX_FILE
    try:
        content = parse_json(read_plain_text(path))
        version = int(content.pop("format_version"))
    except OSError as error:
        raise read_error(str(path), error) from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not readable as JSON ({error})") from error
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpointError(f"{path}: not a valid checkpoint index ({error!r})") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is newer than {FORMAT_VERSION}, the newest that this program reads"
        )
    return dict(content)


def _content_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _object_by_line(entries: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()) + "}"


def _encode_tensor(tensor: StoredTensor) -> dict[str, Any]:
    shards = [
        {
            "offset": list(shard.box.offset),
            "shape": list(shard.box.shape),
            "file": shard.file,
            "key": shard.key,
            "start": shard.start,
            "bytes": shard.num_bytes,
            "crc32": shard.checksum,
        }
        for shard in tensor.shards
    ]
    return {"shape": list(tensor.global_shape), "dtype": tensor.dtype, "pieces": shards}


def _decode_tensor(name: str, entry: Mapping[str, Any]) -> StoredTensor:
    shards = tuple(
        StoredShard(
            box=Box(_counts(shard["offset"]), _counts(shard["shape"])),
            file=_name(shard["file"]),
            key=str(shard["key"]),
            start=_count(shard["start"]),
            num_bytes=_count(shard["bytes"]),
            checksum=str(shard["crc32"]),
        )
        for shard in entry["pieces"]
    )
    return StoredTensor(name, _counts(entry["shape"]), str(entry["dtype"]), shards)


def _encode_file(file: StoredFile) -> dict[str, Any]:
    return {"bytes": file.num_bytes, "header_bytes": file.header_bytes, "header_crc32": file.header_checksum}


def _decode_file(entry: Mapping[str, Any]) -> StoredFile:
    return StoredFile(_count(entry["bytes"]), _count(entry["header_bytes"]), str(entry["header_crc32"]))


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise ValueError(f"{value!r} is not a number of bytes or elements")
    return value


def _name(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else [value]
    if len(parts) > 2 or not all(is_plain_name(part) for part in parts):
        raise ValueError(f"{value!r} is not the name of a file in this folder or in a subfolder")
    return str(value)


def check_run_state(folder: Path, common: Mapping[str, Any]) -> None:
    """Check that the common state of a native checkpoint has values of the expected types.

    Raises:
        DamagedCheckpointError: a value is missing or has another type; the message names it.
    """
    for name in ("progress", "config"):
        _expect(folder, name, common.get(name), isinstance(common.get(name), dict))
    for name in ("optimizer", "scheduler", "layout"):
        _expect(folder, name, common.get(name), isinstance(common.get(name), (dict, type(None))))
    model = common["config"].get("model")
    _expect(folder, "config.model", model, isinstance(model, (dict, type(None))))
    for name, value in common["progress"].items():
        is_history = name == "train_data"
        is_known = isinstance(value, (dict, type(None))) if is_history else _is_count(value, name)
        _expect(folder, f"progress.{name}", value, is_known)
    tokenizer = common.get("tokenizer")
    _expect(folder, "tokenizer", tokenizer, tokenizer is None or is_plain_name(tokenizer))


def _is_count(value: object, name: str) -> bool:
    if type(value) is float and name == "floating_point_operations_so_far":
        return math.isfinite(value) and value >= 0.0
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _expect(folder: Path, name: str, value: object, is_met: bool) -> None:
    if not is_met:
        text = repr(value)
        raise DamagedCheckpointError(
            f"{folder / INDEX_FILE}: {name} has the invalid value {text if len(text) <= 80 else text[:77] + '...'}"
        )
