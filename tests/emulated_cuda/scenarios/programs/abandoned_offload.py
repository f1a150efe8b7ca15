"""Leave layers whose weights are still on their way back to the device, and bring all weights home afterwards."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.device import select_device
from megatron.core.tensor_parallel.cpu_offload import WeightOffload

WIDTH = 96
NUM_LAYERS = 4


def main() -> None:
    """Run a few passes that stop before the layer that comes next."""
    device = select_device(0)
    device.make_current()
    layers = [nn.Linear(WIDTH, WIDTH, device=device.torch_device) for _ in range(NUM_LAYERS)]
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    offload = WeightOffload(device.host_copies(), layers)
    x = torch.ones(WIDTH, device=device.torch_device, requires_grad=True)
    for number_of_last in range(NUM_LAYERS):
        offload.leave()
        for layer in layers[:number_of_last]:
            offload.enter([layer])
            y = layer(x)
            offload.exit([layer], x, y)
        # The next one comes, and is left before it is used.
        for layer in layers[number_of_last:]:
            offload.exit([layer], x, x)
        taken = [torch.full((WIDTH, WIDTH), 7.0, device=device.torch_device) for _ in range(NUM_LAYERS)]
        del taken
        offload.onload()
        after = [parameter for layer in layers for parameter in layer.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "weights have changed"


if __name__ == "__main__":
    main()
