"""Convert a checkpoint: open it, change its layout and precision, write it, verify the result, and publish it.

The new checkpoint is written under a temporary name and published only after verification.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.checkpoint.checkpoint_folder import (
    FORMAT_NAMES,
    FORMATS,
    TRACKER_FILE,
    CheckpointFormat,
    detect_format,
    find_checkpoint,
    iteration_folder,
)
from megatron.checkpoint.checkpoint_source import AveragedSource, CheckpointSource, DequantizedSource, SourceView
from megatron.checkpoint.comparison import (
    LOGITS_TOLERANCE,
    check_result,
    compare_logits,
    parameters_of,
    transformers_logits,
)
from megatron.checkpoint.conversion_request import ConversionRequest, Target, idle_flags
from megatron.checkpoint.formats import (
    MergedSource,
    NativeSource,
    PeftSource,
    TokenizerWriter,
    write_native,
    write_peft,
)
from megatron.checkpoint.formats.huggingface import (
    ExportedView,
    HuggingFaceSource,
    fetch_model,
    find_hub_model,
    write_hugging_face,
)
from megatron.checkpoint.formats.megatron import carried_values, write_megatron_torch, write_torch_dist
from megatron.checkpoint.inference_model import EVEN_PIPELINE, sample_tokens, source_config, streamed_logits
from megatron.checkpoint.progress import ByteProgress
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.checkpoint.upcycling import UpcycledSource
from megatron.config import RunConfig
from megatron.config.checks import LAYOUT_CHECKS
from megatron.core.console import Log
from megatron.core.dist_checkpointing import OPTIMIZER_PREFIX, RNG_PREFIX, sync_folder
from megatron.core.errors import CheckpointError, ConfigurationError, TokenizerError
from megatron.core.pipeline_parallel import layout_problems
from megatron.core.tokenizers import HuggingFaceTokenizer, NullTokenizer, record_tokenizer, reject_unused_flags
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.transformer import ADAPTERS
from megatron.training.fault_tolerance import FOLDER_RECORD, own_folder

_TARGET_FLAGS = {
    "--tensor-model-parallel-size": "--target-tensor-parallel-size",
    "--pipeline-model-parallel-size": "--target-pipeline-parallel-size",
    "--expert-model-parallel-size": "--target-expert-parallel-size",
    "--num-layers-per-virtual-pipeline-stage": "--target-num-layers-per-virtual-pipeline-stage",
}


def retarget(common: Mapping[str, Any], target: Target, has_random_streams: bool = False) -> dict[str, Any]:
    """Return a checkpoint's shared state with the target layout, as recorded by a single model replica.

    Progress, optimizer and schedule are unchanged, so that a run can resume from the result. With random streams the
    layout that wrote them is also unchanged; a run at any layout continues the streams that it can.

    Raises:
        ConfigurationError: the model does not support the layout; the message lists every problem with valid values.
    """
    old = RunConfig.from_dict(common["config"])
    config = _with_precision(_with_layout(old, target), target.params_dtype)
    model = config.model
    problems = [problem for check in LAYOUT_CHECKS for problem in check.find(config)]
    problems += layout_problems(model, model.num_layers, model.pipeline_model_parallel_layout)
    if model.pipeline_model_parallel_size == 1 and model.num_layers_per_virtual_pipeline_stage is not None:
        problems.append(
            f"--num-layers-per-virtual-pipeline-stage {model.num_layers_per_virtual_pipeline_stage} divides a "
            "pipeline, but --pipeline-model-parallel-size is 1; omit it"
        )
    if problems:
        raise ConfigurationError([_with_target_flags(problem) for problem in problems])
    changed = dict(common) | {"config": config.to_dict()}
    if not has_random_streams:
        changed["layout"] = config.parallel_sizes.record()
    if not target.keeps_optimizer:
        changed |= {"optimizer": None, "scheduler": None}
    return changed


def _with_layout(config: RunConfig, target: Target) -> RunConfig:
    old = config.model
    tp = _or(target.tensor_parallel_size, old.tensor_model_parallel_size)
    pp = _or(target.pipeline_parallel_size, old.pipeline_model_parallel_size)
    virtual = target.num_layers_per_virtual_pipeline_stage
    sizes = {
        "--target-tensor-parallel-size": tp,
        "--target-pipeline-parallel-size": pp,
        "--target-expert-parallel-size": target.expert_parallel_size,
        "--target-num-layers-per-virtual-pipeline-stage": virtual,
        "--make-vocab-size-divisible-by": target.make_vocab_size_divisible_by,
    }
    wrong = [
        f"{name} {size} is not positive; use 1 or more" for name, size in sizes.items() if size is not None and size < 1
    ]
    wrong += _expert_problems(old.moe.num_experts, target.expert_parallel_size)
    if wrong:
        raise ConfigurationError(wrong)
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": _or(target.expert_parallel_size, old.expert_model_parallel_size),
        "sequence_parallel": old.sequence_parallel and tp > 1,
        "make_vocab_size_divisible_by": _or(target.make_vocab_size_divisible_by, old.make_vocab_size_divisible_by),
    }
    if virtual is not None or pp != old.pipeline_model_parallel_size:
        # A pipeline layout for another number of stages does not apply here.
        changes |= {**EVEN_PIPELINE, "num_layers_per_virtual_pipeline_stage": virtual}
    if target.expert_parallel_size is not None:
        changes["expert_tensor_parallel_size"] = None
    model = dataclasses.replace(old, **changes)
    sizes_of_copy = model.parallel_sizes
    # The smallest number of model replicas over which the experts can be sharded.
    stage, experts = sizes_of_copy.size_of(("cp", "tp")), sizes_of_copy.ep * sizes_of_copy.expert_tp
    copies = experts // math.gcd(stage, experts)
    return dataclasses.replace(config, model=model, world_size=sizes_of_copy.world_size * copies)


def _expert_problems(num_experts: int | None, size: int | None) -> list[str]:
    if size is None or size < 1 or (num_experts is None and size == 1):
        return []
    if num_experts is None:
        return [f"--target-expert-parallel-size {size}: the model has no experts; omit it"]
    if num_experts % size:
        works = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        return [f"--target-expert-parallel-size {size} does not divide {num_experts} experts; sizes that work: {works}"]
    return []


def _with_precision(config: RunConfig, dtype: str | None) -> RunConfig:
    if dtype is None:
        return config
    precision: dict[str, Any] = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **precision),
        optimizer=dataclasses.replace(config.optimizer, params_dtype=dtype),
    )


def _or(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


def _with_target_flags(problem: str) -> str:
    for name, target_name in _TARGET_FLAGS.items():
        problem = problem.replace(name, target_name)
    return problem


STAGING_FOLDER = ".converting"


def refuse_existing(save_dir: Path, iteration: int | Literal["release"]) -> Path:
    """Return the folder of the converted checkpoint.

    Raises:
        CheckpointError: the folder exists already.
    """
    if save_dir.exists() and not save_dir.is_dir():
        raise CheckpointError(f"--save-dir {save_dir} is a file; pass a folder")
    folder = save_dir / iteration if isinstance(iteration, str) else iteration_folder(save_dir, iteration)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; remove it, or use a different --save-dir")
    return folder


def publish_checked(
    save_dir: Path,
    iteration: int | Literal["release"],
    write: Callable[[Path], Path],
    check: Callable[[Path], None],
    log: Callable[[str], None],
) -> Path:
    """Write and check a checkpoint, then publish it in ``save_dir`` and point the tracker file at it.

    ``write`` writes a run's folder to the given folder, and returns the iteration's folder. ``check`` receives the
    iteration's folder and raises to prevent publication. A checkpoint that is not published is removed.

    Raises:
        CheckpointError: the checkpoint exists already, or another conversion writes to the folder.
        FolderInUseError: a run saves to the folder.
    """
    final = refuse_existing(save_dir, iteration)
    with _staging(save_dir, log) as staging:
        folder = write(staging)
        check(folder)
        os.rename(folder, final)
        sync_folder(save_dir)
        os.rename(staging / TRACKER_FILE, save_dir / TRACKER_FILE)
        sync_folder(save_dir)
    return final


@contextmanager
def _staging(save_dir: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Yield an empty hidden folder locked by this process; remove it, and the parents created for it, afterwards."""
    made = [folder for folder in (save_dir, *save_dir.parents) if not folder.exists()]
    staging = save_dir / STAGING_FOLDER
    try:
        staging.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"cannot write into --save-dir {save_dir}: {error.strerror}; use a different folder"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"another conversion is writing into {save_dir}; wait for it to end") from error
        left = list(staging.iterdir())
        if left:
            log(f"removing the files that an interrupted conversion left in {staging}")
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            owner = own_folder(
                save_dir, secrets.token_hex(4), "a conversion", log, FOLDER_RECORD, f"--save-dir {save_dir}"
            )
            with ExitStack() as stack:
                stack.callback(owner.release)
                yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()
    finally:
        os.close(descriptor)


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
    """Print a line and flush standard output."""
    print(line, flush=True)


