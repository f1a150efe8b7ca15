"""Turn the emulator on in a Python process whose environment asks for it. Python imports this module at its start."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_REPOSITORY = _FOLDER.parents[2]


def _run_next_sitecustomize() -> None:
    """Run the module of this name that the environment would have had without this one."""
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


_run_next_sitecustomize()
if os.environ.get("EMULATED_CUDA"):
    if str(_REPOSITORY) not in sys.path:
        sys.path.append(str(_REPOSITORY))
    from tests.emulated_cuda.activation import activate

    activate()
