"""Lines of several processes do not get into one another."""

from __future__ import annotations

import io

from megatron.core.console import print_line


class Terminal(io.RawIOBase):
    """Keep what each write brings."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.writes.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_where_output_is_not_buffered() -> None:
    terminal = Terminal()
    # What PYTHONUNBUFFERED makes of standard output.
    stream = io.TextIOWrapper(terminal, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    print_line("first", stream)
    print_line("second", stream)
    assert terminal.writes == [b"first\n", b"second\n"]
