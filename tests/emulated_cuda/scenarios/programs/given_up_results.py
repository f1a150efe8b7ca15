"""Let each reader of communicated numbers read them after communication was given up: none may count as a result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.local_copies import CopyFile, LocalCopies
from megatron.core.collectives import any_rank, exchange_bytes
from megatron.core.device import Device, select_device
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.core.ops.gemm import RowCounts
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, ParallelState, create_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.moe.expert_dispatch import AllGatherDispatcher, AllToAllDispatcher
from megatron.core.transformer.moe.expert_router import Routing
from megatron.training.initialize import Runtime
from megatron.training.training_step import agree_to_exit

NUM_TOKENS, WIDTH, NUM_EXPERTS = 6, 8, 4
ITERATION = {"iteration": 1}


@contextlib.contextmanager
def raises_if_given_up(is_given_up: bool) -> Iterator[None]:
    """Require that the body raises `GivenUpError` exactly if communication was given up."""
    try:
        yield
    except GivenUpError:
        assert is_given_up, "GivenUpError is raised although communication was not given up"
    else:
        assert not is_given_up, "what was read after communication was given up counts as a result"


def readers(device: Device, state: ParallelState, flight: FlightRecorder) -> Iterator[Callable[[], Any]]:
    """Yield what communicates and reads the result on the host."""
    place, world = device.torch_device, state.world
    runtime = Runtime(device, state, RngStreams(device, 1, state.place), flight=flight)
    yield lambda: any_rank(False, world)
    yield lambda: agree_to_exit(None, runtime)
    other = 1 - world.rank
    sent, received = torch.ones(64, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8)
    yield lambda: exchange_bytes(sent, other, received, other, world, place)
    alone = single_rank_group()
    groups = ExpertGroups(model=world, tensor_size=1, tp=alone, cp=alone, dp=world)
    x = torch.ones(NUM_TOKENS, WIDTH, device=place)
    indices = torch.arange(NUM_TOKENS, device=place)[:, None] % NUM_EXPERTS
    routing = Routing(indices, torch.ones(NUM_TOKENS, 1, device=place), ())

    def experts(rows: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        assert not flight.is_given_up, "counts of rows that were read after communication was given up are used"
        assert sum(counts) == len(rows)
        return rows

    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        yield lambda kind=kind: kind(NUM_EXPERTS, groups)(x, routing, experts, lambda: None)


def main() -> None:
    """Run on two ranks."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    flight = FlightRecorder()
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60), recorder=flight)
    folder = Path("copies")
    folder.mkdir(exist_ok=True)
    copies = LocalCopies(folder, state, device.torch_device, "token", jump=None)
    tensors = [torch.ones(100, device=device.torch_device)]
    for is_given_up in (False, True):
        if is_given_up:
            flight.give_up()
        for read in readers(device, state, flight):
            with raises_if_given_up(is_given_up):
                read()
        with raises_if_given_up(is_given_up):
            copies.save(tensors, ITERATION)
        # The slots take turns.
        is_whole = CopyFile(folder / f"{state.rank}.{int(is_given_up)}").record() is not None
        assert is_whole is not is_given_up, "a copy that was made after communication was given up counts as whole"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
