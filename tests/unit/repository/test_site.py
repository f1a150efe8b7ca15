"""The site of the documentation: its navigation has every page, and links out of docs/ become names of files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.unit.repository.source_tree import REPOSITORY, tracked_files


def navigated(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(part)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(navigated(settings["nav"]))
    there = {path.relative_to(REPOSITORY / "docs").as_posix() for path in tracked_files("docs/*.md", "docs/**/*.md")}
    assert pages == sorted(page for page in there if not page.startswith("adr/0"))


@pytest.fixture(scope="module")
def site_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_links", REPOSITORY / "docs" / "hooks" / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "repository", "text", "shown"),
    [
        ("a.md", None, "[code](../megatron/core)", "code (`megatron/core`)"),
        ("a.md", None, "[megatron/core](../megatron/core)", "megatron/core"),
        ("tutorials/a.md", None, "[code](../../tools/plan.py)", "code (`tools/plan.py`)"),
        ("tutorials/a.md", None, "[page](../b.md#x) ![p](../../p.svg)", "[page](../b.md#x) ![p](../../p.svg)"),
        ("a.md", None, "[code](./scripts/draw.py)", "code (`docs/scripts/draw.py`)"),
        ("a.md", "https://host/team/p/", "[code](../x.py#L3)", "[code](https://host/team/p/blob/main/x.py#L3)"),
    ],
)
def test_a_link_out_of_the_documents(
    site_links: ModuleType, page: str, repository: str | None, text: str, shown: str
) -> None:
    assert site_links.outside_links_named(text, page, repository) == shown
