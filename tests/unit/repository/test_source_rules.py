"""What each source file looks like: names, sizes, docstrings, no global state, nothing unfinished."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Sequence
from pathlib import Path

from tests.unit.repository.source_tree import PACKAGE, REPOSITORY, dotted_name, package_files, relative, syntax_tree

BANNED_FILE_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)\.py$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
LONGEST_FILE = 400
LONG_FOR_A_REASON = re.compile(r"(?m)^# Long because: \S.+")
MOST_FILES = 15
# The scripts that users type, each of which only names its command.
HEAPS_OF_SIBLINGS = ("tools",)
LONGEST_SCRIPT = 15


def test_package_init_files_hold_a_docstring_only() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        body = syntax_tree(path).body
        assert len(body) == 1, relative(path)
        assert ast.get_docstring(syntax_tree(path)), relative(path)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in package_files()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_module_has_a_docstring_and_postponed_annotations() -> None:
    for path in package_files():
        tree = syntax_tree(path)
        assert ast.get_docstring(tree), f"{relative(path)} has no docstring"
        future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        assert future or path.name == "__init__.py", f"{relative(path)} does not postpone annotations"


def test_files_are_named_after_what_they_hold() -> None:
    assert [relative(path) for path in package_files() if BANNED_FILE_NAMES.search(path.name)] == []


def source_files(root: Path) -> list[Path]:
    return sorted(path for name in ("megatron", "tools") for path in (root / name).rglob("*") if is_source(path))


def is_source(path: Path) -> bool:
    return path.suffix in (".py", ".cpp") and path.name not in ("__init__.py", "__main__.py")


def too_long(paths: Sequence[Path]) -> list[Path]:
    """Return the files over 400 lines without a line ``# Long because: REASON`` among the first ten."""
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
    return [
        path
        for path in paths
        if len(lines[path]) > LONGEST_FILE and not LONG_FOR_A_REASON.search("\n".join(lines[path][:10]))
    ]


def too_full(paths: Sequence[Path], root: Path) -> list[str]:
    """Return the folders with more than 15 of the files; folders of siblings may have any number."""
    sizes = collections.Counter(path.parent.relative_to(root).as_posix() for path in paths)
    return [name for name, size in sizes.items() if size > MOST_FILES and name not in HEAPS_OF_SIBLINGS]


def test_no_file_is_long_without_a_reason_and_no_folder_is_a_heap() -> None:
    paths = source_files(REPOSITORY)
    assert [relative(path) for path in too_long(paths)] == []
    assert too_full(paths, REPOSITORY) == []


def test_a_tool_is_the_name_of_a_command_and_no_more() -> None:
    scripts = [path for path in (REPOSITORY / "tools").glob("*.py") if path.name != "generate_argument_docs.py"]
    assert scripts
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_SCRIPT, relative(path)
        assert re.search(rf"^from megatron\.commands\.([a-z]+\.)?{path.stem} import main$", text, re.MULTILINE), path


def test_long_files_and_full_folders_are_found(tmp_path: Path) -> None:
    folder, siblings = tmp_path / "megatron" / "heap", tmp_path / HEAPS_OF_SIBLINGS[0]
    folder.mkdir(parents=True)
    siblings.mkdir(parents=True)
    for number in range(MOST_FILES + 1):
        (folder / f"{number}.py").write_text("\n" * LONGEST_FILE)
        (siblings / f"{number}.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "0.py").write_text("\n" * (LONGEST_FILE + 1))
    (folder / "1.py").write_text("# Long because: it is one table.\n" + "\n" * LONGEST_FILE)
    paths = source_files(tmp_path)
    assert too_long(paths) == [folder / "0.py"]
    assert too_full(paths, tmp_path) == ["megatron/heap"]


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in package_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_state_is_passed_and_never_global() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_configuration_is_read_by_attribute() -> None:
    """A ``getattr`` with a default would hide a field that does not exist."""
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call)
        and dotted_name(node.func) == "getattr"
        and len(node.args) == 3
        and re.search(r"(^|[._])(config|args|arguments)$", dotted_name(node.args[0]) or "")
    ]
    assert found == []
