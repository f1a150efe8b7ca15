"""The trees of all sources are millions of objects: no collection of garbage looks through them meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.unit.repository.source_tree import syntax_tree


@pytest.fixture(autouse=True, scope="package")
def _keep_trees_from_collections() -> Iterator[None]:
    gc.disable()
    yield
    syntax_tree.cache_clear()
    gc.enable()
