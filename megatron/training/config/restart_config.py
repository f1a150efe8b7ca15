"""Restart without relaunch: whether a rank that dies is replaced in a run that goes on, and how long that may take."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig(Config, role="run"):
    """Hold what is done about ranks that die: nothing, or a replacement of theirs in new process groups."""

    inprocess_restart: bool = False
    """Replace a rank that dies by a new process, and go on in new process groups: the other ranks keep theirs."""
    inprocess_max_iterations: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """End the run at the next failure after this many restarts; by default they are not limited."""
    inprocess_monitor_thread_interval: float = flag(1.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds between two looks of a rank at whether the others restart."""
    inprocess_barrier_timeout: float = flag(120.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that ranks wait for the others before they train, at the start and at each restart."""
    inprocess_hard_timeout: float = flag(90.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that a rank may take to leave the step of a failed run; then it is replaced as well."""
    inprocess_empty_cuda_cache: bool = flag(False, needs="inprocess_restart")
    """Give unused CUDA memory back at each restart."""
