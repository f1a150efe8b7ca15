"""What each source file looks like: names, docstrings, no global state, nothing unfinished."""

from __future__ import annotations

import ast
import re

from megatron.cli.__main__ import DEPRECATED
from tests.unit.repository.source_tree import (
    PACKAGE,
    REPOSITORY,
    dotted_name,
    exposed_names,
    package_files,
    relative,
    syntax_tree,
)

BANNED_FILE_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)\.py$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
LONGEST_SCRIPT = 15
# Code that is written for megatron-core imports from these files.
MEGATRON_CORE_FILES = {
    "megatron/core/utils.py",
    "megatron/core/pipeline_parallel/utils.py",
    "megatron/core/tensor_parallel/utils.py",
    "megatron/core/transformer/spec_utils.py",
    "megatron/core/transformer/moe/moe_utils.py",
}


def test_package_init_files_hold_a_docstring_and_the_names_that_the_package_exposes() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        body = syntax_tree(path).body
        assert ast.get_docstring(syntax_tree(path)), relative(path)
        # megatron.core has megatron-core's names: modules, and an alias of one.
        if len(body) == 1 or path.parent == PACKAGE / "core":
            continue
        assert [type(each) for each in body[1:]] == [*[ast.ImportFrom] * 3, ast.If, ast.Assign], relative(path)
        exposed = re.findall(r'^        "(\w+)": \(?([^)]*?)\)?,$', path.read_text(encoding="utf-8"), re.MULTILINE)
        at_run_time = {(name, module) for module, names in exposed for name in re.findall(r"\w+", names)}
        for_type_checkers = {(name, module.rpartition(".")[2]) for name, module in exposed_names(path).items()}
        assert at_run_time == for_type_checkers, relative(path)


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
    named = {relative(path) for path in package_files() if BANNED_FILE_NAMES.search(path.name)}
    assert named == MEGATRON_CORE_FILES


def test_a_tool_is_the_name_of_a_command_and_no_more() -> None:
    scripts = list((REPOSITORY / "tools").glob("*.py"))
    assert scripts
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_SCRIPT, relative(path)
        # The GPU window takes the tests along, which the package has not: its command is theirs.
        name = DEPRECATED.get(path.stem, path.stem).replace("-", "_")
        command = r"tests\.gpu\.window\.command" if name == "gpu_window" else rf"megatron\.cli\.([a-z]+\.)?{name}"
        assert re.search(rf"^from {command} import main$", text, re.MULTILINE), path


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
        # Code written for megatron-core sets and resets its calculator as a variable of the module.
        if isinstance(node, ast.Global) and node.names != ["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"]
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
