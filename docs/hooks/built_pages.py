"""Add the pages to the site that are built from the source code and are in no file of docs/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# MkDocs loads a hook by its path and does not put the repository on the import path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.scripts import list_flags, list_refusals

PAGES = {"arguments.md": list_flags.page, "messages.md": list_refusals.page}
"""The functions that return the Markdown of each built page, by the page's path below docs/."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the built pages to the files of the site; MkDocs calls this function by its name."""
    # Only the environment of the site has MkDocs.
    from mkdocs.structure.files import File

    for path, content in PAGES.items():
        files.append(File.generated(config, path, content=content()))
    return files
