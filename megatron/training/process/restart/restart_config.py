"""Restart without relaunch: whether dead ranks are replaced, how long that may take, and which copies are kept."""

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
    non_persistent_save_interval: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """Copy what a checkpoint holds into the machines' memory every so many iterations, for restarts: two copies of all
    that a rank holds."""
    non_persistent_local_ckpt_dir: str = flag("/dev/shm", metavar="DIR", needs="non_persistent_save_interval")
    """Folder of each machine that its copies are kept in, in a folder that goes when the launcher ends."""
    replication: bool = flag(False, needs="non_persistent_save_interval")
    """Send each copy to another rank, which keeps it too: the machine of a rank may then be lost."""
    replication_jump: int | None = flag(None, bounds=POSITIVE, needs="replication")
    """Ranks between a rank and the one that keeps its copy too; by default those of a machine, or 1 where there is
    one."""
