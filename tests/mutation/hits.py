"""A pytest plugin that says which test runs, for the probes in all processes that the test starts."""

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
    """The hits of one test process; test 0 stands for the time between tests."""

    def __init__(self, names: list[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(["", *names])}
        self.path = _FOLDER / f"{os.getpid()}.hits"
        with self.path.open("wb") as file:
            file.truncate(8 + len(self.numbers) * int(os.environ["MUTATION_PLACES"]))
        self.path.with_suffix(".tests").write_text(json.dumps(["", *names]))
        self.hits: Any = importlib.import_module("sitecustomize").use(str(self.path))  # of the folder ``hook``


_recorders: list[_Recorder] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the file of this process, where it runs tests itself."""
    if not session.config.getoption("numprocesses", None):
        _recorders.append(_Recorder([item.nodeid for item in session.items]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note hits under the test's name, and how long it takes."""
    recorder = _recorders[0]
    recorder.hits.enter(recorder.numbers[item.nodeid])
    start = time.monotonic()
    try:
        return (yield)
    finally:
        recorder.hits.enter(0)
        with (_FOLDER / "seconds.jsonl").open("a") as record:
            record.write(json.dumps([item.nodeid, round(time.monotonic() - start, 3)]) + "\n")
