"""Read the documents of files that are not jsonl, each as a JSON line: text, Parquet, Arrow, WebDataset tars."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Final

from megatron.core.errors import DataError

_ROWS: Final = 64
_TEXT_MEMBERS: Final = ("txt", "md")
"""Members of a tar that hold a sample's ``text`` where none has that name."""


class LineStream(io.RawIOBase):
    """Give lines as one stream of bytes, each made when it is read."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes and return how many there are; 0 at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._lines, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def read_texts(paths: Iterable[str], keys: Sequence[str], open_file: Callable[[str], IO[bytes]]) -> Iterator[bytes]:
    """Yield a line for each file: all of it is one document. A byte-order mark is left out."""
    for path in paths:
        with open_file(path) as file:
            yield _line({keys[0]: _decode(file.read()).removeprefix("\ufeff")})


def read_tar(stream: IO[bytes], keys: Sequence[str]) -> Iterator[bytes]:
    """Yield a line for each sample: members that follow each other and share their name up to its first dot.

    A key is a member of that suffix, or is in the sample's ``.json``; ``text`` may also be its ``.txt`` or ``.md``.

    Raises:
        tarfile.TarError: it is damaged or cut short.
    """
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        members = (member for member in _each_member(archive) if member.isfile())
        for _, group in itertools.groupby(members, lambda member: _sample_name(member.name)):
            sample: dict[str, bytes] = {}
            for member in group:
                content = archive.extractfile(member)
                assert content is not None  # of a file
                sample[posixpath.basename(member.name).partition(".")[2]] = content.read()
            yield _line(_sample_values(sample, keys))
        # An archive ends with empty blocks, of which the first one was read; the package does not ask for them.
        if archive.fileobj is not None and archive.fileobj.tell() == archive.offset:
            raise tarfile.ReadError("it ends without the mark of its end; copy it again")


def _each_member(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, which would remember all of them."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]
        yield member


def read_table(path: str, kind: str, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield a line for each row of a Parquet or an Arrow file; a value that is null is an empty text.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or a column is not there.
    """
    arrow = load_pyarrow(path)
    try:
        for batch in _parquet_batches(path, keys) if kind == "parquet" else _arrow_batches(arrow, path, keys):
            for row in batch.to_pylist():
                yield _line({key: _text(value) for key, value in row.items()})
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error


def load_pyarrow(path: str) -> Any:
    """Return the package.

    Raises:
        DataError: it cannot be imported.
    """
    try:
        return importlib.import_module("pyarrow")
    except (ImportError, OSError) as error:
        raise DataError(
            f"{path}: reading Parquet and Arrow files needs the package pyarrow, which cannot be imported ({error}); "
            "install it with: pip install pyarrow"
        ) from error


def _parquet_batches(path: str, keys: Sequence[str]) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    # Buffered ahead, all columns of a file would stay in memory to its end.
    with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_columns(path, file.schema_arrow.names, keys)
        yield from file.iter_batches(_ROWS, columns=list(keys), use_threads=False)


def _arrow_batches(arrow: Any, path: str, keys: Sequence[str]) -> Iterator[Any]:
    with arrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        _check_columns(path, reader.schema.names, keys)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            chosen = batch.select(list(keys))
            yield from (chosen.slice(begin, _ROWS) for begin in range(0, len(chosen), _ROWS))


def _check_columns(path: str, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise DataError(f"{path}: no column {key!r} (found: {', '.join(names)}); change --json-keys")


def _sample_name(path: str) -> str:
    folder, name = posixpath.split(path)
    return posixpath.join(folder, name.partition(".")[0])


def _sample_values(sample: dict[str, bytes], keys: Sequence[str]) -> dict[str, Any]:
    """Return what a sample has under each key; where it lacks one, all names that it has, to be named."""
    try:
        described = json.loads(sample.get("json", b"{}"))
    except ValueError:
        described = {}
    values: dict[str, Any] = {name: _decode(content) for name, content in sample.items()}
    values = described | values
    text = next((values[name] for name in ("text", *_TEXT_MEMBERS) if name in values), None)
    values |= {} if text is None else {"text": text}
    return {key: values[key] for key in keys} if set(keys) <= set(values) else dict.fromkeys(values, "")


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(part) for part in value]
    return "" if value is None else _decode(value) if isinstance(value, bytes) else value


def _decode(content: bytes) -> str:
    """Keep bytes that are not UTF-8, so that the line is refused for them."""
    return content.decode("utf-8", "surrogateescape")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, default=str).encode("utf-8", "surrogateescape") + b"\n"
