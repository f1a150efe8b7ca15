"""Objects of a store: paths, errors in one line, attempts that are repeated, ranges, and copies on this machine."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core import object_store
from megatron.core.errors import InputError, StorageError
from megatron.core.object_store import (
    ObjectPath,
    ObjectStore,
    ObjectStoreError,
    UploadedFile,
    as_path,
    fetch,
    local_copy,
    machine_cache,
    missing_package,
    open_store,
    reason_of,
    url_problem,
)
from megatron.core.ranged_file import open_ranged, read_range
from megatron.core.safe_io import read_plain_file
from tests.harness.object_faults import MEMORY, Unreachable, empty_memory_store
from tests.harness.recorded_calls import record_object_reads

DELAYS_S = object_store._DELAYS_S


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_store, "_DELAYS_S", (0.0, 0.0))
    with empty_memory_store():
        yield


def remote(name: str) -> ObjectPath:
    path = as_path(f"memory://{name}")
    assert isinstance(path, ObjectPath)
    return path


def fail_first(monkeypatch: pytest.MonkeyPatch, name: str, times: int, error: Exception) -> list[int]:
    """Let the first calls of a method fail; return a list that grows by one with each call."""
    calls: list[int] = []
    real = getattr(MEMORY, name)

    def method(self, *words, **named):
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return real(self, *words, **named)

    monkeypatch.setattr(MEMORY, name, method)
    return calls


def test_a_path_of_an_object_is_its_url() -> None:
    path = remote("run/a") / "iter_0000010"
    assert str(path) == "memory://run/a/iter_0000010"
    assert (path.name, str(path.parent)) == ("iter_0000010", "memory://run/a")
    assert pickle.loads(pickle.dumps(path)) == path
    assert as_path(str(path)) == path
    assert path.resolve() == path
    assert hash(path) == hash(as_path(str(path)))
    assert str(as_path("file:///data/a//b/")) == "file:///data/a/b"
    assert as_path("runs/a") == Path("runs/a")
    assert not isinstance(as_path("runs/a"), ObjectPath)


def test_a_path_of_an_object_is_never_taken_for_a_local_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = remote("run/a")
    for use in (
        path.open,
        lambda: os.listdir(path),
        lambda: shutil.rmtree(path),
        lambda: Path.home() / os.fspath(path),
    ):
        with pytest.raises(StorageError, match="memory://run/a is in an object store"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_objects_are_written_listed_read_and_deleted() -> None:
    folder = remote("run")
    (folder / "b").write_bytes(b"later")
    (folder / "deep" / "c").write_bytes(b"xyz")
    (folder / "b").write_bytes(b"0123456789")
    assert [path.name for path in folder.iterdir()] == ["b", "deep"]
    assert [path.name for path in folder.glob("d*")] == ["deep"]
    assert [path.name for path in folder.glob("b")] == ["b"]
    assert (folder.is_dir(), folder.is_file(), (folder / "b").is_file(), (folder / "no").exists()) == (
        True,
        False,
        True,
        False,
    )
    assert (folder / "b").read_text() == "0123456789"
    status = (folder / "b").stat()
    written = MEMORY().modified("/run/b").timestamp()
    assert (status.st_size, status.st_mtime, int(status.st_mtime)) == (10, written, status[8])
    assert status.st_mtime_ns == pytest.approx(written * 1e9, rel=1e-12)
    assert stat.S_ISREG(status.st_mode)
    assert (*status[1:6], status[7], status[9]) == (0, 0, 1, 0, 0, 0, 0)
    (folder / "b").unlink()
    (folder / "b").unlink()
    folder.remove_folder()
    folder.remove_folder()
    assert list(folder.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        (folder / "b").read_bytes()


def test_what_a_package_remembers_of_a_store_is_never_asked(monkeypatch) -> None:
    calls = []
    for name in ("invalidate_cache", "info", "ls", "rm"):
        real = getattr(MEMORY, name)
        monkeypatch.setattr(
            MEMORY, name, lambda *words, name=name, real=real, **named: calls.append(name) or real(*words, **named)
        )
    folder = remote("run")
    (folder / "a").write_bytes(b"x")
    for ask, name in ((folder.is_dir, "info"), (lambda: list(folder.iterdir()), "ls"), (folder.remove_folder, "rm")):
        calls.clear()
        ask()
        assert calls[calls.index(name) - 1] == "invalidate_cache"
        assert calls[0] != name


def test_an_object_is_created_once() -> None:
    path = remote("run/index.json")
    path.create(b"first")
    with pytest.raises(FileExistsError, match=r"run/index\.json: it exists already"):
        path.create(b"other")
    assert path.read_bytes() == b"first"


def test_a_creation_whose_answer_was_lost_is_known_for_its_own(monkeypatch) -> None:
    real = MEMORY.open
    calls = []

    def open_and_lose(self, path, mode="rb", **named):
        file = real(self, path, mode, **named)
        calls.append(mode)
        if calls == ["xb"]:
            raise Unreachable("the answer was lost")
        return file

    monkeypatch.setattr(MEMORY, "open", open_and_lose)
    remote("run/index.json").create(b"mine")
    assert calls[:1] == ["xb"]
    assert remote("run/index.json").read_bytes() == b"mine"


def test_a_condition_that_a_store_has_its_own_words_for_is_known_by_its_code(monkeypatch) -> None:
    # As s3fs passes on what Swift answers.
    told = Unreachable("An error occurred (PreconditionFailed) when calling the PutObject operation")
    remote("run/index.json").create(b"first")
    calls = []

    def refuse(self, path, mode="rb", **named):
        calls.append(mode)
        raise OSError(errno.EINVAL, "At least one of the preconditions you specified did not hold.") from told

    monkeypatch.setattr(MEMORY, "open", refuse)
    with pytest.raises(FileExistsError, match=r"run/index\.json: it exists already"):
        remote("run/index.json").create(b"other")
    assert calls == ["xb"]


def test_of_several_processes_that_create_an_object_one_succeeds(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/index.json"
    processes = [_FORK.Process(target=_create, args=(url, number)) for number in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    statuses = [process.exitcode for process in processes]
    assert sorted(statuses) == [0] + [_REFUSED] * 15
    assert as_path(url).read_bytes() == str(statuses.index(0)).encode()


_FORK = multiprocessing.get_context("fork")
_REFUSED = 3


def _create(url: str, number: int) -> None:
    try:
        as_path(url).store.create(url, str(number).encode())
    except FileExistsError:
        raise SystemExit(_REFUSED) from None


def test_what_may_pass_is_tried_again_and_what_does_not_is_not(monkeypatch) -> None:
    calls = fail_first(monkeypatch, "pipe_file", 2, Unreachable("reset by peer"))
    remote("a/b").write_bytes(b"x")
    assert len(calls) == 3
    calls = fail_first(monkeypatch, "pipe_file", 1, PermissionError("AccessDenied"))
    with pytest.raises(PermissionError, match=r"^memory://a/b: AccessDenied$"):
        remote("a/b").write_bytes(b"y")
    assert len(calls) == 1
    fail_first(monkeypatch, "pipe_file", 9, Unreachable("reset by peer"))
    with pytest.raises(ObjectStoreError, match=r"^memory://a/b: reset by peer$"):
        remote("a/b").write_bytes(b"z")


def test_every_failure_of_a_store_is_input_that_gets_one_line(monkeypatch) -> None:
    fail_first(monkeypatch, "info", 9, Unreachable("first line\nsecond line"))
    with pytest.raises(InputError) as caught:
        remote("a/b").exists()
    assert str(caught.value) == "memory://a/b: first line second line"


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/x failed",
        "GET https://host/x?X-Amz-Signature=hunter2&Expires=9 failed",
        "aws_secret_access_key=hunter2 is refused",
        "Secret: hunter2",
        "{'AccountKey=hunter2;BlobEndpoint=x'}",
    ],
)
def test_credentials_are_never_told(text: str) -> None:
    assert "hunter2" not in reason_of(Unreachable(text))
    assert "***" in reason_of(Unreachable(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runs/a", None),
        ("memory://run", None),
        ("file:///data/run", None),
        ("s3:/bucket/run", "s3:/bucket/run lacks a slash; write s3://"),
        ("memory:run", "memory:run lacks a slash"),
        ("S3://bucket/run", "S3:// is not a supported object store; supported are s3://, gs:// and az://"),
        ("http://host/run", "http:// is not a supported object store"),
        ("hdfs://name/run", "hdfs:// is not a supported object store"),
        ("s3://", "s3:// has no bucket; write s3://BUCKET/FOLDER"),
        ("s3:///run", "s3:///run has no bucket"),
        ("s3://bucket", None),
        ("memory://", "memory:// has no folder"),
        ("s3://key:hunter2@bucket/run", "s3://*** contains a credential or a port"),
        ("s3://hunter2@bucket/run", "s3://*** contains a credential or a port"),
        ("s3://bucket:9000/run", "s3://*** contains a credential or a port"),
        ("s3://bucket/run?token=hunter2", "contains one of ? #"),
        ("s3://bucket/*", "contains one of ? #"),
        ("memory://a/../b", "contains . or .. as a path component"),
        ("memory://a/b\nc", "unprintable character"),
    ],
)
def test_a_url_that_cannot_be_used_is_told(text: str, problem: str | None, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    found = url_problem(text)
    assert found is None if problem is None else found is not None and problem in found
    assert "hunter2" not in str(found)
    if problem is not None and "://" in text:
        with pytest.raises(StorageError):
            as_path(text)


def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert url_problem("gs://bucket/run") == missing_package("gs")
    monkeypatch.setitem(object_store.PACKAGES, "s3", "no_such_package")
    with pytest.raises(StorageError, match=r"s3:// needs the package no_such_package.*; run: pip install"):
        open_store("s3://bucket/run")


def test_ranges_that_lie_near_each_other_are_asked_for_together(monkeypatch) -> None:
    data = bytes(range(251)) * 8000
    remote("a/b").write_bytes(data)
    asked = []
    real = MEMORY.cat_file
    monkeypatch.setattr(
        MEMORY, "cat_file", lambda self, path, start, end: asked.append((start, end)) or real(self, path, start, end)
    )
    file = open_ranged(remote("a/b"))
    starts = [0, 1000, 3000, 900_000, 901_000]
    assert list(file.announce(100, 500, starts)) == starts
    for start in starts:
        target = bytearray(500)
        assert file.fill(memoryview(target), 100 + start) == 500
        assert target == data[100 + start : 600 + start]
    assert asked == [(100, 3600), (900_100, 901_600)]
    target = bytearray(100)
    assert file.fill(memoryview(target), len(data) - 60) == 60
    assert target[:60] == data[-60:]
    assert file.fill(memoryview(target), len(data) + 5) == 0


def test_ranges_that_follow_each_other_are_read_ahead(monkeypatch) -> None:
    data = bytes(range(251)) * 8000
    remote("a/b").write_bytes(data)
    asked = []
    real = MEMORY.cat_file
    monkeypatch.setattr(MEMORY, "cat_file", lambda *words: asked.append(words[2:]) or real(*words))
    file = open_ranged(remote("a/b"))
    for start in range(0, 1_500_000, 10_000):
        target = bytearray(10_000)
        assert file.fill(memoryview(target), start) == 10_000
        assert target == data[start : start + 10_000]
    assert len(asked) < 8


def test_a_long_range_is_read_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 7)
    remote("a/b").write_bytes(bytes(range(50)))
    assert remote("a/b").read_bytes() == bytes(range(50))
    assert read_plain_file(remote("a/b"), 50) == bytes(range(50))
    with pytest.raises(OSError, match="it has 50 bytes, but at most 49 are supported"):
        read_plain_file(remote("a/b"), 49)


def test_objects_are_fetched_once_and_again_when_they_change(tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "not" / "there"
    reads = []
    real = MEMORY.cat_file
    monkeypatch.setattr(MEMORY, "cat_file", lambda self, path, *bounds: reads.append(path) or real(self, path, *bounds))
    objects = [remote("t/a.idx"), remote("t/b.json")]
    for path in objects:
        path.write_bytes(path.name.encode())
    first = fetch(objects, cache)
    assert sorted(path.name for path in first.iterdir()) == ["a.idx", "b.json"]
    assert (first / "a.idx").read_text() == "a.idx"
    assert fetch(objects, cache) == first
    assert len(reads) == 2
    objects[0].write_bytes(b"other")
    assert (fetch(objects, cache) / "a.idx").read_text() == "other"
    assert local_copy(tmp_path) == tmp_path


def test_of_several_that_fetch_an_object_one_reads_it(tmp_path: Path, monkeypatch) -> None:
    go, reads = threading.Event(), []
    real = MEMORY.cat_file

    def cat_file(self, path, *bounds):
        reads.append(path)
        assert go.wait(10.0)
        return real(self, path, *bounds)

    monkeypatch.setattr(MEMORY, "cat_file", cat_file)
    remote("t/a").write_bytes(b"a")
    with ThreadPoolExecutor(2) as pool:
        fetches = [pool.submit(fetch, [remote("t/a")], tmp_path) for _ in range(2)]
        time.sleep(0.05)
        go.set()
        first, second = (each.result(10.0) for each in fetches)
    assert first == second
    assert len(reads) == 1


def test_copies_are_kept_in_a_folder_of_the_user(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    at_home = machine_cache()
    assert machine_cache() == at_home
    assert at_home == tmp_path / "home/.cache/megatron/objects"
    assert at_home.stat().st_mode & 0o777 == 0o700
    user = os.getuid()
    others = tmp_path / f"cache-{user}/megatron/objects"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != at_home)
        assert machine_cache() == others
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(StorageError, match=r"no folder for cached objects: neither ~/\.cache nor TMPDIR"):
        machine_cache()


def test_attempts_are_repeated_for_15_seconds_not_all_at_the_same_moment(monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_DELAYS_S", DELAYS_S)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    def fail() -> None:
        raise Unreachable("reset by peer")

    store = open_store("memory://a")
    for _ in range(40):
        with pytest.raises(ObjectStoreError):
            store.attempt("memory://a", fail)
    waited = np.array(waits).reshape(40, 5) / (0.5, 1.0, 2.0, 4.0, 8.0)
    assert 0.5 <= waited.min() < 0.7
    assert 1.3 < waited.max() <= 1.5


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"),
    [(0, 16 << 20), (9000 * (16 << 20), 16 << 20), (9000 * (16 << 20) + 1, (16 << 20) + 1)],
)
def test_an_upload_has_9000_parts_at_most(num_bytes: int, block_bytes: int, monkeypatch) -> None:
    opened: list[dict[str, object]] = []
    monkeypatch.setattr(MEMORY, "open", lambda self, path, mode, **named: opened.append({"mode": mode, **named}))
    open_store("memory://a").upload("memory://a/b", num_bytes)
    assert opened == [{"mode": "wb", "block_size": block_bytes}]


def test_an_upload_is_compared_in_size_and_given_up_after_an_error(monkeypatch) -> None:
    path = remote("run/shard")
    with UploadedFile(path, 5) as file:
        assert file.append(b"123") == zlib.crc32(b"123")
        assert file.append(np.frombuffer(b"45", np.uint8)) == zlib.crc32(b"45")
    assert path.read_bytes() == b"12345"
    calls: list[str] = []
    opened = SimpleNamespace(
        write=lambda data: None,
        discard=lambda: calls.append("discard"),
        close=lambda: calls.append("close"),
        closed=False,
    )
    with monkeypatch.context() as patch:
        patch.setattr(MEMORY, "open", lambda *words, **named: opened)
        file = UploadedFile(remote("run/other"), 5)
        with pytest.raises(ValueError, match="in between"), file:
            raise ValueError("in between")
    assert calls == ["discard"]
    assert opened.closed, "what is forgotten would be closed, and appear"
    with monkeypatch.context() as patch:
        patch.setattr(MEMORY, "open", lambda *words, **named: opened)
        patch.setattr(ObjectStore, "size", lambda self, url: 2)
        with UploadedFile(remote("run/other"), 5) as file:
            file.append(b"12")
    assert calls == ["discard", "close"]
    file = UploadedFile(remote("run/short"), 3)
    file.append(b"12")
    file.num_bytes = 3
    with pytest.raises(OSError, match="the store has only 2 of 3 bytes"):
        file.__exit__(None, None, None)


class CreatesOnce:
    """Stand for the file system of a store that has conditional writes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, str]] = []

    def _strip_protocol(self, url: str) -> str:
        return url.partition("://")[2]

    def pipe_file(self, key: str, data: bytes, mode: str) -> None:
        self.calls.append((key, data, mode))


