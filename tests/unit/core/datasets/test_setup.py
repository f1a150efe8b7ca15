"""Installing goes on without a compiler; with one, no multiplication is fused with an addition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]


def build_into(folder: Path, **environment: str) -> str:
    """Build the extensions and return what was printed."""
    pytest.importorskip("setuptools", reason="the build needs setuptools, which this environment has not")
    command = [sys.executable, "setup.py", "build_ext", "--force"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_broken_compiler_does_not_stop_the_install(tmp_path: Path) -> None:
    printed = build_into(tmp_path, CC="/bin/false", CXX="/bin/false")
    assert 'building extension "megatron.core.datasets._helpers" failed' in printed
    assert not list(tmp_path.rglob("*.so"))


COMPARE = """
import sys
import numpy as np
from megatron.core.datasets.index_builder import NumpyIndexBuilder
sys.path.insert(0, sys.argv[1])
import _helpers
random = np.random.RandomState(3)
for num_datasets in (3, 7, 20):
    for attempt in range(60):
        weights = random.randint(1, 12, size=num_datasets) / 1.0
        weights /= weights.sum()
        for built, wanted in zip(
            _helpers.blending_indices(weights, 400, vector_bits=32), NumpyIndexBuilder().blending_indices(weights, 400)
        ):
            if built.tobytes() != wanted.tobytes():
                sys.exit("another blend")
"""


@pytest.mark.long
@pytest.mark.parametrize("may_fuse", [False, True])
def test_ties_of_blends_break_where_multiplications_are_fused(may_fuse: bool, tmp_path: Path) -> None:
    information = Path("/proc/cpuinfo")
    if not information.is_file() or " fma " not in information.read_text():
        pytest.skip("this processor is not known to have fused multiplications")
    compiler = tmp_path / "compiler"
    overruled = "-ffp-contract=fast" if may_fuse else ""  # the last flag wins
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -mfma {overruled}\n')
    compiler.chmod(0o755)
    build_into(tmp_path, CXX=str(compiler))
    (library,) = (tmp_path / "lib").rglob("_helpers*.so")
    command = [sys.executable, "-c", COMPARE, str(library.parent)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ("another blend" if may_fuse else "")
    assert done.returncode == int(may_fuse)