def convert(request: ConversionRequest, log: Log = say) -> None:
    """Convert one checkpoint.

    Raises:
        InputError: the checkpoint cannot be read or cannot be converted to the target.
        ConversionMismatchError: the result differs from the source, and was not published.
    """
    load_dir = request.load_dir
    if FORMATS[request.loader] == "hf" and (model := find_hub_model(str(load_dir))) is not None:
        load_dir = fetch_model(model, log)
    found = find_checkpoint(load_dir, request.ckpt_step, _LOADED[FORMATS[request.loader]])
    saver = target_format(request.loader, request.saver, found.format)
    if request.test_logits and "hf" not in (found.format, saver):
        raise ConfigurationError(
            "--test-logits compares logits with a Hugging Face model, but neither side is a Hugging Face model; omit it"
        )
    log(f"converting {found.folder} ({found.format}) to {request.save_dir} ({saver})")
    for line in idle_flags(request, found.format, saver):
        log(line)
    formats = (found.format, saver)
    base = None if request.base_model is None else find_checkpoint(request.base_model).folder
    source = open_for(formats, found.folder, request.true_vocab_size, request.told, base)
    if isinstance(source, NativeSource) and source.lost_streams is not None:
        log(source.lost_streams)
    try:
        source = AveragedSource(source) if request.takes_averages else source
        source = with_adapters(source, request.merges_adapters, saver, base)
        if request.upcycling is not None:
            source = UpcycledSource(source, request.upcycling)
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
    """Open either side of a conversion; only the native format can hold random number streams, which may be lost.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if detect_format(folder) == "native":
        return NativeSource(folder, with_random_streams=formats == ("native", "native"), needs_streams=False)
    return open_checkpoint(folder, vocab_size=vocab_size, told=told, base=base)


def with_adapters(
    source: CheckpointSource, merges: bool, saver: CheckpointFormat, base: Path | None = None
) -> CheckpointSource:
    """Return a checkpoint with its LoRA adapters merged, or unchanged if the target format supports adapters.

    Adapters of quantized weights are merged into the weights of ``base``, or else into the dequantized weights.

    Raises:
        ConfigurationError: there are no adapters to merge, or the target format does not support them.
        CheckpointError: ``base`` is not the base model.
    """
    is_quantized = source.common["config"]["model"].get("lora_base_quantization") is not None
    if is_quantized and (merges or saver != "native"):
        source = DequantizedSource(source, open_checkpoint(base) if merges and base is not None else None)
    elif merges and base is not None and not isinstance(source, PeftSource):
        raise ConfigurationError(
            f"--base-model {base}: the weights of {source.folder} are not quantized, and the adapters belong to them; "
            "omit it"
        )
    if merges:
        return MergedSource(source)
    if saver not in ("native", "peft") and any(ADAPTERS in name for name in source.tensors):
        raise ConfigurationError(
            f"{source.folder} contains LoRA adapters, which {FORMAT_NAMES[saver]} cannot store; add --merge-lora, "
            "or write the adapters alone with --saver peft"
        )
    return source


def target_format(loader: str, saver: str, found: CheckpointFormat) -> CheckpointFormat:
    """Return the format to write: ``megatron`` is the loaded format with ``--loader megatron``, otherwise native."""
    if FORMATS[saver] == "megatron":
        return found if FORMATS[loader] == "megatron" else "native"
    (wanted,) = _LOADED[FORMATS[saver]]
    return wanted


def read_target(request: ConversionRequest, source: CheckpointSource, saver: CheckpointFormat) -> Target:
    """Return the target as far as the source and the format to write support it.

    Raises:
        ConfigurationError: only the weights of a checkpoint with optimizer state would change their dtype.
    """
    dtype = request.target.params_dtype
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in source.tensors)
    keeps_optimizer = has_optimizer and request.target.keeps_optimizer and saver not in ("hf", "peft")
    if dtype == source.common["config"]["model"]["params_dtype"]:
        dtype = None
    if dtype is not None and keeps_optimizer:
        raise ConfigurationError(
            f"--{'bf16' if dtype == 'bfloat16' else 'fp16'} converts weights only, but {source.folder} contains "
            "optimizer state; add --no-save-optim, or omit it"
        )
    return dataclasses.replace(request.target, params_dtype=dtype, keeps_optimizer=keeps_optimizer)


def is_random_stream(name: str) -> bool:
    return name.startswith(RNG_PREFIX)


def describe(view: CheckpointSource, log: Log) -> None:
    """Log a summary of the conversion's source."""
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
    """Write, verify and publish the result, and return its path. ``formats`` are those of the source and the result."""
    saver, is_foreign = formats[1], "hf" in formats
    progress = ByteProgress("writing", sum(info.num_bytes for info in view.tensors.values()), log)
    counted = SourceView(view, view.common, on_read=progress.add)

    def check(folder: Path) -> None:
        progress.finish()
        if request.verify:
            if isinstance(source, UpcycledSource):
                compare_with_dense(source, log)
            result = open_for(formats, folder, int(view.common["config"]["model"]["vocab_size"]))
            try:
                expected: CheckpointSource = view
                if saver == "hf" and isinstance(result, HuggingFaceSource):
                    expected = ExportedView(view, result.family, result.config)
                check_result(expected, result, keeps_state=saver != "hf", compares_logits=is_foreign, log=log)
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
    # An untrained model has no iteration; Megatron-LM names its folder ``release``.
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
        TokenizerError: the tokenizer selected on the command line cannot be built.
    """
    given = dict(request.tokenizer)
    while isinstance(source, (MergedSource, PeftSource, DequantizedSource, UpcycledSource)):
        source = source.base
    if not given:
        return source.write_tokenizer if isinstance(source, HuggingFaceSource) else None
    if "tokenizer_type" not in given:
        is_folder = "tokenizer_model" in given and Path(given["tokenizer_model"]).is_dir()
        given["tokenizer_type"] = HuggingFaceTokenizer.name if is_folder else "GPT2BPETokenizer"
    reject_unused_flags(given["tokenizer_type"], given)
    vocab_size = int(source.common["config"]["model"]["vocab_size"])
    if given["tokenizer_type"] == NullTokenizer.name:
        given["vocab_size"] = vocab_size - 1  # the setting excludes the end of document
    tokenizer = build_tokenizer(**given)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, but the model has {vocab_size}; use the tokenizer of "
            "the model"
        )

    def write(folder: Path) -> bool:
        record_tokenizer(tokenizer, folder)
        return True

    return write


def compare_with_dense(source: UpcycledSource, log: Log) -> None:
    """Compare the logits of an upcycled model with those of the dense model.

    Raises:
        ConversionMismatchError: the logits differ by more than the rounding of the scaled weights.
    """
    tokens = sample_tokens(source_config(source))
    ours, theirs = streamed_logits(source, tokens), streamed_logits(source.base, tokens)
    compare_logits(ours, theirs, "the dense model", max(LOGITS_TOLERANCE, 8 * source.rounding), log)


def compare_with_transformers(view: CheckpointSource, folder: Path, log: Log) -> None:
    """Compare the model's logits with those of the transformers package for the Hugging Face folder.

    Raises:
        ConversionMismatchError: the logits differ.
        InputError: the package is not installed.
    """
    tokens = sample_tokens(source_config(view))
    ours, theirs = streamed_logits(view, tokens), transformers_logits(folder, tokens)
    compare_logits(ours, theirs, "the transformers package", TRANSFORMERS_TOLERANCE, log)
