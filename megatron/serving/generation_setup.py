"""What the tools that generate text share: their flags for model and layout, and the way from these to an engine.

torch is imported where the model is built, so that wrong usage is answered at once.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.core.errors import CheckpointError, ConfigurationError, InputError
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer
from megatron.training.config.checks import layout
from megatron.training.config.run_config import RunConfig
from megatron.training.config.tokenizer_config import TokenizerConfig
from megatron.training.process.initialize import LaunchEnvironment, initialize_device, initialize_distributed
from megatron.training.process.refusal import launch_environment_or_exit, refuse

if TYPE_CHECKING:
    from megatron.core.device import Device
    from megatron.core.inference.engine import InferenceEngine
    from megatron.core.models.gpt.gpt_config import GPTConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import ParallelState
    from megatron.interop.checkpoint_source import CheckpointSource

TIMEOUT_MINUTES = 10
TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size")

Log = Callable[[str], None]


class Parser(argparse.ArgumentParser):
    """Report wrong usage in one line, once for all processes."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(refuse([f"{message}; see --help"], launch_environment_or_exit().rank))


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """Hold what is known of a checkpoint before its weights are read.

    ``load_model`` is called on every rank once the processes have met, and returns this rank's stage.
    """

    config: GPTConfig
    tokenizer: Tokenizer
    load_model: Callable[[ParallelState, Device], GPTModel]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Declare where the model comes from and how it is cut."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--load",
        metavar="DIR",
        help="folder that a run saved its checkpoints to, natively or in Megatron's torch format",
    )
    model.add_argument("--load-hf", metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest)")
    cut = parser.add_argument_group("layout: as many processes as tensor x pipeline, started by torchrun")
    cut.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help="processes over which each layer is cut (all that the pipeline leaves)",
    )
    cut.add_argument(
        "--pipeline-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="stages over which the layers are spread (1)",
    )
    tokenizer = parser.add_argument_group("tokenizer, in place of the checkpoint's own")
    tokenizer.add_argument("--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="size (NullTokenizer, TikTokenizer)")


def check_model_flags(arguments: argparse.Namespace) -> None:
    """Refuse a folder that is not there.

    Raises:
        CheckpointError: so it is.
        ConfigurationError: an iteration of a folder that has none is asked for.
    """
    if arguments.load is not None and not Path(arguments.load).is_dir():
        raise CheckpointError(f"--load {arguments.load} is not a folder; name the folder that a run saved to")
    if arguments.load_hf is not None and not Path(arguments.load_hf).is_dir():
        raise CheckpointError(f"--load-hf {arguments.load_hf} is not a folder; name a model's folder on this machine")
    if arguments.load_hf is not None and arguments.ckpt_step is not None:
        raise ConfigurationError(
            f"--ckpt-step {arguments.ckpt_step} needs --load; a model of --load-hf has no iterations"
        )


def layout_sizes(arguments: argparse.Namespace, num_processes: int) -> tuple[int, int]:
    """Return the tensor- and the pipeline-parallel size.

    Raises:
        ConfigurationError: they do not make the number of processes.
    """
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    for name, size in (("tensor", tensor), ("pipeline", pipeline)):
        if size is not None and size < 1:
            raise ConfigurationError(f"--{name}-model-parallel-size {size} is not 1 or more")
    if tensor is None:
        if num_processes % pipeline:
            raise ConfigurationError(
                f"{num_processes} processes do not divide into --pipeline-model-parallel-size {pipeline}; "
                "change it or the number of processes"
            )
        tensor = num_processes // pipeline
    if tensor * pipeline != num_processes:
        raise ConfigurationError(
            f"tensor({tensor}) x pipeline({pipeline}) = {tensor * pipeline} and the number of processes is "
            f"{num_processes}; start them with torchrun --nproc_per_node {tensor * pipeline}, or change "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size"
        )
    return tensor, pipeline


def open_checkpoint(arguments: argparse.Namespace, launch: LaunchEnvironment, log: Log) -> Checkpoint:
    """Read what a checkpoint of any format says of itself; only this process reads.

    Raises:
        InputError: it cannot be read, its tokenizer cannot be built, or its model cannot be cut like this.
    """
    sizes = layout_sizes(arguments, launch.world_size)
    folder = _folder_of_other_format(arguments)
    if folder is not None:
        return _open_source(arguments, folder, sizes)
    return _open_native(arguments, sizes, log)


def _folder_of_other_format(arguments: argparse.Namespace) -> Path | None:
    """Return the folder that holds the model's files, or None where a run saved them natively, or there are none.

    ``--load`` may also name such a folder itself, of any format.

    Raises:
        CheckpointError: a format that was asked for by name is not there, or one that cannot be read is.
    """
    from megatron.interop.open_checkpoint import detect_format
    from megatron.training.checkpointing.folder import candidate_folders

    if arguments.load_hf is not None:
        folder = Path(arguments.load_hf)
        if detect_format(folder) != "hf":
            raise CheckpointError(f"--load-hf {folder} is not a Hugging Face model folder: it has no config.json")
        return folder
    candidates = candidate_folders(Path(arguments.load), arguments.ckpt_step)
    if candidates:
        return candidates[0] if detect_format(candidates[0]) == "torch" else None
    folder = Path(arguments.load)
    return None if detect_format(folder) is None else folder


def _open_native(arguments: argparse.Namespace, sizes: tuple[int, int], log: Log) -> Checkpoint:
    from megatron.training.checkpointing.load import read_common

    common = read_common(arguments.load, arguments.ckpt_step, log)
    config = check_layout(RunConfig.from_dict(common["config"]), *sizes)
    tokenizer = load_tokenizer(arguments, config.tokenizer, common["tokenizer"])
    check_tokenizer(tokenizer, config.model.vocab_size)

    def load_model(state: ParallelState, device: Device) -> GPTModel:
        from megatron.interop.inference_model import build_inference_model
        from megatron.training.checkpointing.load import load_model_weights

        model = build_inference_model(config.model, state, device)
        load_model_weights(arguments.load, [model], state, log, arguments.ckpt_step)
        return model

    return Checkpoint(config.model, tokenizer, load_model)


def _open_source(arguments: argparse.Namespace, folder: Path, sizes: tuple[int, int]) -> Checkpoint:
    from megatron.core.collectives import raise_on_all_ranks
    from megatron.interop.inference_model import load_model_from
    from megatron.interop.megatron_torch.megatron_torch_source import MegatronTorchSource

    source: CheckpointSource = _source_of(folder)
    config = RunConfig.from_dict(source.common["config"])
    copies = source.common["tokenizer"]
    tokenizer = load_tokenizer(arguments, config.tokenizer, None if copies is None else folder / copies)
    check_tokenizer(tokenizer, config.model.vocab_size)
    if isinstance(source, MegatronTorchSource) and tokenizer.vocab_size < config.model.vocab_size:
        # Rows that pad the vocabulary must not be chosen; such files need not tell how many they are.
        source.close()
        source = MegatronTorchSource(folder, tokenizer.vocab_size)
        config = RunConfig.from_dict(source.common["config"])
    config = check_layout(config, *sizes)

    def load_model(state: ParallelState, device: Device) -> GPTModel:
        failure = None
        try:
            if isinstance(source, MegatronTorchSource):
                source.check_storages(state.rank, state.world_size)
            model = load_model_from(source, state, device)
        except InputError as error:
            failure = error
        finally:
            source.close()
        raise_on_all_ranks(failure, state.world)
        return model

    return Checkpoint(config.model, tokenizer, load_model)


def _source_of(folder: Path) -> CheckpointSource:
    """Open a folder; the checksums of Megatron's files are compared later, by all ranks together."""
    from megatron.interop.huggingface.source import HuggingFaceSource
    from megatron.interop.megatron_torch.megatron_torch_source import MegatronTorchSource
    from megatron.interop.native.native_source import NativeSource
    from megatron.interop.open_checkpoint import detect_format

    found = detect_format(folder)
    if found == "torch":
        return MegatronTorchSource(folder)
    return HuggingFaceSource(folder) if found == "hf" else NativeSource(folder)


def check_layout(config: RunConfig, tensor: int, pipeline: int) -> RunConfig:
    """Return the configuration of a run as it is for generation.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """
    from megatron.interop.inference_model import inference_config, inference_stage

    inference_stage(config.model.num_layers, pipeline, 0)
    model = inference_config(config.model, tensor, pipeline)
    config = dataclasses.replace(config, model=model, world_size=tensor * pipeline)
    problems = [problem for check in layout.CHECKS for problem in check.find(config)]
    if problems:
        raise ConfigurationError(f"{tensor * pipeline} processes cut each layer {tensor} ways: {'; '.join(problems)}")
    return config


def load_tokenizer(arguments: argparse.Namespace, recorded: TokenizerConfig, folder: Path | None) -> Tokenizer:
    """Return the checkpoint's tokenizer, or the one that the flags describe; ``folder`` holds the checkpoint's copy.

    Raises:
        TokenizerError: it cannot be built.
    """
    given = {name: getattr(arguments, name) for name in TOKENIZER_FLAGS if getattr(arguments, name) is not None}
    if not given and folder is not None:
        return load_recorded_tokenizer(folder.parent)
    if given.get("tokenizer_type", recorded.tokenizer_type) != recorded.tokenizer_type:
        recorded = TokenizerConfig()
    elif {"vocab_file", "merge_file", "tokenizer_model"} & given.keys() and "vocab_size" not in given:
        recorded = dataclasses.replace(recorded, vocab_size=None)
    return build_tokenizer(**dataclasses.asdict(dataclasses.replace(recorded, **given)))


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids the model does not know.

    Raises:
        InputError: so it is.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, the model was trained with {vocab_size}; give the "
            "tokenizer of its training, or leave the tokenizer's flags out"
        )


def load_engine(checkpoint: Checkpoint, launch: LaunchEnvironment) -> InferenceEngine:
    """Join the process group, load this rank's part of the model and connect the stages.

    Raises:
        InputError: the weights cannot be loaded.
    """
    from megatron.core.inference.engine import InferenceEngine
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links

    device = initialize_device(launch)
    initialize_distributed(launch, device, device.default_backend, TIMEOUT_MINUTES)
    config = checkpoint.config
    state = create_parallel_state(config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
    model = checkpoint.load_model(state, device)
    links = create_pipeline_links(state.pp) if state.pp.size > 1 else None
    return InferenceEngine(model, state, links)


def log_once(launch: LaunchEnvironment, write: Log) -> Log:
    """Return what passes each line on once, on the first rank.

    The configuration and the weights are read one after the other: a damaged checkpoint is met twice.
    """
    said: set[str] = set()

    def log(line: str) -> None:
        if launch.rank == 0 and line not in said:
            said.add(line)
            write(line)

    return log


def one_line(error: InputError) -> str:
    """Return an error's message without line breaks."""
    return "; ".join(str(error).splitlines())
