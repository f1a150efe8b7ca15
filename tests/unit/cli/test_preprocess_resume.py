"""Preprocessing that is killed and run again ends with the bytes of a run that was not."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.core.errors import DataError
from megatron.data.input_chunks import Chunk
from megatron.data.worker_pool import Failure, WorkerPool

DRIVER = Path(__file__).with_name("preprocess_small_chunks.py")
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--append-eod"]


def command(chunk_bytes: int, source: object, prefix: Path, *flags: object) -> list[str]:
    arguments = [chunk_bytes, "--input", source, "--output-prefix", prefix, *NULL, *flags]
    return [sys.executable, str(DRIVER), *map(str, arguments)]


def run(arguments: list[str], stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(arguments, input=stdin, capture_output=True, timeout=120)


def output(prefix: Path) -> dict[str, bytes]:
    """Read everything that a run left."""
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir() if path.is_file()}


def write_ids(path: Path, num_documents: int) -> Path:
    draw = np.random.default_rng(5)
    with open(path, "w", encoding="ascii") as file:
        for _ in range(num_documents):
            ids = draw.integers(0, 127, draw.integers(0, 70))
            file.write(json.dumps({"id": int(ids.sum()), "text": " ".join(map(str, ids))}) + "\n")
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("chunk_bytes", "num_documents", "partitions"),
    [
        pytest.param(2000, 60, 2, id="less than a page a write"),
        pytest.param(100_000, 3500, 1, id="pages", marks=pytest.mark.long),
    ],
)
def test_a_death_at_any_step(chunk_bytes: int, num_documents: int, partitions: int, tmp_path: Path) -> None:
    source = write_ids(tmp_path / "ids.jsonl", num_documents)
    prefix = tmp_path / "out" / "x"
    arguments = command(chunk_bytes, source, prefix, "--workers", 2, "--partitions", partitions)
    done = run([*arguments[:3], "--die-everywhere", *arguments[3:]])
    assert done.returncode == 0, done.stderr.decode()
    steps = [line.split() for line in done.stdout.decode().splitlines() if line.startswith("output ")]
    assert len(steps) > 20
    assert len({(digest, *names) for _, _, digest, *names in steps}) == 1
    assert steps[0][3:] == [
        "x.preprocessing.json",
        *(f"x_text_document{suffix}" for suffix in (".bin", ".checksums.json", ".idx")),
    ]


def kill_somewhere(arguments: list[str], folder: Path, draw: random.Random, num_chunks: int) -> bool:
    """Kill a run after some chunks, the leader alone or with its workers; return whether it was still at work."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted, manifest = draw.randrange(num_chunks), folder / "manifest.jsonl"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if manifest.exists() and manifest.read_bytes().count(b"\n") > wanted:
            break
    time.sleep(draw.random() * 0.02)
    victims = [psutil.Process(process.pid)] if process.poll() is None else []
    if victims and draw.random() < 0.5:
        victims += victims[0].children()
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("num_kills", "seed"),
    [pytest.param(2, 3, marks=pytest.mark.long), pytest.param(20, 4, marks=pytest.mark.long)],
    ids=["two", "twenty"],
)
def test_random_kills(tmp_path: Path, num_kills: int, seed: int) -> None:
    source = write_ids(tmp_path / "ids.jsonl", 20_000)
    chunk_bytes = 40_000
    num_chunks = source.stat().st_size // chunk_bytes
    (tmp_path / "whole").mkdir()
    assert run(command(chunk_bytes, source, tmp_path / "whole" / "x", "--workers", 1)).returncode == 0
    expected = output(tmp_path / "whole" / "x")
    draw = random.Random(seed)
    killed = round_number = 0
    while killed < num_kills:
        # Each round is one piece of work, killed up to four times before it is let through.
        folder = tmp_path / f"round{round_number}"
        folder.mkdir()
        arguments = command(chunk_bytes, source, folder / "x", "--workers", draw.randrange(1, 4))
        for _ in range(draw.randrange(1, 5)):
            killed += kill_somewhere(arguments, folder / "x.preprocessing", draw, num_chunks)
        done = run(arguments)
        assert done.returncode == 0, done.stderr.decode()
        assert output(folder / "x") == expected
        round_number += 1
        assert round_number < 10 * num_kills


