"""A pytest plugin that runs the tests of a list, in its order, each for at most its number of seconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

LIMITS: dict[str, float] = json.loads(Path(os.environ["MUTATION_TESTS"]).read_text())
"""The seconds that each test may take, by its name."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that hangs."""

    def fail(*_: object) -> None:
        pytest.fail(f"the test hangs: it has run for {LIMITS[item.nodeid]:.0f} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, LIMITS[item.nodeid])
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the list names."""
    places = {name: place for place, name in enumerate(LIMITS)}
    listed = [item for item in items if item.nodeid in places]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
    items[:] = sorted(listed, key=lambda item: places[item.nodeid])
