"""One conversion: open, retarget, write beside the place, check, publish."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from megatron.core.dist_checkpointing.state_dict import OPTIMIZER_PREFIX
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.native.native_writer import write_native
from megatron.interop.open_checkpoint import CheckpointFormat, open_checkpoint
from megatron.interop.source_view import SourceView
from tools.checkpoint.checkpoint_folder import find_checkpoint
from tools.checkpoint.conversion_check import check_result, parameters_of
from tools.checkpoint.convert_arguments import FORMATS
from tools.checkpoint.progress import ByteProgress
from tools.checkpoint.publication import publish_checked, refuse_existing
from tools.checkpoint.target_layout import Target, retarget

Log = Callable[[str], None]
_LOADED: dict[str, tuple[CheckpointFormat, ...]] = {
    "megatron": ("native", "torch"),
    "native": ("native",),
    "torch": ("torch",),
    "hf": ("hf",),
}


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def convert(arguments: argparse.Namespace, log: Log = say) -> None:
    """Do what the command line asks.

    Raises:
        InputError: the checkpoint cannot be read, or cannot become what is asked for.
        ConversionMismatchError: the result is not what was converted; it was not published.
    """
    found = find_checkpoint(arguments.load_dir, arguments.ckpt_step, _LOADED[FORMATS[arguments.loader]])
    saver = target_format(arguments.loader, arguments.saver, found.format)
    log(f"converting {found.folder} ({found.format}) to {arguments.save_dir} ({saver})")
    source = open_checkpoint(found.folder)
    try:
        target = read_target(arguments, source)
        common = retarget(source.common, target)
        dtype = None if target.params_dtype is None else getattr(torch, target.params_dtype)
        view = SourceView(source, common, keeps_optimizer=target.keeps_optimizer and saver != "hf", weights_dtype=dtype)
        describe(view, log)
        run(view, saver, arguments, log)
    finally:
        source.close()


def target_format(loader: str, saver: str, found: CheckpointFormat) -> CheckpointFormat:
    """Return the format to write: ``megatron`` stays what ``--loader megatron`` found, and is native otherwise."""
    if FORMATS[saver] == "megatron":
        return found if FORMATS[loader] == "megatron" else "native"
    (wanted,) = _LOADED[FORMATS[saver]]
    return wanted


def read_target(arguments: argparse.Namespace, source: CheckpointSource) -> Target:
    """Return what is to be changed.

    Raises:
        ConfigurationError: the weights alone of a checkpoint with optimizer state would change their type.
    """
    dtype = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in source.tensors)
    keeps_optimizer = has_optimizer and not arguments.no_save_optim
    if dtype == source.common["config"]["model"]["params_dtype"]:
        dtype = None
    if dtype is not None and keeps_optimizer:
        raise ConfigurationError(
            f"--{'bf16' if arguments.bf16 else 'fp16'} converts weights only, and {source.folder} holds optimizer "
            "state; add --no-save-optim, or leave it out"
        )
    return Target(
        tensor_parallel_size=arguments.target_tensor_parallel_size,
        pipeline_parallel_size=arguments.target_pipeline_parallel_size,
        num_layers_per_virtual_pipeline_stage=arguments.target_num_layers_per_virtual_pipeline_stage,
        make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
        params_dtype=dtype,
        keeps_optimizer=keeps_optimizer,
    )


def describe(view: CheckpointSource, log: Log) -> None:
    """Print what is converted."""
    sizes = view.common["layout"]
    state = "with" if any(name.startswith(OPTIMIZER_PREFIX) for name in view.tensors) else "without"
    log(
        f"  {parameters_of(view)} parameters in {len(view.tensors)} tensors, {state} optimizer state; "
        f"iteration {view.common['progress']['iteration']}; tensor parallel "
        f"{sizes['tensor_model_parallel_size']}, pipeline parallel {sizes['pipeline_model_parallel_size']}"
    )


def run(view: CheckpointSource, saver: CheckpointFormat, arguments: argparse.Namespace, log: Log) -> None:
    """Write, check and publish."""
    iteration: int | Literal["release"] = int(view.common["progress"]["iteration"]) or "release"

    def write(directory: Path) -> Path:
        progress = ByteProgress("writing", sum(info.num_bytes for info in view.tensors.values()), log)
        folder = write_native(SourceView(view, view.common, on_read=progress.add), directory, iteration)
        progress.finish()
        return folder

    def check(folder: Path) -> None:
        if arguments.verify:
            check_result(view, folder, saver == "hf", log)

    if saver != "native":
        raise CheckpointError(f"--saver {arguments.saver} cannot be written yet")
    refuse_existing(arguments.save_dir, iteration)
    final = publish_checked(arguments.save_dir, iteration, write, check, log)
    log(f"converted to {final}")
