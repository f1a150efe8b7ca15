"""Declared dependencies and pinned versions."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.unit.repository.source_tree import REPOSITORY, package_files, relative, used_names


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