def test_an_object_of_a_store_with_conditional_writes_is_created_by_them() -> None:
    files = CreatesOnce()
    ObjectStore(files, "s3").create("s3://bucket/index.json", b"mine")
    assert files.calls == [("bucket/index.json", b"mine", "create")]


def test_a_local_file_is_filled_from_a_place_on(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(50)))
    real = os.preadv
    # A system may give fewer bytes than are asked for.
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: real(file, [buffers[0][:7]], start))
    file = open_ranged(tmp_path / "file")
    assert file.num_bytes == 50
    target = bytearray(30)
    assert file.fill(memoryview(target), 10) == 30
    assert target == bytes(range(10, 40))
    assert file.fill(memoryview(target), 45) == 5
    assert target == bytes([*range(45, 50), *range(15, 40)])
    assert read_range(file, 45, 30) == bytes(range(45, 50))
    assert read_range(file, 50, 3) == read_range(file, 60, 3) == b""
    file.close()


def test_a_folder_of_objects_is_copied_under_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.object_store.machine_cache", lambda: tmp_path)
    remote("models/small/vocab.json").write_bytes(b"{}")
    remote("models/small/deep/other").write_bytes(b"x")
    copy = local_copy(remote("models/small"))
    assert (copy.name, [path.name for path in copy.iterdir()]) == ("small", ["vocab.json"])
    assert copy.is_relative_to(tmp_path)
    fail_first(monkeypatch, "ls", 9, Unreachable("reset by peer"))
    with pytest.raises(StorageError, match=r"^cannot copy memory://models/small to this node: reset by peer$"):
        local_copy(remote("models/small"))


