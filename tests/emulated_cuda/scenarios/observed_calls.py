"""Calls that note that they are made, and one of which may be left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from mmap import mmap
from typing import Any

BUILT_IN_NAME = "emulated_cuda_call"
NONE = -1


class ObservedCalls:
    """Make calls by their numbers, note these in ``hits``, and leave the call with the number ``removed`` out."""

    def __init__(self, hits: mmap, removed: int = NONE) -> None:
        self._hits = hits
        self._removed = removed

    def __call__(self, number: int, receiver: Any, called: Any, *arguments: Any, **named: Any) -> Any:
        """Call a method of the receiver by its name, or a function where there is no receiver."""
        self._hits[number] = 1
        if number == self._removed:
            return without_waiting(receiver, called)
        function = called if receiver is None else getattr(receiver, called)
        return function(*arguments, **named)


def without_waiting(receiver: Any, called: Any) -> Any:
    """Return what a method returns, without the synchronization that it is called for.

    An event is not recorded. An exchange gives its tensor, which may not have arrived. Everything else returns nothing.
    """
    if called == "record_event":
        import torch

        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    kind = type(receiver).__name__
    if called == "wait" and kind == "RingExchange":
        return dataclasses.replace(receiver, works=()).wait()
    if called == "wait" and kind == "Gathering":
        receiver._work = None
        return receiver.wait()
    return None


def with_observed_calls(source: str, calls: Sequence[tuple[int, int, int, int]]) -> str:
    """Return the source with calls replaced by calls of `ObservedCalls`; lines stay where they are.

    A call is its number, its start, the end of the name of what is called, and its end, as places in the source. No
    call is inside of another one.
    """
    for number, start, name_end, end in sorted(calls, key=lambda call: -call[1]):
        receiver, _, name = source[start:name_end].rpartition(".")
        arguments = source[name_end:end].strip()
        assert arguments.startswith("("), source[start:end]
        called = repr(name.strip()) if receiver else name
        separator = "" if arguments[1:].strip() == ")" else ", "
        text = f"{BUILT_IN_NAME}({number}, {receiver or None}, {called}{separator}{arguments[1:]}"
        source = source[:start] + text + source[end:]
    return source
