"""Escape text for Markdown, so that GitHub and Python-Markdown show each of its characters."""

from __future__ import annotations

import html
import re

_FLAG = re.compile(r"(?<![\w`-])--[a-z](?:[\w-]*\w)?")


def prose(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    text = html.escape(text, quote=False).replace("|", "&#124;")
    # Underscores within words are no emphasis.
    return re.sub(r"[\\*`~\[\]]|(?<![^\W_])_|_(?![^\W_])", lambda match: f"&#{ord(match[0])};", text)


def code(text: str) -> str:
    """Format a text as code for a cell of a table.

    GitHub needs an escaped bar, but Python-Markdown shows the backslash: such text becomes HTML.
    """
    if "|" in text or "\\" in text:
        return f"<code>{prose(text).replace('_', '&#95;')}</code>"
    quotes = "``" if "`" in text else "`"
    pad = " " if quotes == "``" else ""
    return f"{quotes}{pad}{text}{pad}{quotes}"


def flags_as_code(markdown: str) -> str:
    """Format the flags in prose as code, which a browser does not break after a hyphen."""
    return _FLAG.sub(r"`\g<0>`", markdown)
