"""Rules of the repository that no off-the-shelf checker knows; part of ``make check``."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "megatron"

# Which files may touch what. A module covers everything below it; imports for type checkers only are free.
OWNERS: dict[str, tuple[str, ...]] = {
    "argparse": (
        "megatron/training/config/arguments.py",
        "megatron/commands/",
        "megatron/interop/megatron_torch/pickle_writer.py",
    ),
    "os.environ": (
        "megatron/commands/preprocess_data.py",
        "megatron/commands/verify_parallelism.py",
        "megatron/training/process/initialize.py",
        "megatron/core/device.py",
        "megatron/interop/huggingface/parallelize.py",
    ),
    "os.getenv": ("megatron/training/process/initialize.py", "megatron/core/device.py"),
    "torch.cuda": ("megatron/core/device.py", "megatron/core/timers.py"),
    "torch.distributed": (
        "megatron/core/collectives.py",
        "megatron/core/distributed/param_and_grad_buffer.py",
        "megatron/core/parallel_state.py",
        "megatron/core/pipeline_parallel/p2p_communication.py",
        "megatron/interop/huggingface/parallelize.py",
        "megatron/interop/torch_dist/metadata_writer.py",
        "megatron/training/process/initialize.py",
        "megatron/verification/collective_recorder.py",
        "megatron/verification/worker_pool.py",
    ),
    # Optional or heavy packages: each is known to one file, so that its absence is handled in one place.
    "apex": ("megatron/core/kernels/apex.py",),
    "flash_attn": ("megatron/core/kernels/flash_attn.py",),
    # What it computes is compared with: in tests, and after a conversion where that is asked for.
    "transformers": ("megatron/conversion/conversion_check.py",),
    # Checkpoints hold no pickles, Megatron's excepted: those are written by one file and never run.
    "pickle": ("megatron/interop/megatron_torch/pickle_writer.py",),
    # The entries of torch.distributed.checkpoint's files are what it makes of tensors.
    "torch.save": ("megatron/interop/torch_dist/chunk_file.py",),
    "torch.load": (),
}

# These run before torch is imported, so that a wrong command line or wrong data is answered at once.
TORCH_FREE_PATTERNS = (
    "megatron/core/errors.py",
    "megatron/core/config_base.py",
    "megatron/core/**/*_config.py",
    "megatron/core/datasets/blended_dataset_builder.py",
    "megatron/core/tokenizers/*.py",
    "megatron/core/dist_checkpointing/index.py",
    "megatron/training/checkpointing/folder.py",
    "megatron/training/data/data_plan.py",
    "megatron/training/process/initialize.py",
    "megatron/training/process/preflight.py",
    "megatron/training/process/refusal.py",
    "megatron/training/config/*.py",
    "megatron/training/config/checks/*.py",
)

BANNED_FILE_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)\.py$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")

LONGEST_FILE = 400
LONG_FOR_A_REASON = re.compile(r"(?m)^# Long because: \S.+")
MOST_FILES = 15
# Siblings, one for each family of models.
HEAPS_OF_SIBLINGS = ("megatron/interop/huggingface",)


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_for_type_checkers(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that is not under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if is_for_type_checkers(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from runtime_nodes(statement)
            continue
        yield child
        yield from runtime_nodes(child)


def dotted_name(node: ast.AST) -> str | None:
    """Return ``a.b.c`` for an attribute chain that starts at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def used_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports or reaches through its imports, aliases resolved."""
    nodes = list(runtime_nodes(syntax_tree(path)))
    aliases: dict[str, str] = {}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and (dotted_name(node.func) or "").endswith("import_module"):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    for node in nodes:
        name = dotted_name(node)
        if name is not None:
            first, _, rest = name.partition(".")
            if first in aliases:
                names.add(f"{aliases[first]}.{rest}" if rest else aliases[first])
    return names


def offences(path: Path) -> list[str]:
    """Return what a file touches that belongs to others."""
    names = used_names(path)
    return [
        f"{relative(path)} uses {owned}, which only {' and '.join(owners) or 'nobody'} may"
        for owned, owners in OWNERS.items()
        if not relative(path).startswith(owners or ("nobody",))
        and any(name == owned or name.startswith(f"{owned}.") for name in names)
    ]


def test_third_party_modules_are_touched_by_their_owners_only() -> None:
    assert [offence for path in package_files() for offence in offences(path)] == []


@pytest.mark.parametrize(
    ("source", "owned"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda"),
        ("import torch.distributed as dist\ndist.barrier()", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("from os import environ as e\ne['A']", "os.environ"),
        ("import os as system\nsystem.getenv('A')", "os.getenv"),
        ("import importlib\nimportlib.import_module('flash_attn.ops')", "flash_attn"),
        ("def f():\n    import argparse", "argparse"),
    ],
)
def test_ownership_is_seen_through_aliases(tmp_path: Path, monkeypatch, source: str, owned: str) -> None:
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [offence.split(", ")[0] for offence in offences(path)] == [f"module.py uses {owned}"]


def test_imports_for_type_checkers_are_free(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed as dist\n")
    assert offences(path) == []


def imports_among(paths: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return which of these modules each imports, within functions and for type checkers as well."""
    graph: dict[str, list[str]] = {}
    for name, path in paths.items():
        found: set[str] = set()
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (submodules & paths.keys()) or {node.module}
        graph[name] = sorted((found & paths.keys()) - {name})
    return graph


