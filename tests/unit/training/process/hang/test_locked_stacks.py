"""The stacks of a process that holds Python's lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from megatron.training.fault_tolerance.processes import ProcessName, this_process
from megatron.training.fault_tolerance.rank_state import StackFile, ask_for_stacks, parse_stacks
from tests.harness.training_run import REPOSITORY

WRITTEN = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap

Current thread 0x00008a (most recent call first):
  File "/home/me/megatron/core/collectives.py", line 56 in all_reduce
  File "/home/me/train.py", line 9 in <module>
"""
LOCKED = """
import ctypes, sys
from megatron.training.fault_tolerance.rank_state import StackFile
file = StackFile()
print(file.path, flush=True)
def hold_the_lock():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
hold_the_lock()
"""

LATE = """
import faulthandler, os
from megatron.training.fault_tolerance import rank_state as locked_stacks
real = faulthandler.unregister
def unregister(number):
    real(number)
    os.kill(os.getpid(), number)
faulthandler.unregister = unregister
locked_stacks.StackFile().close()
"""


def test_what_is_written_is_read_with_the_innermost_last_and_the_main_thread_first() -> None:
    main, other = parse_stacks(WRITTEN)
    assert main["thread"] == "MainThread"
    assert main["frames"] == ["home/me/train.py:9 in <module>", "megatron/core/collectives.py:56 in all_reduce"]
    assert other["frames"][-1] == "lib/python3.11/threading.py:331 in wait"
    assert parse_stacks("") == []


def test_a_process_that_holds_the_lock_shows_where() -> None:
    child = subprocess.Popen([sys.executable, "-c", LOCKED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        path = child.stdout.readline().strip()
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        name = ProcessName("host", this_process().machine, child.pid, started)
        threading.Event().wait(0.3)
        (stack,) = ask_for_stacks(name, path)
        assert stack["frames"][-1] == "<string>:9 in hold_the_lock"
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_the_file_is_gone_when_it_is_closed_and_another_may_follow() -> None:
    for _ in range(2):
        file = StackFile()
        assert Path(file.path).is_file()
        assert ask_for_stacks(this_process(), file.path)[0]["frames"][-1].endswith(" in ask_for_stacks")
        file.close()
        assert not Path(file.path).exists()


def test_a_signal_that_comes_while_the_file_is_closed_ends_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], cwd=REPOSITORY, timeout=60.0).returncode == 0
