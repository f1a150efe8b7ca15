"""Trees with a patch applied, and the statements that a patch changes."""

from __future__ import annotations

import difflib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.emulated_cuda.environment import REPOSITORY
from tests.emulated_cuda.scenarios.hits import Recording, Statement
from tests.emulated_cuda.scenarios.running import Scenario

_LEFT_OUT = (".git", ".venv", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__")
_PROGRAMS = "megatron/core/ops/triton/"


class PatchError(Exception):
    """Say that a patch does not fit the tree."""


def copy_tree(target: Path) -> None:
    """Copy the working tree without what git and the tools keep in it."""
    shutil.copytree(REPOSITORY, target, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)


def apply_patch(patch: Path, tree: Path) -> list[str]:
    """Apply a patch to a copy of the tree and return the files that it changes.

    Raises:
        PatchError: it does not fit.
    """
    command = ["git", "apply", "--numstat", str(patch)]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    applied = subprocess.run(["git", "apply", str(patch)], cwd=tree, capture_output=True, text=True, check=False)
    if listed.returncode != 0 or applied.returncode != 0:
        raise PatchError(f"{patch.name}: {(applied.stderr or listed.stderr).strip()}")
    return [line.split("\t")[2] for line in listed.stdout.splitlines()]


def restore(files: Sequence[str], tree: Path) -> None:
    """Undo a patch by copies of the files that it has changed."""
    for file in files:
        if (REPOSITORY / file).exists():
            shutil.copyfile(REPOSITORY / file, tree / file)
        else:
            (tree / file).unlink(missing_ok=True)


def changed_lines(file: str, tree: Path) -> Iterator[int]:
    """Yield the lines of a file of the repository that differ in the tree, and those around what is added."""
    path, changed = REPOSITORY / file, tree / file
    old = path.read_text().splitlines() if path.exists() else []
    new = changed.read_text().splitlines() if changed.exists() else []
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield from range(max(1, start), max(end, start + 1) + 1)


def scenarios_of(
    files: Sequence[str],
    tree: Path,
    statements: Sequence[Statement],
    recording: Recording,
    scenarios: Sequence[Scenario],
) -> list[str]:
    """Return the scenarios that execute a changed statement, the quickest first.

    Those come after that execute something else in a changed file. Triton programs are executed by the scenarios that
    interpret them.
    """
    exact: set[str] = set()
    of_file: set[str] = set()
    for file in files:
        own = [number for number, each in enumerate(statements) if each.path == file]
        of_file |= {name for number in own for name in recording.executing(number)}
        for line in changed_lines(file, tree):
            around = [number for number in own if statements[number].line <= line <= statements[number].end_line]
            if around:
                exact |= set(recording.executing(max(around, key=lambda number: statements[number].line)))
        if file.startswith(_PROGRAMS):
            exact |= {scenario.name for scenario in scenarios if scenario.triton}
    seconds = {name: recording.results[name].seconds for name in exact | of_file}
    return [*sorted(exact, key=seconds.__getitem__), *sorted(of_file - exact, key=seconds.__getitem__)]
