"""Shut the process groups down while a rank waits for another one, as an in-process restart does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.device import select_device
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.training.fault_tolerance import rendezvous
from megatron.training.fault_tolerance.rendezvous import GroupLinks, leave_groups

PATIENCE = timedelta(seconds=60)
WHILE_IT_WAITS_S = 0.3


def record_aborts(links: GroupLinks) -> list[bool]:
    """Return a list that gets, at each abort of the communicators, whether the flight recorder is given up by then."""
    abort, given_up = rendezvous.abort_communicators, list[bool]()

    def record_and_abort() -> None:
        given_up.append(links.are_given_up)
        abort()

    rendezvous.abort_communicators = record_and_abort
    return given_up


def main(over: Path) -> None:
    """Run on two ranks; ``over`` is a file that says that the first has given up."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    links, flight = GroupLinks(), FlightRecorder()
    dist.init_process_group(device.default_backend, device_id=device.torch_device, timeout=PATIENCE)
    # Every group is given up, not the default one alone.
    group = dist.new_group([0, 1], timeout=PATIENCE)
    values = torch.ones(8, device=device.torch_device)
    dist.all_reduce(values)
    dist.all_reduce(values, group=group)
    assert values.eq(4.0).all()
    links.are_made(flight)
    given_up = record_aborts(links)
    if dist.get_rank() == 0:
        threading.Timer(WHILE_IT_WAITS_S, links.shut_down).start()
        begun = time.monotonic()
        # The other rank does not take part.
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(values, group=group)
        assert time.monotonic() - begun < PATIENCE.total_seconds() / 2
        over.touch()
    else:
        while not over.exists():
            time.sleep(0.01)
        links.shut_down()
    assert links.are_given_up
    assert given_up == [True], "communicators are aborted before the flight recorder is given up"
    try:
        flight.ensure_not_given_up()
    except GivenUpError:
        leave_groups()
    else:
        raise AssertionError("what was read after an abort counts as a result")


if __name__ == "__main__":
    main(Path("over"))