def find_cycle(graph: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the nodes of a cycle; none where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return tuple(error.args[1])
    return ()


def test_no_modules_import_each_other_in_a_cycle() -> None:
    names = {
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in package_files()
    }
    graph = imports_among(names)
    assert graph["megatron.commands.preprocess_data"]
    assert find_cycle(graph) == ()


def test_a_cycle_of_imports_is_found_within_functions(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.py" for name in ("a", "b", "c")}
    paths["a"].write_text("import b")
    paths["b"].write_text("def f():\n    from c import g")
    paths["c"].write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import f")
    assert set(find_cycle(imports_among(paths))) == {"a", "b", "c"}
    paths["c"].write_text("import os")
    syntax_tree.cache_clear()
    assert find_cycle(imports_among(paths)) == ()


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


def test_long_files_and_full_folders_are_found(tmp_path: Path) -> None:
    folder, siblings = tmp_path / "tools", tmp_path / HEAPS_OF_SIBLINGS[0]
    folder.mkdir()
    siblings.mkdir(parents=True)
    for number in range(MOST_FILES + 1):
        (folder / f"{number}.py").write_text("\n" * LONGEST_FILE)
        (siblings / f"{number}.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "0.py").write_text("\n" * (LONGEST_FILE + 1))
    (folder / "1.py").write_text("# Long because: it is one table.\n" + "\n" * LONGEST_FILE)
    paths = source_files(tmp_path)
    assert too_long(paths) == [folder / "0.py"]
    assert too_full(paths, tmp_path) == ["tools"]


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


def test_configuration_and_its_checks_import_no_torch() -> None:
    paths = sorted({path for pattern in TORCH_FREE_PATTERNS for path in REPOSITORY.glob(pattern)})
    modules = [module_name(path) for path in paths]
    assert "megatron.core.errors" in modules
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def project_metadata() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pinned_requirements(name: str) -> list[Requirement]:
    requirements = []
    for line in (REPOSITORY / "requirements" / f"{name}.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            requirements += pinned_requirements(text.removeprefix("-r ").removesuffix(".txt"))
        elif text:
            requirements.append(Requirement(text))
    return requirements


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_pinned_versions_are_exact_and_within_the_declared_ranges(name: str) -> None:
    metadata = project_metadata()
    declared = metadata["dependencies"] + (metadata["optional-dependencies"]["dev"] if name == "dev" else [])
    pinned: dict[str, list[str]] = {}
    for requirement in pinned_requirements(name):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", str(requirement)
        pinned.setdefault(requirement.name, []).append(specifier.version)
    for requirement in map(Requirement, declared):
        assert requirement.name in pinned, f"requirements/{name}.txt does not pin {requirement.name}"
        for version in pinned[requirement.name]:
            assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_building_does_not_need_torch() -> None:
    """torch in an isolated build environment would mean a download of gigabytes for one small extension."""
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    names = {Requirement(text).name for text in document["build-system"]["requires"]}
    assert "torch" not in names
    assert names <= {requirement.name for requirement in pinned_requirements("runtime")}


def test_no_accelerated_package_is_a_dependency() -> None:
    names = {Requirement(text).name for text in project_metadata()["dependencies"]}
    assert names.isdisjoint({"apex", "flash-attn", "transformer-engine", "triton"})


def test_nothing_imported_at_run_time_is_undeclared() -> None:
    declared = {Requirement(text).name for text in project_metadata()["dependencies"]}
    for extra in ("gpu", "tokenizers-extra", "preprocessing", "data-cleaning", "conversion", "plotting", "adopt"):
        declared |= {Requirement(text).name for text in project_metadata()["optional-dependencies"][extra]}
    distributions = importlib.metadata.packages_distributions()
    known = {name.replace("-", "_") for name in declared} | {"apex", "megatron", "pretrain_gpt", "__future__"}
    for path in package_files():
        for name in {name.partition(".")[0] for name in used_names(path)} - sys.stdlib_module_names:
            owners = {owner.replace("-", "_").lower() for owner in distributions.get(name, [name])}
            assert owners & known or name in known, f"{relative(path)} imports the undeclared {name}"


def tracked_files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]


def test_the_picture_of_the_architecture_has_every_room() -> None:
    (picture,) = re.findall(r"```\n(.*?)```", (REPOSITORY / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    files = [path.relative_to(folder) for folder in (PACKAGE, PACKAGE / "core") for path in folder.rglob("*.py")]
    rooms = {path.parts[0].removesuffix(".py") for path in files} - {"__init__"}
    assert rooms - set(re.findall(r"\w+", picture)) == set()


def test_shell_scripts_parse_and_stop_at_errors() -> None:
    scripts = tracked_files("*.sh", ".ci/run")
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert "set -e" in script.read_text(), f"{relative(script)} goes on after an error"


def test_links_and_commands_of_the_documents_name_files_that_exist() -> None:
    documents = tracked_files("*.md")
    assert documents
    for document in documents:
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{relative(document)} links to {target}"
        for command in re.findall(r"\b(?:bash|python) ([\w./-]+\.(?:sh|py))", text):
            assert (REPOSITORY / command).exists(), f"{relative(document)} runs {command}"


@pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for POSIX shells")
def test_scripts_with_a_first_line_are_executable() -> None:
    for path in tracked_files("*.sh", ".ci/run"):
        assert path.stat().st_mode & 0o111, f"{relative(path)} is not executable"
