"""Train one cell of the verifier on this rank's device, and write its losses to a metrics file."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist

from megatron.core.device import select_device
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.run_cell import run_cell
from pretrain_gpt import forward_step, provide_model


def main(path: str, *flags: str) -> None:
    """Run on the ranks of the environment."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    size = dist.get_world_size()
    result = run_cell([*BASE_FLAGS, *flags], size, "plain", "float32", provide_model, forward_step, device)
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            for loss, norm in zip(result.losses, result.grad_norms):
                file.write(json.dumps({"lm_loss": loss, "grad_norm": norm}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
