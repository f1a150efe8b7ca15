"""GPU types: published specifications, and the JSON file of a calibrated GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError
from megatron.core.safe_io import parse_json, read_plain_text

_GIB = 2**30


@dataclass(frozen=True)
class AttentionRate:
    """Share of the peak matmul FLOP/s that an attention kernel reaches, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Gpu:
    """Specifications of one GPU type, and published measurements on it.

    ``half_flops``, ``single_flops``, ``float8_flops`` and ``float4_flops`` are the dense peak FLOP/s of 16-bit,
    float32, FP8 and NVFP4 matmuls; the last two are 0 on a GPU without them. ``product_share`` and ``float8_share`` are
    the shares of these peaks that large matmuls reach. No measured rate of NVFP4 matmuls is known: they are assumed to
    reach ``product_share``. ``link_bandwidth`` is NVLink and ``host_bandwidth`` PCIe in one direction,
    ``network_bandwidth`` is one network port per GPU, all in bytes per second. ``flash`` and ``cudnn`` are the rates of
    FlashAttention and cuDNN by head size, for causal attention with up to 8,192 keys.
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
    float4_flops: float = 0.0

    @functools.cached_property
    def speeds(self) -> tuple[object, ...]:
        """Return all specifications that the time of a layer depends on, as a cache key."""
        peaks = (self.half_flops, self.single_flops, self.float8_flops, self.float4_flops)
        shares = (self.product_share, self.float8_share)
        bandwidths = (self.memory_bandwidth, self.link_bandwidth, self.network_bandwidth)
        return (self.capability, *peaks, *shares, *bandwidths, tuple(self.flash.items()), tuple(self.cudnn.items()))

    def matmul_flops(self, itemsize: float) -> float:
        """Return the FLOP/s of large matmuls with operands of ``itemsize`` bytes per element.

        FP8 and NVFP4 operands count as 16-bit operands on a GPU without them.
        """
        if itemsize < 1 and self.float4_flops:
            return self.float4_flops * self.product_share
        if itemsize == 1 and self.float8_flops:
            return self.float8_flops * self.float8_share
        return (self.half_flops if itemsize <= 2 else self.single_flops) * self.product_share


_PRODUCTS = (
    "best measured products, share of peak: github.com/stas00/ml-engineering, compute/accelerator, table of maximum "
    "achievable matmul FLOPS (bf16: A100 271.2, H100 794.5, B200 1745.0 TFLOP/s; fp8: H100 1402.6, H200 1453.4, B200 "
    "3432.5, B300 3353.3)"
)
_NVFP4 = (
    "NVFP4 matmuls are assumed to reach bf16's share of the published peak, because no measured rate is known; arXiv "
    "2509.25149 gives their peak as 2 x FP8 on a GB200 and 3 x on a GB300"
)
_FLASH = "FlashAttention-2, arXiv 2307.08691, figures 5 to 7"
_HOPPER_ATTENTION = "FlashAttention-3, arXiv 2407.08608, figures 5 and 6 (with FlashAttention-2 and cuDNN)"
# The matmuls of a step do not have the best shape and last longer than that benchmark: 8192³ with random numbers
# reaches 258 TFLOP/s on an A100 (95 % of the best shape; thonking.ai/p/strangely-matrix-multiplications), and a hot GPU
# lowers its clock.
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
# Medians of 18 shapes on one H200 (docs/development/measurements.md). The best shape of the table reaches 0.71 on an
# H100 and 0.73 on an H200.
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
    float4_flops=9000e12,
    memory_bandwidth=7700e9,
    link_bandwidth=900e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    product_share=1745 / 2250 * _SUSTAINED,
    float8_share=3432.5 / 4500 * _SUSTAINED,
    # FlashAttention-2 has no kernels for the tensor cores of Blackwell: its rate is that of the H100.
    flash={64: AttentionRate(0.13, 0.10), 128: AttentionRate(0.17, 0.13)},
    cudnn={64: AttentionRate(0.35, 0.27), 128: AttentionRate(0.55, 0.42)},
    sources=(
        "NVIDIA HGX B200 data sheet, for one GPU; attention shares as cuDNN's on the H100",
        _PRODUCTS,
        _NVFP4,
    ),
)
B300 = replace(
    B200,
    name="b300",
    capability=(10, 3),
    memory_bytes=288 * 10**9,
    float4_flops=13125e12,
    memory_bandwidth=8000e9,
    network_bandwidth=100e9,
    float8_share=3353.3 / 4500 * _SUSTAINED,
    sources=(
        "NVIDIA HGX B300 data sheet, for one GPU of eight: 2.3 TB and 64 TB/s of HBM3e, 36 PFLOP/s of FP16/BF16 and 72 "
        "of FP8 with sparsity, 105 of FP4 without, 600 TFLOP/s of FP32, one 800 Gb/s port per GPU; SMs, products, "
        "attention as on the B200",
        _PRODUCTS,
        _NVFP4,
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
        ConfigurationError: the name is not known.
    """
    if name not in GPUS:
        raise ConfigurationError(
            f"--gpu {name}: there are no built-in figures for this GPU; possible values: {', '.join(GPUS)}"
        )
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
"""GPU types by the words that describe hardware."""


