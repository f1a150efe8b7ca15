"""A pytest plugin that runs the tests of a list, in its order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the list names."""
    places = {name: place for place, name in enumerate(json.loads(Path(os.environ["MUTATION_TESTS"]).read_text()))}
    listed = [item for item in items if item.nodeid in places]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
    items[:] = sorted(listed, key=lambda item: places[item.nodeid])
