"""Measure the GPU of this node, and write a --gpu file for plan and explain.

python tools/calibrate.py --output machine.json

Matmuls of several shapes, attention, memory bandwidth and copies to the host are measured on one device, in less than
two minutes. Links between GPUs and the network are not measured: their figures are taken from --like, or from the
known GPU type that is nearest to this GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.arguments import Parser, exit_status_of
from megatron.cli.planner_arguments import write_text
from megatron.core.errors import ConfigurationError
from megatron.planner import GPUS, MEMORY_SHARE, AttentionRate, Gpu, find_gpu, gpu_to_json

if TYPE_CHECKING:
    from megatron.cli.doctor.benchmarks import Rates
    from megatron.core.device import Device


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="calibrate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write (.json)")
    parser.add_argument(
        "--like", metavar="TYPE", help=f"GPU type whose link bandwidths are used, one of {', '.join(GPUS)}"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: calibrate(arguments.output, arguments.like))


def calibrate(output: Path, like: str | None) -> None:
    """Measure, write the figures and print them.

    Raises:
        ConfigurationError: the file cannot be written, or the GPU's type is unknown.
    """
    if output.suffix != ".json":
        raise ConfigurationError(f"--output {output}: use a file name that ends in .json, so that --gpu can read it")
    if not os.access(output.parent, os.W_OK):
        raise ConfigurationError(f"--output {output} cannot be written; use an existing folder")
    base = None if like is None else find_gpu(like)
    from megatron.cli.doctor.benchmarks import ON_CPU, ON_GPU, measure_rates
    from megatron.core.device import select_device

    device = select_device(0)
    if base is None:
        base = _type_of(device) if device.is_cuda else GPUS["h100-80gb"]
    rates = measure_rates(device, ON_GPU if device.is_cuda else ON_CPU)
    figures = _figures(base, rates, is_cuda=device.is_cuda)
    write_text("--output", output, json.dumps(gpu_to_json(figures), indent=1) + "\n")
    print("\n".join(figures.sources))


def _type_of(device: Device) -> Gpu:
    """Return the known GPU type with the same peak and the nearest memory size.

    Raises:
        ConfigurationError: no known type has the same peak.
    """
    peak, memory = device.peak_tflops("bfloat16"), device.free_bytes() or 0
    alike = [gpu for gpu in GPUS.values() if peak is not None and round(gpu.half_flops / 1e12) == round(peak)]
    if not alike:
        raise ConfigurationError(
            f"there are no built-in figures for this GPU; select a similar GPU with --like {'|'.join(GPUS)}"
        )
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory))


def _figures(base: Gpu, rates: Rates, *, is_cuda: bool) -> Gpu:
    """Return the figures of ``base``, updated with the measured rates.

    On a CPU the peak is the highest measured rate.
    """
    half, single = (list(shapes.values()) for shapes in (rates.half_products, rates.single_products))
    peak = base.half_flops if is_cuda else max(half)
    share = min(1.0, statistics.median(half) / peak)
    attention = {
        size: AttentionRate(rates.attention_forward[size] / peak, rates.attention_backward[size] / peak)
        for size in rates.attention_forward
    }
    products = {f"{'x'.join(map(str, shape))}": f"{rate / 1e12:.4g}" for shape, rate in rates.half_products.items()}
    attended = (", ").join(
        f"head size {size}: {rate.forward:.3f} and {rate.backward:.3f}" for size, rate in attention.items()
    )
    return dataclasses.replace(
        base,
        name=f"measured, {f'like {base.name}' if is_cuda else 'a CPU'}",
        half_flops=peak,
        single_flops=base.single_flops if is_cuda else max(single),
        float8_flops=base.float8_flops if is_cuda else 0.0,
        float4_flops=base.float4_flops if is_cuda else 0.0,
        product_share=share,
        # FP8 matmuls are not measured: their share of the peak is scaled like the 16-bit share.
        float8_share=min(1.0, base.float8_share * share / base.product_share) if is_cuda else 0.0,
        # The planner multiplies every bandwidth by MEMORY_SHARE, as it does for published peaks.
        memory_bandwidth=rates.memory_bytes_per_s / MEMORY_SHARE,
        host_bandwidth=rates.host_bytes_per_s / MEMORY_SHARE,
        flash=attention,
        cudnn=attention,
        sources=(
            "measured by tools/calibrate.py; attention is torch's own",
            f"TFLOP/s of bfloat16 GEMMs: {', '.join(f'{shape} {rate}' for shape, rate in products.items())}",
            f"attention, share of {peak / 1e12:.4g} TFLOP/s: {attended}",
            f"memory {rates.memory_bytes_per_s / 1e9:.1f} GB/s, copies to the host "
            f"{rates.host_bytes_per_s / 1e9:.1f} GB/s",
            f"links, network and memory size of {base.name}",
        ),
    )
