"""What is done to other processes: their connections end, their files stay short, and it is taken back."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.errors import ConfigurationError
from megatron.verification.faults.injection import ROOM_BYTES, Fault, Injection, drop_connections
from megatron.verification.faults.launch import Launch, ranks_of

CONNECTED = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listener.getsockname())
theirs = listener.accept()[0]
print("connected", flush=True)
sys.stdin.readline()
print(len(ours.recv(10)) + len(theirs.recv(10)), flush=True)
"""
WRITER = f"""
import pathlib, time
print("ready", flush=True)
while True:
    try:
        pathlib.Path("long").write_bytes(bytes(2 * {ROOM_BYTES}))
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
    time.sleep(0.02)
"""
TREE = """
import os, subprocess, sys, time
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
else:
    for rank in "01":
        subprocess.Popen([sys.executable, __file__, rank], env=os.environ | {"RANK": rank})
time.sleep(60)
"""


def test_connections_of_a_process_end_at_both_ends() -> None:
    command = [sys.executable, "-c", CONNECTED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        assert drop_connections(process.pid) == 2
        # It reads only now: the end of the first connection would let it exit before the second is dropped.
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"


def start(folder: Path, program: str) -> Launch:
    script = folder / "program.py"
    script.write_text(program)
    return Launch(["sh", "-c", f"cd {folder} && exec {sys.executable} program.py"], folder / "out", folder / "metrics")


def wait_for(launch: Launch, text: str, count: int = 1) -> None:
    deadline = time.monotonic() + 30.0
    while launch.text.count(text) < count:
        assert time.monotonic() < deadline, launch.text
        time.sleep(0.02)


def test_no_file_grows_while_the_disk_is_full(tmp_path: Path) -> None:
    launch = start(tmp_path, WRITER)
    try:
        wait_for(launch, "written")
        injection = Injection(Fault("fill-disk", ""), launch, tmp_path, (), random.Random(1))
        wait_for(launch, "File too large")
        written = launch.text.count("written")
        injection.undo()
        wait_for(launch, "written", written + 1)
    finally:
        launch.close()
    assert not launch.left_after(5.0)


def test_a_sample_is_spoiled_and_put_back(tmp_path: Path) -> None:
    launch = start(tmp_path, WRITER)
    try:
        tokens = tmp_path / "tokens.bin"
        tokens.write_bytes(b"\1\2\3\4")
        injection = Injection(Fault("corrupt", "sample"), launch, tmp_path, (tokens,), random.Random(1))
        assert tokens.read_bytes() == b"\xff" * 4
        injection.undo()
        assert tokens.read_bytes() == b"\1\2\3\4"
    finally:
        launch.close()


def test_ranks_are_known_by_their_environment_and_not_their_workers(tmp_path: Path) -> None:
    launch = start(tmp_path, TREE)
    try:
        deadline = time.monotonic() + 30.0
        while sorted(ranks_of(launch.process.pid)) != [0, 1] or len(launch.seen) < 5:
            assert time.monotonic() < deadline
            launch.look()
            time.sleep(0.02)
        with pytest.raises(ConfigurationError, match="there is no rank 2 in this run"):
            Injection(Fault("kill", "2"), launch, tmp_path, (), random.Random(1))
        injection = Injection(Fault("kill", "1"), launch, tmp_path, (), random.Random(1))
        assert injection.has_launcher
        while 1 in ranks_of(launch.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert 0 in ranks_of(launch.process.pid)
    finally:
        launch.close()
    assert not launch.left_after(5.0)
