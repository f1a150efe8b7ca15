"""Why no scenario executes some statements that only CUDA devices execute."""

from __future__ import annotations

ARGUED: dict[str, str] = {}
"""By ``path:function``, or the start of it: the reason."""


def reason(key: str) -> str | None:
    """Return why the statements of a function are not executed, or None."""
    return next((text for start, text in ARGUED.items() if key.startswith(start)), None)
