"""Measure the memory of a process over many saves in a row."""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

from trained_state import build_state, parse_arguments


def resident_mib() -> float:
    """Return the memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-saves", type=int, default=30)
    parser.add_argument("--async-save", action="store_true")
    options, workload = parse_arguments(parser)
    state = build_state(workload)
    saver = state.saver(options.folder / "run", async_save=options.async_save, keep_last=1)
    before = resident_mib()
    after = []
    for number in range(options.num_saves):
        state.save(saver, number + 1)
        saver.finish()
        after.append(resident_mib())
    options.output.write_text(json.dumps({"before_mib": before, "after_mib": after}))


if __name__ == "__main__":
    main()
