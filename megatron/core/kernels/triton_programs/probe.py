"""A first launch, whose failure means that none would succeed."""

from __future__ import annotations

import torch
from triton.errors import TritonError

from megatron.core.kernels.triton_programs.gated_activation import gated_activation


def probe(device: str) -> None:
    """Compile and run one program on the device, and wait for its result.

    Raises:
        RuntimeError: it could not be compiled or run.
    """
    try:
        gated_activation(torch.ones(1, 2, device=device), "swiglu").item()
    except TritonError as error:
        raise RuntimeError(str(error)) from error
