"""What the optimizer keeps of each parameter, in bytes, on the device and in the machine's memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron.core.model_parallel_config import ELEMENT_BYTES

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig


def state_bytes(optimizer: OptimizerConfig, *, is_matrix: bool = False) -> int:
    """Return what a parameter takes on the device beside weight and gradient: main parameter and moments.

    ``is_matrix`` says that it is a weight between the embeddings and the output layer, of which Muon keeps one moment.
    """
    sizes = _sizes(optimizer)
    has_main_copy = ELEMENT_BYTES[optimizer.params_dtype] < sizes["fp32"]
    main_copy = sizes[optimizer.main_params_dtype] if has_main_copy else 0
    return main_copy + _average_bytes(optimizer) + _moment_bytes(optimizer, is_matrix=is_matrix)


def host_state_bytes(optimizer: OptimizerConfig, num_elements: int) -> int:
    """Return what the offloaded part of so many parameters takes on the host: there each main parameter is a copy."""
    of_each = _sizes(optimizer)["fp32"] + _average_bytes(optimizer) + _moment_bytes(optimizer)
    return math.ceil(optimizer.offload_fraction * num_elements) * of_each


def _average_bytes(optimizer: OptimizerConfig) -> int:
    return 0 if optimizer.ema_decay is None else _sizes(optimizer)["fp32"]


def _moment_bytes(optimizer: OptimizerConfig, *, is_matrix: bool = False) -> int:
    sizes = _sizes(optimizer)
    if optimizer.elementwise == "lion" or (optimizer.optimizer == "muon" and is_matrix):
        return sizes["fp32"]
    if optimizer.elementwise == "sgd":
        return sizes["fp32"] if optimizer.sgd_momentum else 0
    return sizes[optimizer.exp_avg_dtype] + sizes[optimizer.exp_avg_sq_dtype]


def _sizes(optimizer: OptimizerConfig) -> dict[str, int]:
    """Return the bytes of each type of state; the state of a float64 model is as wide as its parameters."""
    return {"fp32": max(4, ELEMENT_BYTES[optimizer.params_dtype]), "fp16": 2, "bf16": 2, "fp8": 1}
