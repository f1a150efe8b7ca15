"""In-process restart: if a rank is lost, the ranks abort their process groups, rendezvous and continue training."""

from __future__ import annotations

import dataclasses
import gc
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.config import RunConfig
from megatron.core.collectives import any_rank
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError
from megatron.training import LaunchEnvironment, Runtime, connect_store, initialize_device, meeting_point
from megatron.training.fault_tolerance.rendezvous import (
    Generation,
    GroupLinks,
    Limits,
    Rendezvous,
    is_broken_communication,
    leave_groups,
    open_store,
    store_of,
)
from megatron.training.fault_tolerance.supervisor import REPLACE, KeptRank


@dataclass(frozen=True, eq=False)
class RendezvousMember:
    """Membership of this process in one generation: its rendezvous, and the counts for its successors.

    ``store`` is None for a world of one process.
    """

    generation: Generation
    kept: KeptRank
    links: GroupLinks
    store: Any

    def end_iteration(self, saved: int | None) -> None:
        """Record the end of an iteration, and the newest checkpoint that the run has published."""
        self.kept.counts.note_step()
        if saved is not None:
            self.kept.counts.note_saved(saved)

    def resumed(self, config: RunConfig, runtime: Runtime) -> RunConfig:
        """Return this generation's configuration, which resumes from the run's own newest checkpoint if there is one.

        Before the first checkpoint, a run starts as its command line specifies. Collective.
        """
        if not any_rank(self.kept.counts.saved is not None, runtime.state.world):
            return config
        return dataclasses.replace(config, checkpoint=config.checkpoint.resumed())


def train_with_restarts(
    config: RunConfig, launch: LaunchEnvironment, kept: KeptRank | None, attempt: Callable[[RendezvousMember], int]
) -> int:
    """Call ``attempt`` in one generation after the other, until it returns an exit status.

    It may raise an error. If another rank was lost, this process joins the next rendezvous; otherwise it asks for its
    own replacement.

    Raises:
        ConfigurationError: there is no supervisor, or no store.
        RestartError: the other ranks did not join in time, or the run has failed too often.
    """
    if kept is None:
        raise ConfigurationError(
            "--inprocess-restart: this script does not keep its rank; call keep_rank before importing torch"
        )
    options = config.restart
    meeting = _open_meeting(launch)
    limits = Limits(options.inprocess_barrier_timeout, options.inprocess_max_iterations)
    rendezvous = Rendezvous(meeting, launch.rank, launch.world_size, secrets.token_hex(8), limits)
    while True:
        generation = rendezvous.join()
        if generation is None:
            return 0
        if launch.rank == 0 and (generation.number or kept.num_predecessors):
            print_line(f"restart {max(generation.number, kept.num_predecessors)}: all ranks have joined again")
        links = GroupLinks()
        watch = _GenerationWatch(rendezvous, generation, links, launch.rank, config)
        try:
            store = _open_group_store(launch, generation)
            status = attempt(RendezvousMember(generation, kept, links, store))
            if status == 0:
                rendezvous.note_done(generation)
            watch.close()
            return status
        except Exception as error:  # noqa: BLE001 whatever it is, this generation is over
            is_lost_peer = links.are_given_up or is_broken_communication(error) or rendezvous.is_over(generation)
            if not is_lost_peer:
                traceback.print_exc()
                return REPLACE
            reason = str(error).partition("\n")[0]
        # The frames that failed are unreferenced only from here on, so their objects can be freed.
        rendezvous.end(generation.number)
        print_line(f"WARNING: rank {launch.rank} leaves its groups for a restart: {reason[:200]}", sys.stderr)
        links.shut_down()
        gc.collect()
        leave_groups()
        if options.inprocess_empty_cuda_cache:
            initialize_device(launch).empty_cache()
        watch.close()


class _GenerationWatch:
    """Watch on the end of a generation, which ensures that this process then leaves it."""

    def __init__(
        self, rendezvous: Rendezvous, generation: Generation, links: GroupLinks, rank: int, config: RunConfig
    ) -> None:
        self._rendezvous = rendezvous
        self._generation = generation
        self._links = links
        self._rank = rank
        self._interval_s = config.restart.inprocess_monitor_thread_interval
        self._hard_timeout_s = config.restart.inprocess_hard_timeout
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="restart watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, because the process has left the generation."""
        self._has_left.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._has_left.wait(self._interval_s):
                if self._rendezvous.is_over(self._generation):
                    break
        except RuntimeError:  # the store is gone, and its launcher with it
            return
        if self._has_left.is_set():
            return
        self._links.shut_down()
        if not self._has_left.wait(self._hard_timeout_s):
            print_line(
                f"WARNING: rank {self._rank} has not left its step within {self._hard_timeout_s:g} s and is replaced",
                sys.stderr,
            )
            os._exit(REPLACE)


def _open_meeting(launch: LaunchEnvironment) -> Any:
    if launch.world_size == 1:
        return connect_store()
    point = meeting_point()
    if point is None:
        raise ConfigurationError(
            "--inprocess-restart: MASTER_ADDR and MASTER_PORT are not set to the address of the rendezvous; start the "
            "ranks with torchrun"
        )
    return open_store(point.host, point.port)


def _open_group_store(launch: LaunchEnvironment, generation: Generation) -> Any:
    return None if launch.world_size == 1 else store_of(generation, _open_meeting(launch))
