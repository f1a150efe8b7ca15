"""Differentiate up to the second layer, so that tensors of the first come back unused, and take their memory."""

from __future__ import annotations

import torch

from megatron.core.device import select_device
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.cpu_offload import ActivationOffload
from megatron.core.tensor_parallel.initialization import initialize_module
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.transformer_block import TransformerBlock

WIDTH, LENGTH, BATCH = 64, 96, 2


def main() -> None:
    """Run on one device."""
    device = select_device(0)
    device.make_current()
    config = DecoderConfig(
        num_layers=3, hidden_size=WIDTH, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    block = TransformerBlock(config, range(3), True, single_rank_group(), device.torch_device)
    initialize_module(block, seed=3)
    block.offload = ActivationOffload(device.host_copies(), num_layers=2)
    inputs: list[torch.Tensor] = []
    block.layers["1"].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    x = torch.randn(LENGTH, BATCH, WIDTH, device=device.torch_device, requires_grad=True)
    output = block(x, CAUSAL, None).hidden
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    assert gradient.isfinite().all()
    inputs.clear()
    del output
    # Memory of the sizes of what the first layer has saved, which the allocator may take from there.
    for width in (WIDTH, 3 * WIDTH, 4 * WIDTH):
        assert not torch.zeros_like(torch.empty(LENGTH, BATCH, width, device=device.torch_device)).any()
    device.synchronize()


if __name__ == "__main__":
    main()
