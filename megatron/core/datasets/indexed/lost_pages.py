"""A mapped file that becomes shorter: reading what it lost ends the process, and not without a word."""

from __future__ import annotations


def report_lost_pages(rank: int) -> bool:
    """Let this process name the mapped file that lost the page being read, and end with status 2.

    Without the compiled extension the system's signal ends it in silence. Return whether it is there.
    """
    try:
        from megatron.core.datasets.indexed import _bus_error
    except ImportError:
        return False
    _bus_error.install("error: " if rank == 0 else f"error: rank {rank}: ")
    return True
