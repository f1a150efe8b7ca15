"""Text in the cells of Markdown tables, as it is: GitHub and Python-Markdown show every character of it."""

from __future__ import annotations

import html
import re


def prose(text: str) -> str:
    """Return a text in which no character is Markdown's."""
    text = html.escape(text, quote=False).replace("|", "&#124;")
    # Underscores within words are no emphasis.
    return re.sub(r"[\\*`~\[\]]|(?<![^\W_])_|_(?![^\W_])", lambda match: f"&#{ord(match[0])};", text)


def code(text: str) -> str:
    """Return a text as code.

    Python-Markdown shows the backslash with which GitHub wants a bar escaped: such text is HTML.
    """
    if "|" in text or "\\" in text:
        return f"<code>{prose(text).replace('_', '&#95;')}</code>"
    quotes = "``" if "`" in text else "`"
    pad = " " if quotes == "``" else ""
    return f"{quotes}{pad}{text}{pad}{quotes}"
