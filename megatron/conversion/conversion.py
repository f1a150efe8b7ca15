"""One conversion: open, retarget, write beside the place, check, publish."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.conversion.checkpoint_folder import find_checkpoint
from megatron.conversion.conversion_check import check_result, compare_logits, parameters_of, transformers_logits
from megatron.conversion.conversion_request import FORMATS, ConversionRequest, Target, idle_flags
from megatron.conversion.progress import ByteProgress
from megatron.conversion.publication import publish_checked
from megatron.conversion.target_layout import retarget
from megatron.core.dist_checkpointing.state_dict import OPTIMIZER_PREFIX, RNG_PREFIX
from megatron.core.errors import ConfigurationError, TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.core.tokenizers.tokenizer_record import record_tokenizer
from megatron.core.transformer.lora_targets import ADAPTERS
from megatron.interop.adapters.merged_source import MergedSource
from megatron.interop.adapters.peft_export import write_peft
from megatron.interop.adapters.peft_source import PeftSource
from megatron.interop.averaged_source import AveragedSource
from megatron.interop.checkpoint_format import FORMAT_NAMES, CheckpointFormat
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.huggingface.model_export import write_hugging_face
from megatron.interop.huggingface.source import HuggingFaceSource
from megatron.interop.megatron_torch.megatron_torch_writer import write_megatron_torch
from megatron.interop.native.native_source import NativeSource
from megatron.interop.native.native_writer import TokenizerWriter, write_native
from megatron.interop.open_checkpoint import open_checkpoint
from megatron.interop.source_view import SourceView
from megatron.interop.streamed_logits import sample_tokens, source_config, streamed_logits
from megatron.interop.torch_dist.torch_dist_writer import carried_values, write_torch_dist

Log = Callable[[str], None]
TRANSFORMERS_TOLERANCE = 1e-4
_LOADED: dict[str, tuple[CheckpointFormat, ...]] = {
    "megatron": ("native", "torch", "torch_dist"),
    "native": ("native",),
    "torch": ("torch",),
    "torch_dist": ("torch_dist",),
    "hf": ("hf",),
    "peft": ("peft",),
    "torchtitan": ("torchtitan",),
}


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def convert(request: ConversionRequest, log: Log = say) -> None:
    """Convert one checkpoint.

    Raises:
        InputError: the checkpoint cannot be read, or not converted to the target.
        ConversionMismatchError: the result is not what was converted; it was not published.
    """
    found = find_checkpoint(request.load_dir, request.ckpt_step, _LOADED[FORMATS[request.loader]])
    saver = target_format(request.loader, request.saver, found.format)
    if request.test_logits and "hf" not in (found.format, saver):
        raise ConfigurationError("--test-logits compares with a Hugging Face model; use it where one side is one")
    log(f"converting {found.folder} ({found.format}) to {request.save_dir} ({saver})")
    for line in idle_flags(request, found.format, saver):
        log(line)
    formats = (found.format, saver)
    base = None if request.base_model is None else find_checkpoint(request.base_model).folder
    source = open_for(formats, found.folder, request.true_vocab_size, request.told, base)
    try:
        source = AveragedSource(source) if request.takes_averages else source
        source = with_adapters(source, request.merges_adapters, saver)
        target = read_target(request, source, saver)
        common = retarget(source.common, target, has_random_streams=any(map(is_random_stream, source.tensors)))
        dtype = None if target.params_dtype is None else getattr(torch, target.params_dtype)
        view = SourceView(source, common, keeps_optimizer=target.keeps_optimizer, weights_dtype=dtype)
        describe(view, log)
        final = run(source, view, formats, request, log)
    finally:
        source.close()
    log(f"converted to {final}")


def open_for(
    formats: tuple[CheckpointFormat, CheckpointFormat],
    folder: Path,
    vocab_size: int | None = None,
    told: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> CheckpointSource:
    """Open either side of a conversion; random number streams have a place in the native format only.

    Raises:
        CheckpointError: it cannot be read.
    """
    if formats == ("native", "native"):
        return NativeSource(folder, with_random_streams=True)
    return open_checkpoint(folder, vocab_size=vocab_size, told=told, base=base)


def with_adapters(source: CheckpointSource, merges: bool, saver: CheckpointFormat) -> CheckpointSource:
    """Return a checkpoint with its low-rank adapters merged, or as it is where the format has a place for them.

    Raises:
        ConfigurationError: there are none to merge, or no place for them.
    """
    if merges:
        return MergedSource(source)
    if saver not in ("native", "peft") and any(ADAPTERS in name for name in source.tensors):
        raise ConfigurationError(
            f"{source.folder} holds low-rank adapters, for which {FORMAT_NAMES[saver]} has no place; add --merge-lora, "
            "or write the adapters alone with --saver peft"
        )
    return source


def target_format(loader: str, saver: str, found: CheckpointFormat) -> CheckpointFormat:
    """Return the format to write: ``megatron`` stays what ``--loader megatron`` found, and is native otherwise."""
    if FORMATS[saver] == "megatron":
        return found if FORMATS[loader] == "megatron" else "native"
    (wanted,) = _LOADED[FORMATS[saver]]
    return wanted


def read_target(request: ConversionRequest, source: CheckpointSource, saver: CheckpointFormat) -> Target:
    """Return the target that the source and the format to write allow.

    Raises:
        ConfigurationError: the weights alone of a checkpoint with optimizer state would change their type.
    """
    dtype = request.target.params_dtype
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in source.tensors)
    keeps_optimizer = has_optimizer and request.target.keeps_optimizer and saver not in ("hf", "peft")
    if dtype == source.common["config"]["model"]["params_dtype"]:
        dtype = None
    if dtype is not None and keeps_optimizer:
        raise ConfigurationError(
            f"--{'bf16' if dtype == 'bfloat16' else 'fp16'} converts weights only, and {source.folder} holds optimizer "
            "state; add --no-save-optim, or leave it out"
        )
    return dataclasses.replace(request.target, params_dtype=dtype, keeps_optimizer=keeps_optimizer)


def is_random_stream(name: str) -> bool:
    """Return whether a tensor is the state of a stream of random numbers."""
    return name.startswith(RNG_PREFIX)


def describe(view: CheckpointSource, log: Log) -> None:
    """Print what is converted."""
    sizes = view.common["config"]["model"]
    state = "with" if any(name.startswith(OPTIMIZER_PREFIX) for name in view.tensors) else "without"
    log(
        f"  {parameters_of(view)} parameters in {len(view.tensors)} tensors, {state} optimizer state; "
        f"iteration {view.common['progress']['iteration']}; tensor parallel "
        f"{sizes['tensor_model_parallel_size']}, pipeline parallel {sizes['pipeline_model_parallel_size']}"
    )


def run(
    source: CheckpointSource,
    view: CheckpointSource,
    formats: tuple[CheckpointFormat, CheckpointFormat],
    request: ConversionRequest,
    log: Log,
) -> Path:
    """Write, check and publish; return what appeared. ``formats`` are the source's and the result's."""
    saver, is_foreign = formats[1], "hf" in formats
    progress = ByteProgress("writing", sum(info.num_bytes for info in view.tensors.values()), log)
    counted = SourceView(view, view.common, on_read=progress.add)

    def check(folder: Path) -> None:
        progress.finish()
        if request.verify:
            result = open_for(formats, folder, int(view.common["config"]["model"]["vocab_size"]))
            try:
                check_result(view, result, keeps_state=saver != "hf", compares_logits=is_foreign, log=log)
            finally:
                result.close()
        if request.test_logits:
            compare_with_transformers(view, source.folder if formats[0] == "hf" else folder, log)

    if saver == "peft":
        base_model = None if request.base_model is None else str(request.base_model)
        write_peft(counted, request.save_dir, base_model=base_model)
        return Path(request.save_dir)
    if saver == "hf":
        write_hugging_face(counted, request.save_dir, check=check)
        return Path(request.save_dir)
    # A model that has not been trained yet has no iteration: Megatron's name for that is this.
    iteration: int | Literal["release"] = int(view.common["progress"]["iteration"]) or "release"
    write_tokenizer = tokenizer_writer(source, request)

    def write(directory: Path) -> Path:
        if saver == "torch":
            _, states = carried_values(source.folder)
            write_torch = partial(write_megatron_torch, random_states=states)
            return _write_megatron(write_torch, counted, directory, iteration, write_tokenizer)
        if saver == "torch_dist":
            return _write_megatron(write_torch_dist, counted, directory, iteration, write_tokenizer)
        return write_native(counted, directory, iteration, write_tokenizer=write_tokenizer)

    return publish_checked(request.save_dir, iteration, write, check, log)


def _write_megatron(
    write: Callable[[CheckpointSource, Path, int | Literal["release"]], Path],
    view: SourceView,
    directory: Path,
    iteration: int | Literal["release"],
    write_tokenizer: TokenizerWriter | None,
) -> Path:
    if write_tokenizer is None:
        return write(view, directory, iteration)
    folder = write(SourceView(view, {**view.common, "tokenizer": None}), directory, iteration)
    write_tokenizer(folder)
    return folder


def tokenizer_writer(source: CheckpointSource, request: ConversionRequest) -> TokenizerWriter | None:
    """Return a function that records the tokenizer in a checkpoint; None keeps the source's record, if any.

    Raises:
        TokenizerError: the tokenizer of the command line cannot be built.
    """
    given = dict(request.tokenizer)
    while isinstance(source, (MergedSource, PeftSource)):
        source = source.base
    if not given:
        return source.write_tokenizer if isinstance(source, HuggingFaceSource) else None
    if "tokenizer_type" not in given and Path(given.get("tokenizer_model", "")).is_dir():
        given["tokenizer_type"] = HuggingFaceTokenizer.name
    vocab_size = int(source.common["config"]["model"]["vocab_size"])
    if given.get("tokenizer_type") == NullTokenizer.name:
        given["vocab_size"] = vocab_size - 1  # counted without the end of a document
    tokenizer = build_tokenizer(**given)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, the model {vocab_size}; give the tokenizer of the model"
        )

    def write(folder: Path) -> bool:
        record_tokenizer(tokenizer, folder)
        return True

    return write


def compare_with_transformers(view: CheckpointSource, folder: Path, log: Log) -> None:
    """Compare the model's logits with those that the transformers package computes from the Hugging Face folder.

    Raises:
        ConversionMismatchError: the logits are not the same.
        InputError: the package is not installed.
    """
    tokens = sample_tokens(source_config(view))
    ours, theirs = streamed_logits(view, tokens), transformers_logits(folder, tokens)
    compare_logits(ours, theirs, "the transformers package", TRANSFORMERS_TOLERANCE, log)
