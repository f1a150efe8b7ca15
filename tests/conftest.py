"""Settings that must hold before any test imports torch."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest

# Two cores are shared by up to eight ranks; and a fork that follows multi-threaded work can hang for good.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests say themselves which device they want; the default ones run on the CPU of any machine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, and never among what is there then.

    The trees of all test files are millions of objects, and looking through them takes a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    """Draw the same numbers in each run: a test that does not seed itself starts from one state, wherever it runs.

    ``random`` is left alone, because test processes beside each other draw their ports from it.
    """
    import numpy as np
    import torch

    np.random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Fail a test that leaves a handler of SIGTERM behind: what a later test forks may wait for ever with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    left = signal.signal(signal.SIGTERM, before)
    assert left == before, f"the test leaves SIGTERM to {left}"
