"""Cases of parametrized tests that only the long tests run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def some_long(cases: Collection[Any], usual: Collection[Any]) -> list[object]:
    """Return the cases as parameters, the unusual ones for the long tests. Tuples are arguments."""
    return [
        case if case in usual else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
