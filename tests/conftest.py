"""Settings that must hold before any test imports torch."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Two cores are shared by up to eight ranks; and a fork that follows multi-threaded work can hang for good.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


TESTS = Path(__file__).parent
FULL_BY_DEFAULT = tuple(TESTS / name for name in ("e2e", "golden", "recipes", "unit/repository"))
"""Folders whose tests are full unless they carry a mark; ``make check`` runs those of the repository's own rules."""
DEFAULT_SET = "not full and not long and not gpu"


GPU_SET = "gpu"
EMULATED_DEVICES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the tests that need a GPU."""
    parser.addoption(
        "--emulate-cuda",
        action="store_true",
        help="run on emulated CUDA devices (tests/emulated_cuda): with -m gpu, the GPU tests without a GPU, at small "
        "sizes; tests of speeds are skipped",
    )


def _restart_emulated(config: pytest.Config) -> None:
    """Replace this process by the same command in the emulator's environment, which torch must find when it starts."""
    from tests.emulated_cuda.build import BuildError, built_libraries
    from tests.emulated_cuda.environment import GPU_VARIABLE, emulated_environment

    if os.environ.get(GPU_VARIABLE):
        return
    try:
        built_libraries()
    except BuildError as error:
        raise pytest.UsageError(f"--emulate-cuda: {error}") from error
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # The new process would write into this one's temporary files.
        capture.stop_global_capturing()
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
    os.execve(sys.executable, command, emulated_environment(EMULATED_DEVICES))


def pytest_configure(config: pytest.Config) -> None:
    """Select the default set, or all tests of the named files but the long ones, if no ``-m`` is given."""
    from tests.emulated_cuda.environment import GPU_VARIABLE

    if config.option.emulate_cuda:
        _restart_emulated(config)
    if not config.option.markexpr:
        names_files = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.markexpr = "not long and not gpu" if names_files else DEFAULT_SET
    selects_gpu_tests = re.search(rf"(?<!not )\b{GPU_SET}\b", config.option.markexpr)
    if not selects_gpu_tests and not os.environ.get(GPU_VARIABLE):
        # All other tests run on the CPU of any machine, and so does what they start.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _is_full_by_default(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in FULL_BY_DEFAULT)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a default test in the default run: importing them takes a third of the collection."""
    if collection_path.suffix != ".py":
        return None
    if config.option.markexpr == GPU_SET:
        # A GPU is waiting: other files are not imported.
        return "mark.gpu" not in collection_path.read_text() or None
    if config.option.markexpr != DEFAULT_SET:
        return None
    is_left_out = _is_full_by_default(collection_path) and "mark.default" not in collection_path.read_text()
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests as full that are so by their folder, or by their place after the first default cases."""
    number_of_cases: Counter[str] = Counter()
    for item in items:
        default = item.get_closest_marker("default")
        function = item.nodeid.partition("[")[0]
        number_of_cases[function] += 1
        if default is not None and default.args:
            is_full = number_of_cases[function] > default.args[0]
        else:
            has_mark = any(item.get_closest_marker(name) for name in ("default", "long", "gpu"))
            is_full = _is_full_by_default(item.path) and not has_mark
        if is_full:
            item.add_marker("full")


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
    # `torch.manual_seed` also stores a seed, with a stack trace, for each kind of device that is not started yet.
    torch.default_generator.manual_seed(1234)


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Fail a test that leaves a handler of SIGTERM behind: what a later test forks may wait for ever with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    left = signal.signal(signal.SIGTERM, before)
    assert left == before, f"the test leaves SIGTERM to {left}"
