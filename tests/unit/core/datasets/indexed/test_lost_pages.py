"""A data file that is cut while it is mapped: named before the read, and where the read itself meets the gap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, report_lost_pages
from megatron.core.errors import DataError
from tests.harness.training_run import REPOSITORY

PROGRAM = """
import os, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset import report_lost_pages
assert report_lost_pages(int(sys.argv[2])), "the extension is not built: see CONTRIBUTING.md"
view = IndexedDataset(sys.argv[1]).get(0)
os.truncate(sys.argv[1] + ".bin", 100)
exec(sys.argv[3])
"""
SUM = "print(int(view.sum()))"
SUM_OF_SHARED_MEMORY = """
import mmap
with open("/dev/shm/" + str(os.getpid()), "w+b") as file:
    os.unlink(file.name)
    file.truncate(8192)
    shared = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    print(shared[5000])
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    """Return a data set of a few pages, on a disk: files in shared memory are not reported."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "data")
        with IndexedDatasetBuilder(path, "i4", False) as builder:
            builder.add_document(np.arange(8192), [8192], ())
            builder.finalize()
        yield str(path)


def read(prefix: str, rank: int, program: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, prefix, str(rank), program]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("rank", "who"), [(0, "error: "), (3, "error: rank 3: ")])
def test_reading_a_lost_page_ends_the_process_with_a_line(rank: int, who: str, prefix: str) -> None:
    result = read(prefix, rank, SUM)
    assert result.returncode == 2
    assert result.stderr == (
        f"{who}{prefix}.bin became shorter while it was being read, or its disk failed; bring the whole file back and "
        "start again\n"
    )


def test_in_a_thread_as_well(prefix: str) -> None:
    result = read(prefix, 0, f"import threading\nthreading.Thread(target=lambda: {SUM}).start()")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no shared memory here")
def test_what_is_no_file_of_ours_ends_as_ever(prefix: str) -> None:
    result = read(prefix, 0, SUM_OF_SHARED_MEMORY)
    assert (result.returncode, result.stderr) == (-signal.SIGBUS, "")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 100, 32764])
def test_a_cut_is_seen_before_the_next_read(num_bytes: int, mapped: bool, prefix: str) -> None:
    dataset = IndexedDataset(prefix, mmap_bin_files=mapped)
    assert dataset.get(0, 8190).tolist() == [8190, 8191]
    os.truncate(f"{prefix}.bin", num_bytes)
    with pytest.raises(DataError, match=r"data\.bin became shorter than the 32768 bytes that it had$"):
        dataset.get(0, 8190)


def test_a_process_without_the_extension_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGBUS)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets._bus_error", None)
    assert not report_lost_pages(0)
    assert signal.getsignal(signal.SIGBUS) == before
