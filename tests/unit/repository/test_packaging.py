"""Declared dependencies and pinned versions."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.unit.repository.source_tree import REPOSITORY, package_files, relative, tracked_files, used_names

BINARY_SUFFIXES = {".png", ".gz", ".zip", ".pt", ".bin", ".idx", ".npz", ".safetensors"}


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


def test_all_is_every_extra_but_those_with_a_service_or_a_device() -> None:
    metadata = project_metadata()
    (everything,) = map(Requirement, metadata["optional-dependencies"]["all"])
    assert everything.name == metadata["name"]
    others = {"all", "dev", "docs", "gpu", "kernels", "loggers", "object-storage", "qlora"}
    assert everything.extras | others == set(metadata["optional-dependencies"])
    pinned = {requirement.name: requirement.specifier for requirement in pinned_requirements("dev")}
    for extra in everything.extras:
        for requirement in map(Requirement, metadata["optional-dependencies"][extra]):
            for pin in pinned.get(requirement.name, ()):
                assert requirement.specifier.contains(pin.version), f"{requirement} excludes the pinned {pin.version}"


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
    for extra in (
        "gpu",
        "qlora",
        "kernels",
        "tokenizers-extra",
        "preprocessing",
        "data-cleaning",
        "conversion",
        "hub",
        "plotting",
        "adopt",
        "object-storage",
        "serve",
        "loggers",
        "eval",
    ):
        declared |= {Requirement(text).name for text in project_metadata()["optional-dependencies"][extra]}
    distributions = importlib.metadata.packages_distributions()
    known = {name.replace("-", "_") for name in declared}
    known |= {"apex", "deep_ep", "flash_attn_interface", "transformer_engine", "megatron", "pretrain_gpt", "__future__"}
    for path in package_files():
        for name in {name.partition(".")[0] for name in used_names(path)} - sys.stdlib_module_names:
            owners = {owner.replace("-", "_").lower() for owner in distributions.get(name, [name])}
            assert owners & known or name in known, f"{relative(path)} imports the undeclared {name}"


def pip_commands() -> Iterator[tuple[Path, list[str]]]:
    """Yield each ``pip install`` in a tracked text file, as the file and the words after it."""
    for path in tracked_files():
        if path.is_file() and path.suffix not in BINARY_SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            for command in re.findall(r"\bpip3?[\"',]* +[\"']?install\b[\"',]*([^\n`|#;&]*)", text):
                yield path, [word.strip("\"'()").rstrip(",.:") for word in command.split()]


def test_no_document_installs_the_project_from_the_package_index() -> None:
    """The project is not published: its name on the index is free for a stranger's package."""
    unpublished = {project_metadata()["name"], "megatron"}
    commands = list(pip_commands())
    assert commands
    found = [
        f"{relative(path)}: pip install {' '.join(words)}"
        for path, words in commands
        if any(re.split(r"[\[=<>~!]", word.lower().replace("_", "-"))[0] in unpublished for word in words)
    ]
    assert found == []


def test_every_extra_that_a_document_installs_is_declared() -> None:
    declared = set(project_metadata()["optional-dependencies"])
    named = {
        (relative(path), extra)
        for path, words in pip_commands()
        for word in words
        if word.startswith(".[")
        for extra in word.removeprefix(".[").rstrip("]").split(",")
    }
    assert named
    assert sorted((path, extra) for path, extra in named if extra not in declared) == []


# Makes environments without venv and pip; everything else is done by the interpreter of the tests.
BARE_PYTHON = f"""#!/usr/bin/env bash
case ${{2:-}} in
    venv) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    pip) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_an_environment_is_made_again_when_any_compiled_file_changes(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "requirements"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, tmp_path / name)
    sources = [tmp_path / "megatron" / name for name in ("kernel.cpp", "room/table.h")]
    for path in sources:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("int before;")
    python = tmp_path / "python"
    python.write_text(BARE_PYTHON)
    python.chmod(0o755)

    def installs() -> bool:
        command = ["bash", str(tmp_path / "requirements" / "install.sh"), ".venv", "dev"]
        result = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)}, capture_output=True)
        assert result.returncode == 0, result.stderr
        return bool(result.stdout)

    assert installs()
    assert not installs()
    for path in sources:
        path.write_text("int after;")
        assert installs(), f"a change of {path.name} is not seen"
        assert not installs()
