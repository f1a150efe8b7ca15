"""Text that UTF-8 can hold."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.errors import TokenizerError


def require_unicode(texts: Sequence[str]) -> None:
    """Refuse half characters, which an escape such as ``\\ud800`` puts into a str.

    The engines differ over them, and one engine's versions do too: an error, U+FFFD, or a crash.

    Raises:
        TokenizerError: a text holds a lone surrogate.
    """
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"the text is not valid Unicode: character {error.start} is the lone surrogate "
                    f"U+{ord(text[error.start]):04X}"
                ) from error
