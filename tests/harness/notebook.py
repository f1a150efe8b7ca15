"""Run the code cells of a notebook in order, without Jupyter.

``python -m tests.harness.notebook FILE`` stores what the cells print in the notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def read_notebook(path: Path) -> dict[str, Any]:
    """Return the contents of a notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any]) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Run the code cells in the current folder; return the outputs of each, and the variables at the end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run(cell, names, number) for number, cell in enumerate(code_cells(notebook), start=1)], names


def _run(cell: dict[str, Any], names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse("".join(cell["source"]))
    shown = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if shown is not None:
            value = eval(compile(shown, f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def main(path: Path) -> None:
    """Run a notebook in an empty folder, and store the outputs."""
    notebook, here = read_notebook(path), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outputs, _ = run_cells(notebook)
        os.chdir(here)
    for number, (cell, found) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        cell |= {"outputs": found, "execution_count": number}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
