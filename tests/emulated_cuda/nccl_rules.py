"""Rules of NCCL's in-place collectives, which a collective through shared memory does not need."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

_WHOLE_OUTPUT, _WHOLE_INPUT = "output", "input"
_COLLECTIVES = {
    "all_gather_into_tensor": _WHOLE_OUTPUT,
    "all_gather_single": _WHOLE_OUTPUT,
    "reduce_scatter_tensor": _WHOLE_INPUT,
    "reduce_scatter_single": _WHOLE_INPUT,
    "all_to_all_single": "",
}
"""The functions of torch.distributed, and which of their tensors has the parts of all ranks."""


def check_in_place(distributed: Any) -> None:
    """Let collectives of emulated devices fail whose input and output overlap and are not in place.

    The rule is that of NCCL's documentation, "In-place Operations": the part of a rank lies in the whole at the number
    of the rank. An all-to-all, which torch makes of sends and receives, has no in-place form.
    """
    for name, whole in _COLLECTIVES.items():
        if hasattr(distributed, name):
            setattr(distributed, name, _checked(distributed, getattr(distributed, name), name, whole))


def _checked(distributed: Any, collective: Callable[..., Any], name: str, whole: str) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(output: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if output.is_cuda and tensor.is_cuda and _overlap(output, tensor):
            group = inspect.signature(collective).bind(output, tensor, *arguments, **named).arguments.get("group")
            rank = distributed.get_rank(group)
            part, parts = (tensor, output) if whole == _WHOLE_OUTPUT else (output, tensor)
            if not whole or part.data_ptr() != parts.data_ptr() + rank * part.nbytes:
                raise RuntimeError(
                    f"emulated CUDA: race: the input and the output of {name} overlap, and NCCL reads one while it "
                    f"writes the other: this is not the place of rank {rank}"
                )
        return collective(output, tensor, *arguments, **named)

    return call


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share bytes."""
    first, second = left.data_ptr(), right.data_ptr()
    return bool(left.nbytes and right.nbytes) and first < second + right.nbytes and second < first + left.nbytes
