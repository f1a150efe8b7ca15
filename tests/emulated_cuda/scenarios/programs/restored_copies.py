"""Load the newest copies of the state after a node was replaced: the rank after it sends what it keeps."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.local_copies import LocalCopies
from megatron.core.collectives import any_rank
from megatron.core.device import select_device
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state

REPLACED = 0
"""The rank whose own copies are lost."""


def state_of(rank: int, iteration: int) -> list[torch.Tensor]:
    """Return tensors of several dtypes that differ by rank and iteration."""
    wide = torch.arange(3000, dtype=torch.float32) * (1 + rank) + iteration
    return [wide, wide[:777].bfloat16(), torch.tensor([7 + rank + iteration]), wide[:5].double()]


def main() -> None:
    """Save twice on each of three ranks, each of which has a folder as on a node of its own, and load."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device, timeout=timedelta(seconds=60))
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60), recorder=FlightRecorder())
    folder = Path(f"copies-{state.rank}")
    folder.mkdir()
    copies = LocalCopies(folder, state, device.torch_device, "token", jump=1)
    tensors = [each.to(device.torch_device) for each in state_of(state.rank, 0)]
    for iteration in (1, 2):
        for tensor, values in zip(tensors, state_of(state.rank, iteration), strict=True):
            tensor.copy_(values)
        copies.save(tensors, {"iteration": iteration})
        for tensor in tensors:
            tensor.zero_()  # Training continues at once.
    any_rank(False, state.world)
    if state.rank == REPLACED:
        for path in folder.iterdir():
            path.unlink()
    any_rank(False, state.world)
    loading = LocalCopies(folder, state, device.torch_device, "other token", jump=1)
    found = loading.find()
    assert found is not None, "every rank has a copy"
    assert found.holders == (1, 1, 2), found.holders
    assert found.record["iteration"] == 2
    loading.load(found, tensors)
    for tensor, values in zip(tensors, state_of(state.rank, 2), strict=True):
        assert torch.equal(tensor.cpu(), values), "what is loaded is not what was saved"
    # The copies of the next iterations continue from these.
    loading.save(tensors, {"iteration": 3})
    later = loading.find()
    assert later is not None
    assert later.record["iteration"] == 3
    loading.forget()
    assert loading.find() is None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
