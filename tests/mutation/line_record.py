"""A pytest plugin that says which test runs, for the recorders of lines in the processes that the test starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import sitecustomize  # the recorder of this process, which the folder ``hook`` on PYTHONPATH brings

_FOLDER = Path(os.environ["MUTATION_RECORD"])
_CURRENT = _FOLDER / f"current.{os.getpid()}"
os.environ["MUTATION_TEST_FILE"] = str(_CURRENT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record lines under the test's name, and how long it takes."""
    _CURRENT.write_text(item.nodeid)
    sitecustomize.recorder.switch_test(item.nodeid)
    start = time.monotonic()
    try:
        return (yield)
    finally:
        _CURRENT.write_text("")
        sitecustomize.recorder.switch_test("")
        with (_FOLDER / "seconds.jsonl").open("a") as record:
            record.write(json.dumps([item.nodeid, round(time.monotonic() - start, 3)]) + "\n")
