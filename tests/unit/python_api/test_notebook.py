"""The notebook of the Python API runs, and its stored outputs are those of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.notebook import code_cells, read_notebook, run_cells
from tests.harness.training_run import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "gpt_from_python.ipynb"
LOSSES = re.compile(r"TrainingHistory\(iterations (\d+) to (\d+), loss ([\d.]+) to ([\d.]+)\)")


def test_the_notebook_runs_and_its_outputs_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    notebook = read_notebook(NOTEBOOK)
    outputs, names = run_cells(notebook)
    stored = [cell["outputs"] for cell in code_cells(notebook)]
    assert [[each["output_type"] for each in cell] for cell in stored] == [
        [each["output_type"] for each in cell] for cell in outputs
    ]
    kept, fresh = LOSSES.findall(str(stored)), LOSSES.findall(str(outputs))
    assert len(kept) == 2
    for old, new in zip(kept, fresh, strict=True):
        assert old[:2] == new[:2]
        # Other CPUs round differently.
        assert [float(loss) for loss in old[2:]] == pytest.approx([float(loss) for loss in new[2:]], rel=0.1)
    assert names["history"].losses[-1] < 1.0
    assert names["model"].generate("after two comes", 2, temperature=0) == "after two comes three."
    assert not re.search(r"(?<![\w.])/\w+/", str(stored)), "the outputs contain a path"


def test_the_notebook_has_the_format_of_notebooks() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
