"""Which scenarios are run for a patch, and how it is applied and undone."""

from __future__ import annotations

import ast
import difflib
import shutil
from pathlib import Path

import pytest

from tests.emulated_cuda.planted_faults.patches import PatchError, apply_patch, changed_lines, restore, scenarios_of
from tests.emulated_cuda.scenarios.changed_source import REPOSITORY, statements_of
from tests.emulated_cuda.scenarios.hits import Recording, Statement
from tests.emulated_cuda.scenarios.running import Result, Scenario

FILE = "megatron/core/timers.py"
LINE = "            now = self._clock()\n"
CHANGED = "            now = 0.0\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / FILE).parent.mkdir(parents=True)
    shutil.copyfile(REPOSITORY / FILE, tmp_path / "tree" / FILE)
    return tmp_path / "tree"


@pytest.fixture
def line() -> int:
    return (REPOSITORY / FILE).read_text().splitlines(keepends=True).index(LINE) + 1


def write_patch(folder: Path) -> Path:
    old = (REPOSITORY / FILE).read_text()
    before, after = (text.splitlines(keepends=True) for text in (old, old.replace(LINE, CHANGED)))
    (folder / "1.patch").write_text("".join(difflib.unified_diff(before, after, f"a/{FILE}", f"b/{FILE}")))
    return folder / "1.patch"


def test_a_patch_is_applied_and_undone(tmp_path: Path, tree: Path, line: int) -> None:
    assert apply_patch(write_patch(tmp_path), tree) == [FILE]
    assert line in set(changed_lines(FILE, tree))
    assert (tree / FILE).read_text() == (REPOSITORY / FILE).read_text().replace(LINE, CHANGED)
    restore([FILE], tree)
    assert list(changed_lines(FILE, tree)) == []


def test_a_patch_of_other_source_is_an_error(tmp_path: Path, tree: Path) -> None:
    (tree / FILE).write_text("pass\n")
    with pytest.raises(PatchError, match=r"1\.patch: "):
        apply_patch(write_patch(tmp_path), tree)


def test_scenarios_that_execute_a_changed_statement_come_first(tmp_path: Path, tree: Path, line: int) -> None:
    apply_patch(write_patch(tmp_path), tree)
    found = statements_of(ast.parse((REPOSITORY / FILE).read_text()))
    statements = [Statement(FILE, each.lineno, each.end_lineno or each.lineno) for each in found]
    changed = next(number for number, each in enumerate(statements) if each.line == line)
    other = next(number for number, each in enumerate(statements) if each.line > line + 5)
    results = {
        "of the file": Result("", (), 1.0, frozenset({other})),
        "slow": Result("", (), 3.0, frozenset({changed, other})),
        "quick": Result("", (), 2.0, frozenset({changed})),
        "of no statement": Result("", (), 0.5),
    }
    names = scenarios_of([FILE], tree, statements, Recording(results), [Scenario("of no statement", ())])
    assert names == ["quick", "slow", "of the file"]
