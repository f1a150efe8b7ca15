"""Documents and scripts: links, commands, the picture of the architecture."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.unit.repository.source_tree import PACKAGE, REPOSITORY, relative, tracked_files

DOCS = REPOSITORY / "docs"
BUILT_PAGES = {"arguments.md", "messages.md"}
"""Pages that the build of the site adds: other pages may link to them, files outside docs/ may not."""


def test_the_picture_of_the_architecture_has_every_package() -> None:
    (picture,) = re.findall(r"```\n(.*?)```", (REPOSITORY / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    files = [path.relative_to(folder) for folder in (PACKAGE, PACKAGE / "core") for path in folder.rglob("*.py")]
    rooms = {path.parts[0] for path in files if len(path.parts) > 1}
    assert rooms - set(re.findall(r"\w+", picture)) == set()


def test_shell_scripts_parse_and_stop_at_errors() -> None:
    # Users' own scripts are data, word for word.
    scripts = [path for path in tracked_files("*.sh", ".ci/run") if path.parent.name != "user_scripts"]
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
                path = (document.parent / target).resolve()
                is_built = DOCS in document.parents and path.parent == DOCS and path.name in BUILT_PAGES
                assert path.exists() or is_built, f"{relative(document)} links to {target}"
        for command in re.findall(r"\b(?:bash|python) ([\w./-]+\.(?:sh|py))", text):
            written = f"cat > {command} <<" in text
            assert written or (REPOSITORY / command).exists(), f"{relative(document)} runs {command}"


@pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for POSIX shells")
def test_scripts_with_a_first_line_are_executable() -> None:
    for path in tracked_files("*.sh", ".ci/run"):
        assert path.stat().st_mode & 0o111, f"{relative(path)} is not executable"
