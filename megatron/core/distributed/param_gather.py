"""New parameters awaited where the forward pass needs them, so that gathering overlaps with what comes before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.flat_parameters import FlatParameters
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer

_Awaited = list[tuple[FlatParameters, int]]


def await_in_forward(module: nn.Module, buffers: Sequence[ParamAndGradBuffer]) -> None:
    """Let every submodule wait, when it is called, for the buckets of the parameters that it holds itself.

    A parameter may be used elsewhere only after its own module has been called in the same forward pass.
    """
    bucket_of: dict[int, tuple[FlatParameters, int]] = {}
    for buffer in buffers:
        assert buffer.flat_parameters is not None
        for index, bucket in enumerate(buffer.buckets):
            for parameter in buffer.parameters_of(bucket):
                bucket_of[id(parameter)] = (buffer.flat_parameters, index)
    for submodule in module.modules():
        own = [bucket_of[id(p)] for p in submodule.parameters(recurse=False) if id(p) in bucket_of]
        if own:
            submodule.register_forward_pre_hook(_awaiting(list(dict.fromkeys(own))))


def _awaiting(awaited: _Awaited) -> Callable[[nn.Module, Any], None]:
    def wait(module: nn.Module, args: Any) -> None:
        for parameters, index in awaited:
            parameters.wait(index)

    return wait
