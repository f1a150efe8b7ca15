"""What a program does where a synchronization was removed from it."""

from __future__ import annotations

import dataclasses
from typing import Any

BUILT_IN_NAME = "emulated_cuda_removed_call"


def removed_call(receiver: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """Return what a method returns, without the synchronization that it is called for.

    The receiver and the arguments are evaluated as before. An event is not recorded. An exchange gives its tensor,
    which may not have arrived. Everything else returns nothing.
    """
    if name == "record_event":
        import torch

        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    kind = type(receiver).__name__
    if name == "wait" and kind == "RingExchange":
        return dataclasses.replace(receiver, works=()).wait()
    if name == "wait" and kind == "Gathering":
        receiver._work = None
        return receiver.wait()
    return None


def without_call(source: str, start: int, name_end: int, end: int) -> str:
    """Return the source with one call replaced by a call of `removed_call`; lines stay where they are.

    The call is ``source[start:end]``, and the name of what is called ends at ``name_end``.
    """
    receiver, _, name = source[start:name_end].rpartition(".")
    arguments = source[name_end:end].strip()
    assert arguments.startswith("("), source[start:end]
    rest = arguments[1:]
    separator = "" if rest.strip() == ")" else ", "
    return f"{source[:start]}{BUILT_IN_NAME}({receiver or None}, {name.strip()!r}{separator}{rest}{source[end:]}"
