"""Probe kernels, which determine whether Triton and the FP8 cast work on this device."""

from __future__ import annotations

import torch
from triton.errors import TritonError

from megatron.core.ops.triton.activation import gated_activation
from megatron.core.ops.triton.fp8_cast import cast_and_transpose


def probe(device: str) -> None:
    """Compile and run one kernel on the device, and wait for its result.

    Raises:
        RuntimeError: the kernel could not be compiled or run.
    """
    try:
        gated_activation(torch.ones(1, 2, device=device), "swiglu").item()
    except TritonError as error:
        raise RuntimeError(str(error)) from error


def probe_float8(device: str) -> None:
    """Cast a small matrix to FP8 on the device, and wait for the result.

    Raises:
        RuntimeError: the device does not support it.
    """
    scale = torch.ones(1, 1, device=device)
    try:
        data, _ = cast_and_transpose(torch.ones(1, 2, device=device), torch.float8_e4m3fn, scale, None, True, False)
        assert data is not None
        data.float().sum().item()
    except TritonError as error:
        raise RuntimeError(str(error)) from error
