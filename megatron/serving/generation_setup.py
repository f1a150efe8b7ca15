"""Load a checkpoint folder into an engine that generates text, on any number of ranks.

torch is imported only to build the model, so that usage errors are reported without delay.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats import idle_lines
from megatron.checkpoint.formats.huggingface import HubModel, fetch_model, fetch_on_every_node, find_hub_model
from megatron.config import DataConfig, RunConfig, TokenizerConfig
from megatron.config.checks import LAYOUT_CHECKS, SPREAD
from megatron.core.console import Log, waiting
from megatron.core.datasets import SFT_TEMPLATE, ChatTemplate, choose_template
from megatron.core.errors import CheckpointError, ConfigurationError, DataError, InputError, choices
from megatron.core.object_store import as_path
from megatron.core.parallel_config import ParallelSizes
from megatron.core.tokenizers import (
    PATH_ARGUMENTS,
    RECORD_FILE,
    NullTokenizer,
    Tokenizer,
    describe_tokenizer,
    load_recorded_tokenizer,
    read_json_object,
    reject_unused_flags,
)
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training import LaunchEnvironment, connect_store, initialize_device, initialize_distributed

if TYPE_CHECKING:
    from megatron.checkpoint import CheckpointSource
    from megatron.core.device import Device
    from megatron.core.dist_checkpointing import Progress
    from megatron.core.flight_recorder import FlightRecorder
    from megatron.core.inference import InferenceEngine
    from megatron.core.models.gpt import GPTConfig, GPTModel
    from megatron.core.parallel_state import ParallelState

TIMEOUT_MINUTES = 10
_MOST_PADDING = 1024  # Phi-2 has 905 ids more than its tokenizer, other models fewer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Model to load, and its parallel layout.

    Attributes:
        folder: a run's ``--save`` folder, or the folder or the Hub name of a Hugging Face model.
        is_hugging_face: the folder must contain a Hugging Face model, which has no iterations.
        ckpt_step: iteration to load; None loads the newest one.
        tensor_parallel_size: None divides the number of ranks by the pipeline size.
        tokenizer: keywords of `build_tokenizer` that replace the checkpoint's own.
        expert_parallel_size: number of tensor-parallel ranks with different experts.
        told: model settings that a torchtitan folder does not record.

    Raises:
        CheckpointError: the folder does not exist.
        ConfigurationError: ``ckpt_step`` is set for a Hugging Face model, which has no iterations.
    """

    folder: str
    is_hugging_face: bool
    ckpt_step: int | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int
    tokenizer: Mapping[str, Any]
    expert_parallel_size: int = 1
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hub_model is None and not as_path(self.folder).is_dir():
            flag, kind = (
                ("--load-hf", "a model's folder, or a model of the Hugging Face Hub as org/name or org/name@revision")
                if self.is_hugging_face
                else ("--load", "the folder that a run saved to")
            )
            if not self.is_hugging_face and find_hub_model(self.folder) is not None:
                kind += f", or --load-hf {self.folder} for the model of this name on the Hugging Face Hub"
            raise CheckpointError(f"{flag} {self.folder} is not a folder; pass {kind}")
        if self.is_hugging_face and self.ckpt_step is not None:
            raise ConfigurationError(
                f"--ckpt-step {self.ckpt_step} requires --load; a --load-hf model has no iterations"
            )

    @property
    def hub_model(self) -> HubModel | None:
        """Return the model on the Hub that ``folder`` names; None for a folder."""
        return find_hub_model(self.folder) if self.is_hugging_face else None


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """Checkpoint whose configuration and tokenizer are read, but not its weights.

    ``load_model`` is called on every rank after the process group is initialized. It returns this rank's pipeline stage
    and reports the loading progress.
    """

    config: GPTConfig
    tokenizer: Tokenizer
    load_model: Callable[[ParallelState, Device, Progress], GPTModel]
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Data of the run that saved the checkpoint."""

    def chat_template(self, choice: str | None) -> ChatTemplate | None:
        """Return the template that ``choice`` names, or else the one that the run was fine-tuned with.

        For other runs it is the tokenizer's template, or None without one.

        Raises:
            DataError: the template does not exist, or has an error.
        """
        if choice is not None or not self.data.sft:
            return choose_template(self.tokenizer, choice)
        try:
            return choose_template(self.tokenizer, self.data.chat_template, SFT_TEMPLATE)
        except DataError as error:
            raise DataError(f"the chat template of the fine-tuning: {error}; give --chat-template") from error


def layout_sizes(request: ModelRequest, num_processes: int) -> ParallelSizes:
    """Compute the parallel sizes for inference; tensor-parallel ranks share one copy of the experts.

    Raises:
        ConfigurationError: the sizes do not multiply to the number of processes, or do not fit the expert parallelism.
    """
    tensor, pipeline, experts = (
        request.tensor_parallel_size,
        request.pipeline_parallel_size,
        request.expert_parallel_size,
    )
    for name, size in (("tensor", tensor), ("pipeline", pipeline), ("expert", experts)):
        if size is not None and size < 1:
            raise ConfigurationError(f"--{name}-model-parallel-size {size} is not positive; use 1 or more")
    if tensor is None:
        if num_processes % pipeline:
            raise ConfigurationError(
                f"the number of processes {num_processes} is not divisible by --pipeline-model-parallel-size "
                f"{pipeline}; change one of them"
            )
        tensor = num_processes // pipeline
    if tensor * pipeline != num_processes:
        raise ConfigurationError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} requires "
            f"{tensor * pipeline} processes, but {num_processes} {'was' if num_processes == 1 else 'were'} started; "
            f"run torchrun --nproc_per_node {tensor * pipeline}, or change the sizes"
        )
    if tensor % experts:
        works = choices(size for size in range(1, tensor + 1) if tensor % size == 0)
        raise ConfigurationError(
            f"--expert-model-parallel-size {experts} does not divide --tensor-model-parallel-size {tensor}, whose "
            f"ranks share the experts; sizes that work: {works}"
        )
    return ParallelSizes(tp=tensor, pp=pipeline, ep=experts, etp=tensor // experts if experts > 1 else None)


def open_checkpoint(request: ModelRequest, launch: LaunchEnvironment) -> Checkpoint:
    """Read the configuration and the tokenizer of a checkpoint of any format.

    There is no communication, unless several ranks load a model from the Hub: then the process group is initialized.

    Raises:
        InputError: it cannot be read, its tokenizer cannot be built, or its model cannot be sharded this way.
    """
    sizes = layout_sizes(request, launch.world_size)
    if request.hub_model is not None:
        folder = _fetch(request.hub_model, launch)
        request = dataclasses.replace(request, folder=str(folder))
    other = _folder_of_other_format(request)
    if request.told:
        _report_idle(request.told, other, _log_once(launch))
    if other is not None:
        return _open_source(request, other, sizes)
    return _open_native(request, sizes, _log_once(launch))


def _fetch(model: HubModel, launch: LaunchEnvironment) -> Path:
    """Return the folder of a model from the Hub, which one rank of each node downloads."""
    log = _log_once(launch)
    if launch.world_size == 1:
        return fetch_model(model, log)
    device = initialize_device(launch)
    initialize_distributed(launch, device, device.default_backend, TIMEOUT_MINUTES)
    return fetch_on_every_node(
        model,
        lambda chosen: fetch_model(chosen, log),
        connect_store("hub"),
        rank=launch.rank,
        local_rank=launch.local_rank or 0,
        world_size=launch.world_size,
    )


def _report_idle(told: Mapping[str, Any], folder: Path | None, log: Log) -> None:
    from megatron.checkpoint import detect_format

    if folder is None or detect_format(folder) != "torchtitan":
        for line in idle_lines(told):
            log(line)


def _folder_of_other_format(request: ModelRequest) -> Path | None:
    """Return the folder of a model in another format, or None if a run saved it natively or no model is found.

    ``--load`` may also name a folder of any format itself.

    Raises:
        CheckpointError: the folder's format is not the requested one, or cannot be read.
    """
    from megatron.checkpoint import candidate_folders, detect_format

    folder = as_path(request.folder)
    if request.is_hugging_face:
        if detect_format(folder) != "hf":
            raise CheckpointError(f"--load-hf {folder} is not a Hugging Face model folder: it has no config.json")
        return folder
    candidates = candidate_folders(folder, request.ckpt_step)
    if candidates:
        return candidates[0] if detect_format(candidates[0]) not in ("native", None) else None
    return None if detect_format(folder) is None else folder


def _open_native(request: ModelRequest, sizes: ParallelSizes, log: Log) -> Checkpoint:
    from megatron.checkpoint import read_common

    common = read_common(request.folder, request.ckpt_step, log)
    config = check_layout(RunConfig.from_dict(common["config"]), sizes)
    tokenizer = load_tokenizer(request, config.tokenizer, common["tokenizer"])
    is_own = not request.tokenizer and common["tokenizer"] is not None
    check_tokenizer(tokenizer, config.model.vocab_size, pads_any=is_own)

    def load_model(state: ParallelState, device: Device, told: Progress) -> GPTModel:
        from megatron.checkpoint import build_inference_model, load_model_weights

        model = build_inference_model(config.model, state, device)
        load_model_weights(request.folder, [model], state, log, request.ckpt_step, told=told)
        return model

    return Checkpoint(config.model, tokenizer, load_model, config.data)


def _open_source(request: ModelRequest, folder: Path, sizes: ParallelSizes) -> Checkpoint:
    from megatron.checkpoint import load_model_from
    from megatron.checkpoint.formats import TorchtitanSource
    from megatron.checkpoint.formats.megatron import MegatronTorchSource, TorchDistSource
    from megatron.core.collectives import raise_on_all_ranks

    source: CheckpointSource = _source_of(folder, request.told)
    config = RunConfig.from_dict(source.common["config"])
    copies = source.common["tokenizer"]
    tokenizer = load_tokenizer(request, config.tokenizer, None if copies is None else folder / copies)
    megatron = (MegatronTorchSource, TorchDistSource)
    check_tokenizer(tokenizer, config.model.vocab_size, pads_any=isinstance(source, megatron))
    if isinstance(source, megatron) and tokenizer.vocab_size < config.model.vocab_size:
        # Padding rows of the vocabulary must not be sampled, and such checkpoints need not record their number.
        source.close()
        source = type(source)(folder, tokenizer.vocab_size)
        config = RunConfig.from_dict(source.common["config"])
    config = check_layout(config, sizes)

    def load_model(state: ParallelState, device: Device, told: Progress) -> GPTModel:
        failure = None
        try:
            if isinstance(source, (MegatronTorchSource, TorchDistSource, TorchtitanSource)):
                source.check_storages(state.rank, state.world_size)
            model = load_model_from(source, state, device, progress=told)
        except InputError as error:
            failure = error
        finally:
            source.close()
        raise_on_all_ranks(failure, state.world)
        return model

    return Checkpoint(config.model, tokenizer, load_model, config.data)


def _source_of(folder: Path, told: Mapping[str, Any]) -> CheckpointSource:
    """Open a checkpoint folder; checksums are verified later, by all ranks together."""
    from megatron.checkpoint import detect_format
    from megatron.checkpoint.formats import NativeSource, TorchtitanSource
    from megatron.checkpoint.formats.huggingface import HuggingFaceSource
    from megatron.checkpoint.formats.megatron import MegatronTorchSource, TorchDistSource

    found = detect_format(folder)
    if found in ("torch", "torch_dist"):
        return MegatronTorchSource(folder) if found == "torch" else TorchDistSource(folder)
    if found == "torchtitan":
        return TorchtitanSource(folder, told)
    if found == "peft":
        raise CheckpointError(
            f"{folder} contains only LoRA adapters, in peft's format; add them to their model first: megatron convert "
            f"--loader peft --load-dir {folder} --base-model DIR --save-dir OUT"
        )
    return HuggingFaceSource(folder) if found == "hf" else NativeSource(folder)


def check_layout(config: RunConfig, sizes: ParallelSizes) -> RunConfig:
    """Return a run's configuration with the parallel layout for inference.

    Raises:
        ConfigurationError: the model cannot be sharded this way.
    """
    from megatron.checkpoint import inference_config, inference_stage

    inference_stage(config.model.num_layers, sizes.pp, 0)
    if sizes.ep > 1 and config.model.moe.num_experts is None:
        raise ConfigurationError(f"--expert-model-parallel-size {sizes.ep}: the model has no experts; omit it")
    model = inference_config(config.model, sizes)
    config = dataclasses.replace(config, model=model, world_size=sizes.world_size)
    problems = [problem for check in (*LAYOUT_CHECKS, SPREAD) for problem in check.find(config)]
    if problems:
        raise ConfigurationError(
            f"{sizes.world_size} processes shard each layer {sizes.tp} ways: {'; '.join(problems)}"
        )
    return config


def load_tokenizer(request: ModelRequest, recorded: TokenizerConfig, folder: Path | None) -> Tokenizer:
    """Build the checkpoint's tokenizer, or the one that the flags describe; ``folder`` holds the checkpoint's copy.

    Raises:
        TokenizerError: it cannot be built, or does not use a flag.
    """
    given, own = request.tokenizer, recorded
    if not given and folder is not None:
        return load_recorded_tokenizer(folder.parent)
    if given.get("tokenizer_type", recorded.tokenizer_type) != recorded.tokenizer_type:
        recorded = TokenizerConfig()
    elif {"vocab_file", "merge_file", "tokenizer_model"} & given.keys() and "vocab_size" not in given:
        recorded = dataclasses.replace(recorded, vocab_size=None)
    reject_unused_flags(given.get("tokenizer_type", recorded.tokenizer_type), given)
    tokenizer = build_tokenizer(**dataclasses.asdict(dataclasses.replace(recorded, **given)))
    if given and not isinstance(tokenizer, NullTokenizer):
        if folder is not None and (folder / RECORD_FILE).is_file():
            refuse_another(tokenizer, read_json_object(folder / RECORD_FILE))
        elif request.is_hugging_face and own.tokenizer_type != NullTokenizer.name:
            refuse_another(tokenizer, describe_tokenizer(build_tokenizer(**dataclasses.asdict(own))))
    return tokenizer


def refuse_another(tokenizer: Tokenizer, record: Mapping[str, Any]) -> None:
    """Reject a tokenizer whose size differs from the recorded one, or whose files differ if it is of the same kind.

    Raises:
        InputError: the sizes or the files differ.
    """
    recorded_size = record.get("vocab_size")
    if tokenizer.vocab_size != recorded_size:
        raise InputError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, but the model was trained with "
            f"{record.get('tokenizer_type')} and {recorded_size} ids; use the tokenizer of its training, or omit the "
            "tokenizer's flags"
        )
    if tokenizer.name != record.get("tokenizer_type"):
        return
    given = describe_tokenizer(tokenizer)["files"]
    # Compare only the files that define token ids; other files of a model folder may have been edited.
    count = len([name for name in PATH_ARGUMENTS if tokenizer.arguments.get(name) is not None])
    for ours, theirs in list(zip(given, record["files"]))[:count]:
        if ours["sha256"] != theirs["sha256"]:
            raise InputError(
                f"{ours['path']} is not the {theirs['name']} that the model was trained with: its SHA-256 is "
                f"{ours['sha256'][:12]}…, but {theirs['sha256'][:12]}… is recorded; omit the tokenizer's flags"
            )


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int, pads_any: bool) -> None:
    """Reject a tokenizer whose size does not match the model's vocabulary; NullTokenizer may be smaller.

    A model's vocabulary may be padded: by any number of ids with ``pads_any``, otherwise by as many as published models
    use.

    Raises:
        InputError: the tokenizer has more ids than the model, or too few.
    """
    is_free = pads_any or isinstance(tokenizer, NullTokenizer)
    if tokenizer.vocab_size > vocab_size or (tokenizer.vocab_size < vocab_size - _MOST_PADDING and not is_free):
        raise InputError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, but the model was trained with {vocab_size}; use the "
            "tokenizer of its training, or omit the tokenizer's flags"
        )


def load_engine(
    checkpoint: Checkpoint,
    launch: LaunchEnvironment,
    flight: FlightRecorder | None = None,
    timeout_minutes: int = TIMEOUT_MINUTES,
) -> InferenceEngine:
    """Initialize the process group, load this rank's shard of the model and connect the pipeline stages.

    ``flight`` records the collectives of the ranks, which may take ``timeout_minutes``.

    Raises:
        InputError: the weights cannot be loaded.
    """
    from megatron.core.inference import InferenceEngine
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.pipeline_parallel import create_pipeline_links

    device = initialize_device(launch)
    initialize_distributed(launch, device, device.default_backend, timeout_minutes)
    config = checkpoint.config
    state = create_parallel_state(config.parallel_sizes, recorder=flight)
    with waiting("loading the model", is_on=launch.rank == 0) as told:
        model = checkpoint.load_model(state, device, told)
    links = create_pipeline_links(state.pp, device=device.torch_device) if state.pp.size > 1 else None
    return InferenceEngine(model, state, links)


def _log_once(launch: LaunchEnvironment) -> Log:
    """Return a log function that prints each distinct line once, on rank 0, to standard error.

    The configuration and the weights are read separately, so a problem of a checkpoint is found twice.
    """
    said: set[str] = set()

    def log(line: str) -> None:
        if launch.rank == 0 and line not in said:
            said.add(line)
            print(line, file=sys.stderr, flush=True)

    return log
