"""What the planning commands share: training flags read for machines that are not here, and where they would run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.gpu import GPUS, Gpu, find_gpu
from megatron.planner.gpu_file import read_gpu
from megatron.planner.implementations import IMPLEMENTATIONS
from megatron.planner.simulation.vocabulary import with_known_vocabulary

MOST_RANKS = 1 << 17


def add_platform(parser: argparse.ArgumentParser) -> None:
    """Declare where a run is planned, and what runs it."""
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="TYPE",
        help=f"one of {', '.join(GPUS)}, or a file that tools/calibrate.py wrote (h100-80gb)",
    )
    parser.add_argument(
        "--implementation", default="ours", metavar="NAME", help=f"one of {', '.join(IMPLEMENTATIONS)} (ours)"
    )
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
    """Refuse an imbalance of experts that a model does not have.

    Raises:
        ConfigurationError: the model has no experts.
    """
    if imbalance is not None and model.num_experts is None:
        raise ConfigurationError(
            f"--expert-imbalance {imbalance:g} has no effect on a model without experts; leave it out, or give "
            "--num-experts"
        )


def read_planned_run(words: Sequence[str], world_size: int) -> ParsedArguments:
    """Return a configuration with the size of its vocabulary; data, tokenizer and the length of the run may be missing.

    Raises:
        ConfigurationError: the flags are wrong, or do not say the size of the vocabulary.
    """
    parsed = resolve_arguments(words, world_size, needs_files=False)
    return replace(parsed, config=with_known_vocabulary(parsed.config))


def find_platform(name: str) -> Gpu:
    """Return a GPU type by its name, or by a file of figures that tools/calibrate.py wrote.

    Raises:
        ConfigurationError: no figures are known for it, or the file holds none.
    """
    return read_gpu(Path(name)) if name.endswith(".json") else find_gpu(name)


def check_world_size(flag: str, size: int) -> None:
    """Refuse a number of ranks that cannot be planned.

    Raises:
        ConfigurationError: it is below 1, or above what is planned in seconds.
    """
    if not 1 <= size <= MOST_RANKS:
        raise ConfigurationError(f"{flag} {size} is not between 1 and {MOST_RANKS}; give the number of the run's GPUs")


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that a flag names and that could not be written, as far as that shows before.

    Raises:
        ConfigurationError: its folder is not there, or it is a folder itself, or one of both may not be written to or
            looked at.
    """
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            problem = "its folder is not there"
        elif path.is_dir():
            problem = "it is a folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            problem = "permission is missing"
        else:
            return
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigurationError(f"{flag} {path} cannot be written: {problem}; give another file")


def write_text(flag: str, path: Path, text: str) -> None:
    """Write a file that a flag names.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{flag} {path} cannot be written: {error.strerror}; give another file") from error
