"""A training imports none of the optional packages that it is not asked for."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.toy_run import toy_args
from tests.harness.training_run import REPOSITORY

# Packages whose modules have another name.
MODULES = {"lm-eval": "lm_eval", "pyyaml": "yaml", "scikit-learn": "sklearn", "nvidia-ml-py": "pynvml"}
NEEDED = {"torch", "numpy", "safetensors", "regex"}
# torch imports these by itself, where it finds them.
OF_TORCH = {"triton", "zstandard"}


def modules_of_extras() -> set[str]:
    lines = [line for line in importlib.metadata.requires("megatron-gpt") or () if "extra ==" in line]
    packages = {re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in lines}
    return {MODULES.get(name, name.replace("-", "_")) for name in packages} - NEEDED - OF_TORCH


@pytest.mark.long
def test_a_training_imports_no_extra(tmp_path: Path) -> None:
    extras = sorted(modules_of_extras())
    assert {"fastapi", "wandb", "matplotlib", "lm_eval"} <= set(extras)
    words = toy_args(tmp_path, "--train-iters 4 --eval-interval 2 --save-interval 2")
    program = (
        "import sys, pretrain_gpt\n"
        f"status = pretrain_gpt.main({words!r})\n"
        f"print('imported:', [name for name in {extras!r} if name in sys.modules])\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
