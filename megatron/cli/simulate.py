"""Simulate one training step of one rank on a GPU, without a GPU.

megatron simulate TRAINING-FLAGS --world-size 8 --rank 0 --gpu h100-80gb

The flags are those of pretrain_gpt.py. Nothing is computed: the step's kernels, memory, host waits and communication
are recorded, and its time is estimated from the GPU's published figures. No GPU, data or tokenizer is needed. With
pipeline parallelism, the step time is that of the first or the last stage, whichever is slower.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from megatron.cli.arguments import Parser, declare_script, exit_status_of
from megatron.cli.planner_arguments import check_world_size, check_writable, write_text
from megatron.config import resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import ParallelSizes
from megatron.planner import DEEPEP_AS_ALLTOALL, GPUS, find_gpu, lacks_format, with_known_vocabulary
from megatron.planner.simulation import load_fake_cuda

# Functions import torch, not the module: the library that replaces the CUDA driver must be loaded before torch.


def build_parser() -> Parser:
    """Declare the flags that are not training flags."""
    parser = Parser(
        prog="megatron simulate",
        usage="%(prog)s TRAINING-FLAGS [--world-size N] [--rank R] [--gpu TYPE] [--without-triton] [--json FILE] "
        "[--memory-plot FILE]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare_script(parser, before=load_fake_cuda)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks (1)")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank to report, counted from 0 (the first rank of the first or the last stage, whichever is slower)",
    )
    parser.add_argument("--gpu", default="h100-80gb", metavar="TYPE", help=f"one of {', '.join(GPUS)} (h100-80gb)")
    parser.add_argument(
        "--without-triton", action="store_true", help="simulate a node without Triton and FlexAttention"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole record to this file")
    parser.add_argument(
        "--memory-plot", type=Path, metavar="FILE", help="plot the memory during the step to this file (.svg)"
    )
    parser.add_deprecated_flag("--memory-picture", "--memory-plot")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments, training_flags = build_parser().parse_known_args(argv)
    return exit_status_of(functools.partial(dry_run_step, arguments, training_flags))


def dry_run_step(arguments: argparse.Namespace, training_flags: list[str]) -> None:
    """Dry-run one step and report it.

    Raises:
        ConfigurationError: the flags are invalid, or this host cannot simulate CUDA.
    """
    _check(arguments)
    gpu = find_gpu(arguments.gpu)
    parsed = resolve_arguments(training_flags, arguments.world_size, needs_files=False)
    config = with_known_vocabulary(parsed.config)
    fp8 = config.model.fp8
    problem = lacks_format(gpu, in_nvfp4=fp8.fp4_format is not None) if fp8.is_quantized else None
    if problem is not None:
        flags = "FP8" if fp8.fp4_format is None else "FP4"
        raise ConfigurationError(f"--gpu {problem}, or omit the {flags} flags")
    for note in parsed.notes:
        print(note)
    if config.model.moe.asks_for_deepep:
        print(DEEPEP_AS_ALLTOALL)
    load_fake_cuda()
    from megatron.planner.simulation import (
        EstimatedRun,
        draw_memory,
        estimate_step,
        has_triton_package,
        slowest_of,
        to_json,
        to_text,
    )
    from megatron.planner.simulation.dry_run import dry_run
    from megatron.training import forward_step, provide_model

    if not (arguments.without_triton or has_triton_package()):
        print("Triton is not installed: the kernels of this project are counted from their source code")

    estimated = []
    for rank in ranks_to_run(config.parallel_sizes, arguments.rank):
        run = dry_run(
            *(config, rank, gpu, provide_model, forward_step),
            has_triton=not arguments.without_triton,
        )
        estimated.append(EstimatedRun(run, estimate_step(run, gpu)))
    reported = estimated[0] if arguments.rank is not None else slowest_of(estimated)
    print(to_text(reported, gpu, estimated))
    if arguments.json is not None:
        write_text("--json", arguments.json, json.dumps(to_json(reported, gpu, estimated), indent=1) + "\n")
    if arguments.memory_plot is not None:
        write_text("--memory-plot", arguments.memory_plot, draw_memory(reported.run, gpu))


def ranks_to_run(sizes: ParallelSizes, requested: int | None) -> list[int]:
    """Return the requested rank, then one rank of each other end stage."""
    of_stage = sizes.world_size // sizes.pp
    ends = sorted({0, sizes.world_size - of_stage})
    if requested is None:
        return ends
    return [requested, *(rank for rank in ends if rank // of_stage != requested // of_stage)]


def _check(arguments: argparse.Namespace) -> None:
    check_world_size("--world-size", arguments.world_size)
    if arguments.rank is not None and not 0 <= arguments.rank < arguments.world_size:
        raise ConfigurationError(
            f"--rank {arguments.rank} is not in 0..{arguments.world_size - 1}; change it or --world-size"
        )
    for flag, path in (("--json", arguments.json), ("--memory-plot", arguments.memory_plot)):
        if path is not None:
            # Checked before the dry run, which takes a while for a large model.
            check_writable(flag, path)
    picture = arguments.memory_plot
    if picture is not None and picture.suffix != ".svg":
        raise ConfigurationError(f"--memory-plot {picture}: the plot is an SVG file; use a name that ends in .svg")
