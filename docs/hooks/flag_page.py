"""Format the page of flags: an anchor for each flag, such as ``arguments.md#--num-layers``, and flags in prose as code.

The build does this, because GitHub would show the anchors as text, and to keep the file small.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# MkDocs loads a hook by its path and does not put the repository on the import path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.scripts.markdown_cells import flags_as_code

PAGE = "arguments.md"
_TERM = re.compile(r"^(`(--?[\w-]+)[^`]*`)$", re.MULTILINE)
_DEFINITION = re.compile(r"^: .*$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Format the page of flags; MkDocs calls this function by its name."""
    return formatted(markdown) if page.file.src_uri == PAGE else markdown


def formatted(markdown: str) -> str:
    """Return the Markdown with an attribute list after each term that is a flag, and with flags in prose as code."""
    markdown = _TERM.sub(r"\1 {#\2}", markdown)
    return _DEFINITION.sub(lambda line: flags_as_code(line[0]), markdown)