def test_nothing_is_left_of_a_copy_that_failed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.object_store._CHUNK_BYTES", 4)
    remote("t/a").write_bytes(b"0123456789")
    folder = fetch([remote("t/a")], tmp_path)
    assert (folder / "a").read_bytes() == b"0123456789"
    shutil.rmtree(folder.parent)
    fail_first(monkeypatch, "cat_file", 9, Unreachable("reset by peer"))
    with pytest.raises(ObjectStoreError):
        fetch([remote("t/a")], tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("2025.2", False), ("2025.2.1", False), ("2025.1.9", True), ("2024.12", True), ("2026", False)],
)
def test_a_package_without_conditional_writes_is_rejected(version: str, is_old: bool, monkeypatch) -> None:
    made: list[dict[str, object]] = []
    modules = {
        "s3fs": SimpleNamespace(__version__=version),
        "fsspec": SimpleNamespace(filesystem=lambda scheme, **options: made.append({"scheme": scheme, **options})),
    }
    monkeypatch.setattr(object_store, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    if is_old:
        with pytest.raises(StorageError, match=rf"s3fs {version} cannot create .*; install s3fs>=2025\.2"):
            open_store("s3://bucket/run")
    else:
        open_store("s3://bucket/run")
    assert made == [{"scheme": "s3", "use_listings_cache": False}]


def test_a_reason_is_cut_after_300_characters() -> None:
    assert reason_of(Unreachable("x" * 300)) == "x" * 300
    assert reason_of(Unreachable("x" * 301)) == "x" * 300 + "..."


def test_failures_have_the_numbers_of_the_system(monkeypatch) -> None:
    remote("a/b").create(b"x")
    with pytest.raises(FileExistsError) as exists:
        remote("a/b").create(b"y")
    with pytest.raises(FileNotFoundError) as missing:
        remote("a/c").read_bytes()
    with pytest.raises(FileNotFoundError) as folder:
        remote("a").read_bytes()
    fail_first(monkeypatch, "pipe_file", 1, FileExistsError("condition"))
    with pytest.raises(FileExistsError) as condition:
        remote("a/b").write_bytes(b"x")
    assert condition.value.errno == errno.EEXIST
    fail_first(monkeypatch, "pipe_file", 1, FileNotFoundError("bucket"))
    with pytest.raises(FileNotFoundError) as no_bucket:
        remote("a/b").write_bytes(b"x")
    fail_first(monkeypatch, "pipe_file", 1, PermissionError("AccessDenied"))
    with pytest.raises(PermissionError) as denied:
        remote("a/b").write_bytes(b"x")
    caught = (exists, missing, folder, no_bucket, denied)
    assert [each.value.errno for each in caught] == [
        errno.EEXIST,
        errno.ENOENT,
        errno.ENOENT,
        errno.ENOENT,
        errno.EACCES,
    ]
    assert str(folder.value) == "memory://a: No such file or directory"


def test_names_that_a_pattern_stands_for(monkeypatch) -> None:
    for name in ("a1", "a2", "b1"):
        remote(f"run/{name}").write_bytes(b"x")
    folder = ObjectPath("memory://run")
    for pattern, names in (("a?", ["a1", "a2"]), ("[ab]1", ["a1", "b1"]), ("*1", ["a1", "b1"]), ("a1", ["a1"])):
        assert [path.name for path in folder.glob(pattern)] == names
    assert list(folder.glob("c")) == []
    with pytest.raises(StorageError, match="memory://run is in an object store"):
        folder.rglob("*")
    # One name is asked for by itself.
    monkeypatch.setattr(ObjectStore, "entries", None)
    assert [path.name for path in folder.glob("b1")] == ["b1"]


@pytest.mark.parametrize(("gap", "are_joined"), [(256 << 10, True), ((256 << 10) + 1, False)])
def test_ranges_are_joined_over_256_kib(gap: int, are_joined: bool, monkeypatch) -> None:
    num_bytes = (256 << 10) + 7
    remote("a/b").write_bytes(bytes(num_bytes))
    asked: list[list[tuple[int, int]]] = []
    real = ObjectStore.read_ranges

    def read_ranges(self, url, ranges):
        asked.append(ranges)
        return real(self, url, ranges)

    monkeypatch.setattr(ObjectStore, "read_ranges", read_ranges)
    open_ranged(remote("a/b")).announce(0, 4, [0, gap + 4])
    assert asked == [[(0, num_bytes)] if are_joined else [(0, 4), (gap + 4, num_bytes)]]


def test_a_long_range_of_an_object_is_read_alone(monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.ranged_file.PART_BYTES", 10)
    data = bytes(range(200))
    remote("a/b").write_bytes(data)
    asked = record_object_reads(monkeypatch)
    file = open_ranged(remote("a/b"))
    for start, num_bytes in ((20, 10), (100, 9), (195, 30), (200, 3)):
        assert read_range(file, start, num_bytes) == data[start : start + num_bytes]
    assert asked == [(20, 30), (100, 200)]


def test_a_local_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    file = open_ranged(tmp_path / "file")
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_range(file, 0, 1)
