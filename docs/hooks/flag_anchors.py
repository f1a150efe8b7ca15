"""Give each flag on the page of flags an anchor with the flag's name, such as ``arguments.md#--num-layers``.

The build adds the anchors, because GitHub would show them as text.
"""

from __future__ import annotations

import re
from typing import Any

PAGE = "arguments.md"
_TERM = re.compile(r"^(`(--?[\w-]+)[^`]*`)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Add the anchors to the page of flags; MkDocs calls this function by its name."""
    return with_anchors(markdown) if page.file.src_uri == PAGE else markdown


def with_anchors(markdown: str) -> str:
    """Return the Markdown with an attribute list after each line that is a flag."""
    return _TERM.sub(r"\1 {#\2}", markdown)
