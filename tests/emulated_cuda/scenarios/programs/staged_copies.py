"""Stage tensors for an asynchronous save, and read the copies at once, as the writing thread may."""

from __future__ import annotations

import torch

from megatron.core.device import select_device
from megatron.core.dist_checkpointing.background import StagingArea


def main() -> None:
    """Run on one device."""
    device = select_device(0)
    device.make_current()
    area = StagingArea(device.synchronize)
    for value in (1.0, 2.0):
        tensors = [torch.full((size,), value, device=device.torch_device) for size in (5, 300, 70_000)]
        for tensor, copy in zip(tensors, area.copy(tensors), strict=True):
            assert copy.eq(value).all(), "a copy has not arrived"
            assert len(copy) == len(tensor)


if __name__ == "__main__":
    main()