@pytest.mark.full
def test_compressed_input_and_pipes_are_gone_on_with(tmp_path: Path) -> None:
    source = write_ids(tmp_path / "ids.jsonl", 400)
    lines = source.read_bytes().splitlines(keepends=True)
    bad = b"".join([*lines[:300], b"{}\n", *lines[300:]])
    (tmp_path / "whole").mkdir()
    (tmp_path / "kept").mkdir()
    packed = tmp_path / "ids.jsonl.gz"
    packed.write_bytes(gzip.compress(bad[: len(bad) // 2]) + gzip.compress(bad[len(bad) // 2 :]))
    for name in (str(packed), "-"):
        # A line of the second half stops the first run, and the second one, which goes on from what was done.
        stdin = bad if name == "-" else None
        for _ in range(2):
            stopped = run(command(5000, name, tmp_path / "kept" / "x", "--overwrite"), stdin)
            assert stopped.returncode == 2
            assert b":301: no key 'text'" in stopped.stderr
        assert b"Resuming in" in stopped.stdout
        skipped = run(
            command(5000, name, tmp_path / "kept" / "x", "--workers", 2, "--restart", "--on-error", "skip"), stdin
        )
        assert skipped.returncode == 0
        assert run(command(5000, source, tmp_path / "whole" / "x", "--overwrite")).returncode == 0
        for suffix in (".bin", ".idx"):
            whole, kept = (tmp_path / folder / f"x_text_document{suffix}" for folder in ("whole", "kept"))
            assert kept.read_bytes() == whole.read_bytes()


@pytest.mark.default(1)
@pytest.mark.parametrize("change", ["another text", "another end", "too short"])
def test_another_text_through_the_pipe_is_refused(change: str, tmp_path: Path) -> None:
    lines = write_ids(tmp_path / "ids.jsonl", 400).read_bytes().splitlines(keepends=True)
    arguments = command(5000, "-", tmp_path / "x")
    assert run(arguments, b"".join([*lines[:300], b"{}\n"])).returncode == 2
    other = {
        "another text": [lines[1], lines[0], *lines[2:]],
        "another end": [lines[0] * 2, *lines[1:]],
        "too short": lines[:50],
    }[change]
    refused = run(arguments, b"".join(other))
    assert refused.returncode == 2
    assert refused.stderr.count(b"\n") == 1
    assert b"does not contain the same text as before the interruption" in refused.stderr
    assert b"--restart" in refused.stderr
    assert run(arguments, b"".join(lines)).returncode == 0  # nothing was lost


def test_why_a_worker_gave_up_is_said_whoever_notices_first(tmp_path: Path) -> None:
    pool = WorkerPool(1, 100, fail_at_once, ())
    try:
        worker = pool.free_worker(needs_idle=True)
        assert worker is not None
        worker.process.join(timeout=30)
        with pytest.raises(DataError, match="the input became shorter"):
            pool.submit(worker, Chunk(0, 0, 0, 10, b"x" * 10))
    finally:
        pool.close(wait_for_them=True)


def fail_at_once(connection: Connection, slots: list[memoryview]) -> None:
    connection.send(Failure(DataError("the input became shorter"), ""))
    connection.close()


def stop_after_some(tmp_path: Path) -> tuple[Path, Path]:
    """Leave unfinished work: the input and the prefix."""
    source = write_ids(tmp_path / "ids.jsonl", 300)
    with open(source, "ab") as file:
        file.write(b"not json\n")
    done = run(command(2000, source, tmp_path / "x", "--workers", 1))
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"error: {source}:301: not a JSON line")
    assert (tmp_path / "x.preprocessing" / "manifest.jsonl").exists()
    return source, tmp_path / "x"


@pytest.mark.full
def test_work_of_another_command_is_not_touched(tmp_path: Path) -> None:
    source, prefix = stop_after_some(tmp_path)
    done = run(command(2000, source, prefix, "--json-keys", "id", "--on-error", "skip"))
    assert done.returncode == 2
    assert b"contains unfinished work of a different command (json_keys, on_error differ)" in done.stderr
    done = run(command(2000, source, prefix, "--restart", "--on-error", "skip"))
    assert (done.returncode, done.stderr.count(b"\n")) == (0, 1)
    assert b":301: not a JSON line: Expecting value: line 1 column 1 (char 0); skipped" in done.stderr
    assert b"300 documents" in done.stdout
    assert b"1 lines skipped" in done.stdout


def test_input_that_changed_means_a_new_start(tmp_path: Path) -> None:
    source, prefix = stop_after_some(tmp_path)
    source.write_text('{"text": "1 2"}\n')
    done = run(command(2000, source, prefix))
    assert done.returncode == 0
    assert b"The input has changed since" in done.stdout
    assert b"1 documents, 3 tokens" in done.stdout


@pytest.mark.full
def test_damaged_work_is_done_again(tmp_path: Path) -> None:
    source, prefix = stop_after_some(tmp_path)
    tokens = tmp_path / "x.preprocessing" / "0.tokens"
    damaged = bytearray(tokens.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    tokens.write_bytes(damaged)
    done = run(command(2000, source, prefix))
    assert b"is damaged at chunk" in done.stdout
    assert done.returncode == 2
    source.write_bytes(source.read_bytes().removesuffix(b"not json\n"))
    assert run(command(2000, source, prefix)).returncode == 0


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.data import work_folder

    monkeypatch.setattr(work_folder, "_LOCK_WAIT_S", 0.1)
    first = work_folder.WorkFolder(str(tmp_path / "x"), {"input": []}, 1)
    with pytest.raises(DataError, match="is in use by another process"):
        work_folder.WorkFolder(str(tmp_path / "x"), {"input": []}, 1)
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    source = tmp_path / "ids.fifo"
    os.mkfifo(source)
    arguments = [sys.executable, str(DRIVER.parents[3] / "tools" / "preprocess_data.py")]
    arguments += ["--input", "-", "--output-prefix", str(tmp_path / "x"), *NULL, "--workers", "2"]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    line = b'{"text": "%s"}\n' % (b"1 " * 5000)
    process.stdin.write(line * 250)  # more than a chunk, so that the workers start
    process.stdin.flush()
    leader = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(leader.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(leader.children()[0].pid, signal.SIGKILL)
    _, errors = process.communicate(line * 2000, timeout=60)
    assert process.returncode == 1
    assert errors.count(b"\n") == 1
    assert b"was killed by SIGKILL" in errors
    assert b"run the same command again" in errors
