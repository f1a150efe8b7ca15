"""Note which tests execute the places of mutants, if MUTATION_RECORD names a folder; Python imports this at its start.

Each test process has a file of bytes: the number of the test that runs now (8 bytes), then a byte per test and place.
The processes that it starts map the same file, so that no process has to write anything when it ends.
"""

from __future__ import annotations

import os

if os.environ.get("MUTATION_RECORD"):
    import builtins
    import mmap
    import struct

    class Hits:
        """The bytes of one test process."""

        def __init__(self, path: str, num_places: int) -> None:
            self.num_places = num_places
            with open(path, "r+b") as file:
                self.bytes = mmap.mmap(file.fileno(), 0)

        def enter(self, test: int) -> None:
            """Note later hits under this test."""
            self.bytes[:8] = struct.pack("q", test)

        def hit(self, place: int) -> None:
            """Note that the running test executes this place."""
            (test,) = struct.unpack("q", self.bytes[:8])
            self.bytes[8 + test * self.num_places + place] = 1

    def use(path: str) -> Hits:
        """Note the hits of this process, and of those that it starts, in a file."""
        hits = Hits(path, int(os.environ["MUTATION_PLACES"]))
        builtins.mutation_probe = hits.hit  # type: ignore[attr-defined]
        os.environ["MUTATION_HITS"] = path
        return hits

    if "MUTATION_HITS" in os.environ:
        use(os.environ["MUTATION_HITS"])
