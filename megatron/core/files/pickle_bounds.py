"""How much a pickle may ask for: memory that grows with the file, values that end, and keys that are soon hashed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_FREE_OPERATIONS = 250_000
_BYTES_AN_OPERATION = 1.8
"""Pickles of checkpoints have more than two."""
_FREE_BYTES = 600 << 20
_BYTES_A_BYTE = 32
"""Objects of checkpoints take some twenty times the room of their pickle."""
_MOST_DEPTH = 100
_MOST_KEY_PARTS = 64
_MOST_REPEATS = 64
_FREE_PARTS = 1 << 20
_BYTES_AN_ITEM = 32


class PickleBudget:
    """Count the operations of a pickle and, roughly, the memory that they ask for."""

    def __init__(self) -> None:
        self.spent = 0
        self.operations = 0

    def begin(self, num_bytes: int, num_read: int) -> None:
        """Count an operation that asks for so many bytes of memory, once ``num_read`` of the pickle are read.

        Raises:
            ValueError: there are more, or they ask for more, than a checkpoint of that size needs.
        """
        self.operations += 1
        if self.operations > _FREE_OPERATIONS + num_read / _BYTES_AN_OPERATION:
            raise ValueError(f"its first {num_read} bytes are {self.operations} operations")
        self.spend(num_bytes, num_read)

    def spend(self, num_bytes: int, num_read: int) -> None:
        """Count memory that is asked for, once ``num_read`` bytes of the pickle are read.

        Raises:
            ValueError: it is more than a checkpoint of that size needs.
        """
        self.spent += num_bytes
        if self.spent > _FREE_BYTES + _BYTES_A_BYTE * num_read:
            raise ValueError(f"its first {num_read} bytes ask for {self.spent} bytes of memory")

    def spend_items(self, values: Iterable[Any], num_read: int) -> None:
        """Count the items of texts and containers that are copied.

        Raises:
            ValueError: as `spend`.
        """
        for value in values:
            if isinstance(value, (str, bytes, list, tuple, dict, set)):
                self.spend(_BYTES_AN_ITEM * len(value), num_read)


def check_key(key: Any) -> None:
    """Refuse what would take long to hash, or nests beyond what can be hashed.

    Raises:
        ValueError: a key has more than 64 parts.
    """
    if not isinstance(key, tuple):
        return
    parts, left = 0, [key]
    while left:
        items = left.pop()
        parts += len(items)
        if parts > _MOST_KEY_PARTS:
            raise ValueError(f"a key of more than {_MOST_KEY_PARTS} parts")
        left += [item for item in items if isinstance(item, tuple)]


def hashable(items: Iterable[Any]) -> Iterator[Any]:
    """Yield what can be hashed soon.

    Raises:
        ValueError: an item cannot.
    """
    for item in items:
        check_key(item)
        yield item


def dict_of(items: Sequence[Any]) -> dict[Any, Any]:
    """Return a dictionary of keys and values in turn.

    Raises:
        ValueError: as `check_key`.
    """
    return dict(zip(hashable(items[::2]), items[1::2]))


def check_value(value: Any, record: type[Any]) -> None:
    """Refuse a value that holds itself, nests too deeply, or repeats its parts so often that no reader gets to its end.

    ``record`` is the class of objects that hold values as ``arguments`` and ``attributes``.

    Raises:
        ValueError: it does.
    """
    kinds = (list, tuple, dict, set, record)
    # For each container that is done: 256 times its parts, each as often as it occurs, and its depth.
    done: dict[int, int] = {}
    is_open: set[int] = set()
    left = [value]
    while left:
        item = left[-1]
        if id(item) in done:
            left.pop()
            continue
        parts = _parts(item, record)
        if id(item) not in is_open:
            is_open.add(id(item))
            if len(is_open) > _MOST_DEPTH:
                raise ValueError(f"values nest more than {_MOST_DEPTH} deep")
            inner = [part for part in parts if isinstance(part, kinds) and id(part) not in done]
            if any(id(part) in is_open for part in inner):
                raise ValueError("a value that holds itself")
            left += inner
            if inner:
                continue
        found = [done[id(part)] for part in parts if isinstance(part, kinds)]
        depth = 1 + max((entry % 256 for entry in found), default=0)
        count = 1 + len(parts) + sum(entry // 256 for entry in found)
        if depth > _MOST_DEPTH:
            raise ValueError(f"values nest more than {_MOST_DEPTH} deep")
        if count > _FREE_PARTS + _MOST_REPEATS * (len(done) + len(parts)):
            raise ValueError("values repeat each other without end")
        done[id(item)] = 256 * count + depth
        is_open.discard(id(item))
        left.pop()


def _parts(value: Any, record: type[Any]) -> list[Any]:
    if isinstance(value, record):
        return [value.arguments, value.attributes]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple, set)) else []
