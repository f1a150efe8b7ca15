"""What the tests of a run's checkpoints share."""

from __future__ import annotations

import pytest


@pytest.fixture
def lines() -> list[str]:
    """Return where the lines of a log are collected."""
    return []
