"""Arguments of the planning commands: training flags, GPU type and implementation, and --verify.

--verify runs the planned pipeline stages on a simulated GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.arguments import SpellingParser
from megatron.config import ParsedArguments, RunConfig, resolve_arguments
from megatron.core.console import waiting
from megatron.core.errors import ConfigurationError, MegatronError
from megatron.core.models.gpt import GPTConfig
from megatron.planner import (
    GPUS,
    HOPPER_MACHINES,
    IMPLEMENTATIONS,
    NATIVE,
    Gpu,
    Implementation,
    find_gpu,
    read_gpu,
    usable_bytes,
    with_known_vocabulary,
)
from megatron.planner.simulation import load_fake_cuda

if TYPE_CHECKING:
    from megatron.planner import VerifiedStage


MOST_RANKS = 1 << 17


def add_platform(parser: SpellingParser) -> None:
    """Declare the flags for the GPU type and the implementation that are planned for."""
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="TYPE",
        help=f"one of {', '.join(GPUS)}, or a file of tools/calibrate.py (h100-80gb)",
    )
    parser.add_argument(
        "--implementation",
        default=NATIVE.name,
        metavar="NAME",
        help=f"one of {', '.join(IMPLEMENTATIONS)} ({NATIVE.name})",
    )
    parser.add_deprecated_value("--implementation", "ours", NATIVE.name)
    add_imbalance(parser)


def add_imbalance(parser: argparse.ArgumentParser) -> None:
    """Declare ``--expert-imbalance``."""
    parser.add_argument(
        "--expert-imbalance",
        type=float,
        metavar="X",
        help="tokens of the most loaded expert-parallel rank divided by the mean: scales the time of expert GEMMs and "
        "token exchanges (1.0)",
    )


def check_imbalance(imbalance: float | None, model: GPTConfig) -> None:
    """Reject --expert-imbalance for a model without experts.

    Raises:
        ConfigurationError: the model has no experts.
    """
    if imbalance is not None and model.moe.num_experts is None:
        raise ConfigurationError(
            f"--expert-imbalance {imbalance:g} has no effect on a model without experts; omit it, or pass --num-experts"
        )


def read_planned_run(words: Sequence[str], world_size: int) -> ParsedArguments:
    """Parse training flags to a configuration with a known vocabulary size; data and tokenizer files may be missing.

    Raises:
        ConfigurationError: the flags are invalid, or do not determine the vocabulary size.
    """
    parsed = resolve_arguments(words, world_size, needs_files=False)
    return replace(parsed, config=with_known_vocabulary(parsed.config))


def find_platform(name: str) -> Gpu:
    """Find a GPU type by its name, or read it from a file of tools/calibrate.py.

    Raises:
        ConfigurationError: the name is unknown, or the file does not contain the figures of a GPU.
    """
    return read_gpu(Path(name)) if name.endswith(".json") else find_gpu(name)


def check_world_size(flag: str, size: int) -> None:
    """Check a number of ranks.

    Raises:
        ConfigurationError: the number is below 1 or above `MOST_RANKS`.
    """
    if not 1 <= size <= MOST_RANKS:
        raise ConfigurationError(f"{flag} {size} is not between 1 and {MOST_RANKS}; pass the number of GPUs of the run")


def check_writable(flag: str, path: Path) -> None:
    """Check, without writing, that an output file can be written.

    Raises:
        ConfigurationError: the folder is missing, the path is a folder, or a permission is missing.
    """
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            problem = "its folder does not exist"
        elif path.is_dir():
            problem = "it is a folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            problem = "permission is missing"
        else:
            return
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigurationError(f"{flag} {path} cannot be written: {problem}; use a different file")


def write_text(flag: str, path: Path, text: str) -> None:
    """Write the output file of a flag.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{flag} {path} cannot be written: {error.strerror}; use a different file") from error


HELP = "run the planned stages on a simulated GPU and compare the memory (5 to 60 s each)"
_MIB = 2**20

# Functions import torch, not the module: the library that replaces the CUDA driver must be loaded before torch.


def prepare_to_verify(implementation: Implementation) -> None:
    """Load the simulated CUDA driver; torch must not be imported yet.

    Raises:
        ConfigurationError: the implementation is another program, or this host cannot simulate CUDA.
    """
    if implementation.name != NATIVE.name:
        raise ConfigurationError(
            f"--verify simulates only --implementation {NATIVE.name}, but --implementation is {implementation.name}; "
            "change it or omit --verify"
        )
    load_fake_cuda()


def verify_plan(config: RunConfig, gpu: Gpu) -> Sequence[VerifiedStage]:
    """Dry-run the first stage, the last stage and the stage with the most memory, after `prepare_to_verify`.

    Raises:
        ConfigurationError: the dry run rejects the configuration.
    """
    from megatron.planner import stages_to_verify, verify_stage
    from megatron.training import forward_step, provide_model

    made_of = provide_model, forward_step
    stages, verified = stages_to_verify(config, gpu), []
    with waiting("running the plan's stages") as tried:
        for stage in stages:
            verified.append(verify_stage(config, stage, gpu, *made_of))
            tried(len(verified), len(stages))
    return verified


def verify_fitting_plan(config: RunConfig, gpu: Gpu) -> Sequence[VerifiedStage]:
    """Verify a plan like `verify_plan`, and check that it fits in GPU memory.

    Raises:
        ConfigurationError: the dry run rejects the configuration, or needs more memory than the GPU has.
    """
    verified = verify_plan(config, gpu)
    fullest = max(verified, key=lambda each: each.peak_bytes)
    needed, usable = fullest.peak_bytes + HOPPER_MACHINES.held_bytes, usable_bytes(gpu)
    if needed > usable:
        raise ConfigurationError(
            f"--verify: the dry run of stage {fullest.stage} needs {needed // _MIB} MiB, but the GPU has "
            f"{usable // _MIB} MiB (the plan predicted {(fullest.planned.total + HOPPER_MACHINES.held_bytes) // _MIB} "
            "MiB); omit --verify to print the command of this layout"
        )
    return verified


def describe_verified(verified: Sequence[VerifiedStage]) -> Iterator[str]:
    """Yield the comparison of plan and dry run for each stage."""
    yield "verified by a dry run on a simulated GPU:"
    for each in verified:
        yield from each.lines()


def check_agreement(verified: Sequence[VerifiedStage]) -> None:
    """Check that all dry runs agree with the plan.

    Raises:
        MegatronError: the dry run of a stage does not agree.
    """
    unlike = [str(each.stage) for each in verified if not each.agrees]
    if unlike:
        raise MegatronError(
            f"the dry run differs from the plan on stage {', '.join(unlike)} (see above); rely on the dry run"
        )
