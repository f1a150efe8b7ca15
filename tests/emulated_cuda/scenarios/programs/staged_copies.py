"""Stage tensors for an asynchronous save, and read the copies at once, as the writing thread may."""

from __future__ import annotations

import torch

from megatron.core.device import select_device
from megatron.core.dist_checkpointing.async_save import StagingArea


def main() -> None:
    """Run on one device."""
    device = select_device(0)
    device.make_current()
    area = StagingArea(device.synchronize)
    # Other sizes find their places in the memory of those before, or in new memory.
    for value, sizes in enumerate(
        ((5, 300, 70_000), (5, 300, 70_000), (60_000, 7, 9_000), (9, 200_000, 3), (300, 70_000))
    ):
        tensors = [torch.full((size,), value, device=device.torch_device) for size in sizes]
        for tensor, copy in zip(tensors, area.copy(tensors), strict=True):
            assert copy.eq(value).all(), "a copy has not arrived"
            assert len(copy) == len(tensor)


if __name__ == "__main__":
    main()
