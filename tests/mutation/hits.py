"""A pytest plugin that says which test runs, for the probes in all processes that the test starts.

Code that a shared fixture executes is noted under the file of the first test that uses the fixture; of a session's
fixtures the other files miss it.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(os.environ["MUTATION_RECORD"])


class _Recorder:
    """The hits of one test process by test and by file; number 0 stands for the time between tests."""

    def __init__(self, tests: list[str]) -> None:
        names = ["", *tests, *dict.fromkeys(file_of(test) for test in tests)]
        self.entered = ""
        self.numbers = {name: number for number, name in enumerate(names)}
        self.path = _FOLDER / f"{os.getpid()}.hits"
        with self.path.open("wb") as file:
            file.truncate(8 + len(self.numbers) * int(os.environ["MUTATION_PLACES"]))
        self.path.with_suffix(".tests").write_text(json.dumps(names))
        self.hits: Any = importlib.import_module("sitecustomize").use(str(self.path))  # of the folder ``hook``

    def enter(self, name: str) -> str:
        """Note later hits under a test or a file, and return what they were noted under."""
        before, self.entered = self.entered, name
        self.hits.enter(self.numbers[name])
        return before


_recorders: list[_Recorder] = []


def file_of(test: str) -> str:
    """Return the file that a test is in, by its name."""
    return test.partition("::")[0]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the file of this process, where it runs tests itself."""
    if not session.config.getoption("numprocesses", None):
        _recorders.append(_Recorder([item.nodeid for item in session.items]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note hits under the test's name, and how long it takes."""
    recorder = _recorders[0]
    recorder.enter(item.nodeid)
    start = time.monotonic()
    try:
        return (yield)
    finally:
        recorder.enter("")
        with (_FOLDER / "seconds.jsonl").open("a") as record:
            record.write(json.dumps([item.nodeid, round(time.monotonic() - start, 3)]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Note hits of a shared fixture under the file of the first test that uses it."""
    recorder = _recorders[0]
    before = recorder.enter(recorder.entered if fixturedef.scope == "function" else file_of(recorder.entered))
    try:
        return (yield)
    finally:
        recorder.enter(before)
