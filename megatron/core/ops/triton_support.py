"""Whether Triton kernels replace torch operations: on CUDA, in training precisions, if Triton works."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

import torch

_DEVICE = "cuda"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def runs_on_triton(*tensors: torch.Tensor) -> bool:
    """Return whether the Triton programs take these tensors, on a machine where they can be launched.

    A subclass of a tensor goes to torch: it stands for memory that a program could not read.
    """
    return (
        all(x.device.type == _DEVICE and x.dtype in _DTYPES and has_readable_memory(x) for x in tensors)
        and triton_works()
    )


def has_readable_memory(x: torch.Tensor) -> bool:
    """Return whether a program could read this tensor; a dry run, which launches none, says so of its own."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


@functools.cache
def triton_works() -> bool:
    """Compile and run one program, and return whether that succeeds.

    An absent package is passed over in silence. One that is there and fails (no C compiler for its launcher, a driver
    or a GPU that it does not know, a broken install) is named in one warning.
    """
    try:
        from megatron.core.ops.triton.probe import probe

        probe(_DEVICE)
    except (ImportError, OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        if not (isinstance(error, ModuleNotFoundError) and (error.name == "triton" or _is_hidden("triton"))):
            warnings.warn(
                f"triton is installed but cannot be used, torch's own operations are taken: {error}", stacklevel=2
            )
        return False
    return True


def _is_hidden(package: str) -> bool:
    """Return whether None in ``sys.modules`` hides a package; an error then names the module that was looked for."""
    return package in sys.modules and sys.modules[package] is None


@functools.cache
def casts_to_float8(device: str) -> bool:
    """Return whether the program that casts to fp8 works on a kind of device where others do: not before Hopper."""
    from megatron.core.ops.triton import probe_float8

    try:
        probe_float8(device)
    except RuntimeError:
        return False
    return True
