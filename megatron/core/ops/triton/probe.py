"""Probe launches: if one of these fails, no Triton kernel works on this device."""

from __future__ import annotations

import torch
from triton.errors import TritonError

from megatron.core.ops.triton.activation import gated_activation
from megatron.core.ops.triton.fp8_cast import cast_and_transpose


def probe(device: str) -> None:
    """Compile and run one program on the device, and wait for its result.

    Raises:
        RuntimeError: it could not be compiled or run.
    """
    try:
        gated_activation(torch.ones(1, 2, device=device), "swiglu").item()
    except TritonError as error:
        raise RuntimeError(str(error)) from error


def probe_float8(device: str) -> None:
    """Cast a small matrix to fp8 on the device, and wait for the result.

    Raises:
        RuntimeError: the device cannot.
    """
    scale = torch.ones(1, 1, device=device)
    try:
        data, _ = cast_and_transpose(torch.ones(1, 2, device=device), torch.float8_e4m3fn, scale, None, True, False)
        assert data is not None
        data.float().sum().item()
    except TritonError as error:
        raise RuntimeError(str(error)) from error
