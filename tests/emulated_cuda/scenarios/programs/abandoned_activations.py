"""Fetch offloaded activations for a backward pass that does not come, and take their memory."""

from __future__ import annotations

import torch

from megatron.core.device import select_device
from megatron.core.tensor_parallel.cpu_offload import ActivationOffload

SIZE = 1 << 18


def main() -> None:
    """Run on one device."""
    device = select_device(0)
    device.make_current()
    weight = torch.full((SIZE,), 2.0, device=device.torch_device, requires_grad=True)
    hidden = torch.ones(SIZE, device=device.torch_device, requires_grad=True)
    offload = ActivationOffload(device.host_copies(), 2)
    moved = offload.begin_pass((weight,))
    for _ in range(2):
        with moved.layer(()):
            hidden = (hidden * weight).exp()
    moved.end(hidden)
    # Only the gradient of the last layer's output is computed: its saved tensors are fetched and not used.
    (gradient,) = torch.autograd.grad(hidden.sum(), [hidden])
    del hidden, moved
    for _ in range(4):
        assert torch.zeros_like(torch.empty(SIZE, device=device.torch_device)).sum().item() == 0
    assert gradient.sum().item() == SIZE
    assert offload.copies.bytes_in > 0


if __name__ == "__main__":
    main()
