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
    """Return whether Triton kernels support these tensors and can be launched here.

    Tensor subclasses use torch, because a kernel may be unable to read their memory.
    """
    return all(x.dtype in _DTYPES for x in tensors) and is_on_triton_device(*tensors)


def is_on_triton_device(*tensors: torch.Tensor) -> bool:
    """Return whether Triton kernels can be launched for these tensors, whatever their dtypes are."""
    return all(x.device.type == _DEVICE and has_readable_memory(x) for x in tensors) and triton_works()


def casts_on_triton(x: torch.Tensor) -> bool:
    """Return whether Triton kernels can cast this tensor to FP8 here."""
    return runs_on_triton(x) and casts_to_float8(x.device.type)


def has_readable_memory(x: torch.Tensor) -> bool:
    """Return whether a kernel can read this tensor's memory; dry runs, which launch no kernels, override this."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


@functools.cache
def triton_works() -> bool:
    """Compile and run one kernel, and return whether that succeeds.

    A missing triton package is ignored silently. An installed package that fails (no C compiler for its launcher, an
    unsupported driver or GPU, a broken install) causes one warning.
    """
    try:
        from megatron.core.ops.triton.probe import probe

        probe(_DEVICE)
    except (ImportError, OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        if not (isinstance(error, ModuleNotFoundError) and (error.name == "triton" or _is_hidden("triton"))):
            warnings.warn(
                f"triton is installed but cannot be used, so torch's operations are used: {error}", stacklevel=2
            )
        return False
    return True


def _is_hidden(package: str) -> bool:
    """Return whether None in ``sys.modules`` hides a package; the import error then names the requested submodule."""
    return package in sys.modules and sys.modules[package] is None


@functools.cache
def casts_to_float8(device: str) -> bool:
    """Return whether the FP8 cast kernel works on a device where other kernels do; it requires Hopper or later."""
    from megatron.core.ops.triton import probe_float8

    try:
        probe_float8(device)
    except RuntimeError:
        return False
    return True
