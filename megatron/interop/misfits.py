"""Refuse files whose values are of other kinds than their format says, wherever a reader stumbles over them."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from megatron.core.errors import DamagedCheckpointError

_MISFITS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HasFolder(Protocol):
    """Read files of a folder."""

    folder: Path


Source = TypeVar("Source", bound=HasFolder)


def refuse_misfits(
    reader: Callable[Concatenate[Source, Arguments], Result],
) -> Callable[Concatenate[Source, Arguments], Result]:
    """Let a method that makes sense of a folder's values raise DamagedCheckpointError where they make none.

    The values are a stranger's: each may be of any kind, and what reads them takes them for what they should be.
    """

    def read(self: Source, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return reader(self, *args, **kwargs)
        except _MISFITS as error:
            reason = f"{type(error).__name__}: {reprlib.repr(str(error)[:200])}"
            raise DamagedCheckpointError(f"{self.folder}: its values are not those of its format ({reason})") from error

    functools.update_wrapper(read, reader)
    return read
