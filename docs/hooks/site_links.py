"""Let the pages of the site name the files of the repository that they link to.

A page in docs/ links to code, tests and examples beside it, which the site does not hold. With ``repo_url`` in
mkdocs.yml such a link leads there; without it the text stays, with the path of the file behind it.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\((\.\.?/[^)#\s]+)(#[^)\s]*)?\)")

# The site leaves out these folders of docs/.
_NOT_PAGES = ("docs/hooks/", "docs/scripts/")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace the links of a page that leave the folder of the documents; MkDocs calls this by its name."""
    return outside_links_named(markdown, page.file.src_uri, config.repo_url)


def outside_links_named(markdown: str, page: str, repository: str | None) -> str:
    """Replace the links of ``page``, a path below docs/, that lead out of docs/."""

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/") and not path.startswith(_NOT_PAGES):
            return link.group(0)
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
