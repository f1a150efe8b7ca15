"""The GPU types that a step is estimated for, with the published figures that the estimate rests on."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.core.errors import ConfigurationError

_GIB = 2**30


@dataclass(frozen=True)
class AttentionRate:
    """Hold the share of the matrix peak that an attention kernel reaches, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Gpu:
    """Hold one GPU type: what its maker publishes, and what others have measured on it.

    ``half_flops`` and ``single_flops`` are dense peaks a second of 16-bit and float32 products, ``float8_flops`` that
    of fp8 ones, 0 where there are none. ``product_share`` and ``float8_share`` are the parts of the peaks that large
    products in 16 bits and in fp8 reach. ``link_bandwidth`` is NVLink's in one direction and
    ``network_bandwidth`` that of one network port a GPU, ``host_bandwidth`` PCIe's in one direction, in bytes a second.
    ``flash`` and ``cudnn`` are the rates of these attention kernels by the size of a head, in causal attention to 8,192
    keys.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int
    half_flops: float
    single_flops: float
    float8_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    product_share: float
    float8_share: float
    flash: Mapping[int, AttentionRate]
    cudnn: Mapping[int, AttentionRate]
    sources: tuple[str, ...]

    @functools.cached_property
    def speeds(self) -> tuple[object, ...]:
        """Return all figures that the time of a layer depends on, as a key."""
        peaks = (self.half_flops, self.single_flops, self.float8_flops, self.product_share, self.float8_share)
        bandwidths = (self.memory_bandwidth, self.link_bandwidth, self.network_bandwidth)
        return (self.capability, *peaks, *bandwidths, tuple(self.flash.items()), tuple(self.cudnn.items()))

    def matmul_flops(self, itemsize: int) -> float:
        """Return the FLOPs per second of large matmuls of operands of so many bytes.

        Operands in fp8 are widened on a GPU without fp8.
        """
        if itemsize == 1 and self.float8_flops:
            return self.float8_flops * self.float8_share
        return (self.half_flops if itemsize <= 2 else self.single_flops) * self.product_share


_PRODUCTS = (
    "best measured products, share of peak: github.com/stas00/ml-engineering, compute/accelerator, table of maximum "
    "achievable matmul FLOPS (bf16: A100 271.2, H100 794.5, B200 1745.0 TFLOP/s; fp8: H100 1402.6, H200 1453.4, B200 "
    "3432.5, B300 3353.3)"
)
_FLASH = "FlashAttention-2, arXiv 2307.08691, figures 5 to 7"
_HOPPER_ATTENTION = "FlashAttention-3, arXiv 2407.08608, figures 5 and 6 (FlashAttention-2 and cuDNN beside it)"
# A step's products are neither the best shape nor as short as that benchmark: 8192³ of random numbers reach 258 TFLOP/s
# on an A100 (95 % of the best shape; thonking.ai/p/strangely-matrix-multiplications), and a hot GPU lowers its clock.
_SUSTAINED = 0.92

A100 = Gpu(
    name="a100-80gb",
    capability=(8, 0),
    memory_bytes=80 * _GIB,
    num_sms=108,
    half_flops=312e12,
    single_flops=19.5e12,
    float8_flops=0.0,
    memory_bandwidth=2039e9,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    product_share=271.2 / 312 * _SUSTAINED,
    float8_share=0.0,
    flash={64: AttentionRate(0.54, 0.45), 128: AttentionRate(0.60, 0.52)},
    cudnn={64: AttentionRate(0.54, 0.45), 128: AttentionRate(0.60, 0.52)},
    sources=("NVIDIA A100 80GB SXM data sheet (nvidia-a100-datasheet)", _PRODUCTS, _FLASH),
)
# Medians of 18 shapes on one H200 (docs/measurements.md). The best shape of the table reaches 0.71 on an H100 and 0.73
# on an H200.
_HOPPER_FLOAT8 = 0.746
_HOPPER_FLASH = {64: AttentionRate(0.28, 0.22), 128: AttentionRate(0.36, 0.30)}
_HOPPER_CUDNN = {64: AttentionRate(0.38, 0.29), 128: AttentionRate(0.55, 0.42)}
H100 = Gpu(
    name="h100-80gb",
    capability=(9, 0),
    memory_bytes=80 * _GIB,
    num_sms=132,
    half_flops=989e12,
    single_flops=67e12,
    float8_flops=1979e12,
    memory_bandwidth=3350e9,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    product_share=794.5 / 989 * _SUSTAINED,
    float8_share=_HOPPER_FLOAT8,
    flash=_HOPPER_FLASH,
    cudnn=_HOPPER_CUDNN,
    sources=("NVIDIA H100 SXM data sheet", _PRODUCTS, _HOPPER_ATTENTION),
)
H200 = replace(
    H100,
    name="h200",
    memory_bytes=141 * 10**9,
    memory_bandwidth=4800e9,
    sources=("NVIDIA H200 SXM data sheet; products and attention as on the H100", _PRODUCTS, _HOPPER_ATTENTION),
)
B200 = Gpu(
    name="b200",
    capability=(10, 0),
    memory_bytes=180 * 10**9,
    num_sms=148,
    half_flops=2250e12,
    single_flops=75e12,
    float8_flops=4500e12,
    memory_bandwidth=7700e9,
    link_bandwidth=900e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    product_share=1745 / 2250 * _SUSTAINED,
    float8_share=3432.5 / 4500 * _SUSTAINED,
    # FlashAttention-2 has no kernels for this generation's tensor cores: its rate is the H100's.
    flash={64: AttentionRate(0.13, 0.10), 128: AttentionRate(0.17, 0.13)},
    cudnn={64: AttentionRate(0.35, 0.27), 128: AttentionRate(0.55, 0.42)},
    sources=("NVIDIA HGX B200 data sheet, for one GPU; attention shares as cuDNN's on the H100", _PRODUCTS),
)
B300 = replace(
    B200,
    name="b300",
    capability=(10, 3),
    memory_bytes=288 * 10**9,
    memory_bandwidth=8000e9,
    network_bandwidth=100e9,
    float8_share=3353.3 / 4500 * _SUSTAINED,
    sources=(
        "NVIDIA HGX B300 data sheet, for one GPU of eight: 2.3 TB and 64 TB/s of HBM3e, 36 PFLOP/s of FP16/BF16 and 72 "
        "of FP8 with sparsity, 600 TFLOP/s of FP32, one 800 Gb/s port per GPU; SMs, products, attention as on the B200",
        _PRODUCTS,
    ),
)

A800 = replace(
    A100,
    name="a800-80gb",
    link_bandwidth=200e9,
    sources=("NVIDIA A800: an A100 with NVLink of 400 GB/s", *A100.sources),
)
H800 = replace(
    H100,
    name="h800-80gb",
    link_bandwidth=200e9,
    sources=("NVIDIA H800: an H100 with NVLink of 400 GB/s", *H100.sources),
)

GPUS: Mapping[str, Gpu] = {
    "a100-80gb": A100,
    "a800-80gb": A800,
    "h100-80gb": H100,
    "h100": H100,
    "h800-80gb": H800,
    "h200": H200,
    "b200": B200,
    "b300": B300,
}
"""GPU types by the names that ``--gpu`` takes."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU type by name.

    Raises:
        ConfigurationError: no figures are known for this name.
    """
    if name not in GPUS:
        raise ConfigurationError(f"--gpu {name}: no figures are known for it; possible: {', '.join(GPUS)}")
    return GPUS[name]


_MENTIONS = {
    "h100": H100,
    "h800": H800,
    "h200": H200,
    "hopper": H100,
    "b200": B200,
    "b300": B300,
    "a100": A100,
    "a800": A800,
}
"""GPU types by what a description of hardware calls them."""


def gpu_in_text(description: str) -> Gpu | None:
    """Return the GPU type that a description of hardware mentions, with the memory that it mentions, or None."""
    words = re.findall(r"[a-z0-9]+", description.lower())
    found = min((word for word in _MENTIONS if word in words), key=list(_MENTIONS).index, default=None)
    if found is None:
        return None
    size = re.search(r"(\d+) ?GB?\b", description)
    gpu = _MENTIONS[found]
    if size is None or not 0 < int(size.group(1)) < gpu.memory_bytes // _GIB:
        return gpu
    return replace(gpu, memory_bytes=int(size.group(1)) * _GIB)
