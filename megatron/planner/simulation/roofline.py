"""Time of an operation on a GPU: GEMMs by their tiles, attention by its FLOP/s, all others by their bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron.planner import Gpu
from megatron.planner.simulation.recorder import Communication, Gemm, Operation, Transfer

_BANDWIDTH_SHARE = 0.85
"""Share of the memory bandwidth that simple kernels reach (BabelStream on A100 and H100 reaches 0.85 to 0.93)."""
_KERNEL_S = 2.5e-6
"""Time of the shortest kernel, with its start and end."""
_WAVE_S = 1.5e-6
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 256, 0.8), (256, 64, 0.8))
"""Tiles of a GEMM (rows, columns) per streaming multiprocessor, and the share of its best rate that each reaches."""
_MIN_SPLIT = 2048
_KEYS_AT_FULL_RATE = 2048
_SHORT_ATTENTION = 0.75
_FLEX_SHARES = (0.9, 0.85)
"""FlexAttention's rate relative to FlashAttention-2, forward and backward (pytorch.org/blog/flexattention,
Performance)."""
_EFFICIENT_SHARE = 0.6
"""Rate of torch's memory-efficient kernels relative to FlashAttention."""
_LINK_SHARE = 0.8
"""Share of a link's bandwidth that NCCL reaches with large messages."""
_COLLECTIVE_S = 15e-6
_COPY_S = 5e-6
KERNELS_OF: Mapping[str, int] = {
    "native_layer_norm_backward": 3,
    "_fused_rms_norm_backward": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 3,
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_flash_attention_backward": 3,
    "_fused_adamw_": 10,
    "_fused_sgd_": 10,
    "_foreach_copy_": 10,
    "embedding_dense_backward": 4,
}
"""Kernels per operation, for operations of several kernels, in a model with billions of parameters."""


def is_attention(operation: Operation) -> bool:
    return operation.name.startswith(("_scaled_dot_product_", "_flash_attention_", "_flex_attention"))


def operation_seconds(operation: Operation, gpu: Gpu) -> float:
    """Return the time of an operation on a GPU."""
    shortest = _KERNEL_S * KERNELS_OF.get(operation.name, 1)
    by_bytes = operation.num_bytes / (gpu.memory_bandwidth * _BANDWIDTH_SHARE)
    if is_attention(operation) and operation.flops:
        rate = _attention_rate(operation, gpu)
        return max(shortest, by_bytes, operation.flops / rate)
    gemm = operation.gemm
    if gemm is not None and min(gemm.rows, gemm.columns) > 1:
        return max(shortest, by_bytes, _gemm_seconds(gemm, operation.itemsize, gpu))
    # A matrix-vector product reads its matrix once. Other operations with FLOPs, such as convolutions, run at the
    # GEMMs' rate.
    by_flops = 0.0 if gemm is not None else operation.flops / gpu.matmul_flops(operation.itemsize)
    return max(shortest, by_bytes, by_flops)


def _gemm_seconds(gemm: Gemm, itemsize: float, gpu: Gpu) -> float:
    """Return the time of a GEMM with the best choice of tiles and of splits of the inner dimension (split-K)."""
    batch, rows, inner, columns = gemm.batch, gemm.rows, gemm.inner, gemm.columns
    rate = gpu.matmul_flops(itemsize) / gpu.num_sms
    best = math.inf
    for tile_rows, tile_columns, share in _TILES:
        tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        for parts in (1, 2, 4):
            if parts > 1 and (inner < _MIN_SPLIT or tiles >= gpu.num_sms):
                continue
            waves = math.ceil(tiles * parts / gpu.num_sms)
            tile_s = 2 * tile_rows * tile_columns * math.ceil(inner / parts) / (rate * share)
            sums_s = 0.0 if parts == 1 else 8.0 * batch * rows * columns * parts / gpu.memory_bandwidth
            best = min(best, waves * (tile_s + _WAVE_S) + sums_s)
    return best + _KERNEL_S


def _attention_rate(operation: Operation, gpu: Gpu) -> float:
    query = operation.shapes[0]
    rates = gpu.cudnn if "cudnn" in operation.name else gpu.flash
    known = rates[128 if query[-1] > 64 else 64]
    is_backward = "backward" in operation.name
    share = known.backward if is_backward else known.forward
    if "efficient" in operation.name:
        share *= _EFFICIENT_SHARE
    if "flex" in operation.name:
        share *= _FLEX_SHARES[is_backward]
    if query[-2] < _KEYS_AT_FULL_RATE:
        share *= _SHORT_ATTENTION
    return share * (gpu.half_flops if operation.itemsize == 2 else gpu.single_flops)


def transfer_seconds(transfer: Transfer, gpu: Gpu) -> float:
    """Return the time of a communication or a copy: its bytes per rank at the bandwidth of the link."""
    if isinstance(transfer, Communication):
        return _communication_seconds(transfer, gpu)
    return _COPY_S + transfer.num_bytes / (gpu.host_bandwidth * _LINK_SHARE)


def _communication_seconds(communication: Communication, gpu: Gpu) -> float:
    call = communication.call
    link = gpu.network_bandwidth if communication.crosses_machines else gpu.link_bandwidth
    others = (call.group_size - 1) / call.group_size
    volume = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others}
    return _COLLECTIVE_S + volume.get(call.operation, 1.0) * call.num_bytes / (link * _LINK_SHARE)