def gpu_in_text(description: str) -> Gpu | None:
    """Return the GPU type that a description of hardware names, with the memory size that it gives, or None."""
    words = re.findall(r"[a-z0-9]+", description.lower())
    found = min((word for word in _MENTIONS if word in words), key=list(_MENTIONS).index, default=None)
    if found is None:
        return None
    size = re.search(r"(\d+) ?GB?\b", description)
    gpu = _MENTIONS[found]
    if size is None or not 0 < int(size.group(1)) < gpu.memory_bytes // _GIB:
        return gpu
    return replace(gpu, memory_bytes=int(size.group(1)) * _GIB)


_MOST_BYTES = 1 << 20
_HEAD_SIZES = (64, 128)
_MAY_BE_ZERO = ("float8_flops", "float4_flops", "float8_share", "num_sms")
_NUMBERS = (
    "memory_bytes",
    "num_sms",
    "half_flops",
    "single_flops",
    "float8_flops",
    "float4_flops",
    "memory_bandwidth",
    "link_bandwidth",
    "network_bandwidth",
    "host_bandwidth",
    "product_share",
    "float8_share",
)


def gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    return dataclasses.asdict(gpu)


def read_gpu(path: Path) -> Gpu:
    """Return the GPU type in a file that was written with `gpu_to_json`.

    Raises:
        ConfigurationError: the file is missing or has another format.
    """
    try:
        values = parse_json(read_plain_text(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigurationError(
            f"--gpu {path} cannot be read: {error.strerror}; pass a file that tools/calibrate.py wrote"
        ) from error
    except ValueError as error:
        raise _wrong(path, "the file is not valid JSON") from error
    if not isinstance(values, dict):
        raise _wrong(path, "the file is not a JSON object")
    # Older files have one share for all matmuls, and no peak of NVFP4.
    values = {"float8_share": values.get("product_share"), "float4_flops": 0.0, **values}
    numbers = {name: _number(path, values, name) for name in _NUMBERS}
    if numbers["float8_flops"] > 0 and numbers["float8_share"] == 0:
        raise _wrong(path, f"float8_share is 0, but float8_flops is {numbers['float8_flops']:g}")
    capability = values.get("capability")
    if not (isinstance(capability, list) and len(capability) == 2 and all(type(each) is int for each in capability)):
        raise _wrong(path, f"capability is {capability!r}, but must be two integers")
    sources = values.get("sources")
    if not (isinstance(sources, list) and all(isinstance(each, str) for each in sources)):
        raise _wrong(path, "sources must be a list of strings")
    memory_bytes, num_sms = int(numbers.pop("memory_bytes")), int(numbers.pop("num_sms"))
    return Gpu(
        name=str(values.get("name", path.stem)),
        capability=(capability[0], capability[1]),
        flash=_rates(path, values, "flash"),
        cudnn=_rates(path, values, "cudnn"),
        sources=tuple(sources),
        memory_bytes=memory_bytes,
        num_sms=num_sms,
        **numbers,
    )


def _rates(path: Path, values: Mapping[str, Any], name: str) -> Mapping[int, AttentionRate]:
    part, rates = values.get(name), {}
    for size in _HEAD_SIZES:
        rate = part.get(str(size)) if isinstance(part, dict) else None
        if not isinstance(rate, dict):
            raise _wrong(path, f"the {name} rates for head size {size} are missing")
        rates[size] = AttentionRate(_number(path, rate, "forward"), _number(path, rate, "backward"))
    return rates


def _number(path: Path, values: Mapping[str, Any], name: str) -> float:
    value: Any = values.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO)):
        return float(value)
    raise _wrong(path, f"{name} is {value!r}, but must be a number above 0")


def _wrong(path: Path, found: str) -> ConfigurationError:
    return ConfigurationError(f"--gpu {path}: {found}; write the file again with tools/calibrate.py --output {path}")
