"""The documentation's site: its navigation, the pages that its build adds, and links to files outside docs/."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.unit.repository.source_tree import REPOSITORY, tracked_files
from tests.unit.repository.test_documents import BUILT_PAGES


class SiteLoader(yaml.SafeLoader):
    """A loader that reads the tag !ENV of MkDocs as a plain list: environment variables and the default value."""


SiteLoader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def navigated(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(part)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    pages = sorted(navigated(settings["nav"]))
    there = {path.relative_to(REPOSITORY / "docs").as_posix() for path in tracked_files("docs/*.md", "docs/**/*.md")}
    assert pages == sorted({page for page in there if not page.startswith("adr/0")} | BUILT_PAGES)


def test_the_build_fails_if_a_link_or_an_anchor_does_not_exist() -> None:
    settings = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    assert settings["validation"]["links"]["anchors"] == settings["validation"]["links"]["not_found"] == "warn"
    (command,) = re.findall(r"-m mkdocs build (.*)", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    # With --quiet MkDocs drops the warnings before --strict counts them.
    assert command.split() == ["--strict"]


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site_links() -> ModuleType:
    return hook("site_links")


def test_the_build_adds_the_pages_of_flags_and_messages() -> None:
    pages = hook("built_pages").PAGES
    assert set(pages) == BUILT_PAGES
    # A page in docs/ with the same name would shadow the built one.
    assert [path for path in pages if (REPOSITORY / "docs" / path).exists()] == []
    assert "# Flags of pretrain_gpt.py\n" in pages["arguments.md"]()
    assert "# Error messages\n" in pages["messages.md"]()


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
