"""Continue a text with the model of a checkpoint.

Run by plain python for one process, or under torchrun: N processes are tensor-parallel size N, whatever the layout
that the checkpoint was written at. Model and tokenizer are those that the checkpoint records.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.errors import CheckpointError, ConfigurationError, InputError
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer
from megatron.training.config.run_config import RunConfig
from megatron.training.config.tokenizer_config import TokenizerConfig
from megatron.training.initialize import (
    LaunchEnvironment,
    initialize_device,
    initialize_distributed,
    shut_down,
)
from megatron.training.refusal import launch_environment_or_exit, refuse
from megatron.training.validation import layout

SEPARATOR = "-" * 40
TIMEOUT_MINUTES = 10
TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size")


class Parser(argparse.ArgumentParser):
    """Report wrong usage in one line, once for all processes."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(refuse([f"{message}; see --help"], launch_environment_or_exit().rank))


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="text_generation_cli.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="folder that the run saved its checkpoints to")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with one prompt a line; blank lines are skipped")
    parser.add_argument(
        "--tokens-to-generate", type=int, default=64, metavar="N", help="tokens after each prompt, at most (64)"
    )
    sampling = parser.add_argument_group("choice of the next token")
    sampling.add_argument("--greedy", action="store_true", help="take the most probable one")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (1.0)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K most probable (all)")
    sampling.add_argument(
        "--top-p", type=float, default=0.0, metavar="P", help="draw from the most probable that sum to P (all)"
    )
    sampling.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the draws (1234)")
    tokenizer = parser.add_argument_group("tokenizer, in place of the checkpoint's own")
    tokenizer.add_argument("--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="size (NullTokenizer, TikTokenizer)")
    return parser


def check_sampling(arguments: argparse.Namespace) -> SamplingConfig:
    """Return how tokens are chosen.

    Raises:
        ConfigurationError: values that cannot be, all of them at once.
    """
    names = [field.name for field in dataclasses.fields(SamplingConfig)]
    sampling = SamplingConfig(**{name: getattr(arguments, name) for name in names})
    problems = list(sampling.problems())
    if arguments.tokens_to_generate < 1:
        problems.append(f"--tokens-to-generate {arguments.tokens_to_generate} is not positive")
    if problems:
        raise ConfigurationError(problems)
    return sampling


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the texts to continue.

    Raises:
        InputError: there is none, or the file cannot be read.
    """
    if arguments.prompt_file is None:
        if not arguments.prompt:
            raise InputError("--prompt is empty; give it some text")
        # Bytes of the command line that are not UTF-8 arrive as half characters.
        if any("\ud800" <= character <= "\udfff" for character in arguments.prompt):
            raise InputError("--prompt is not valid UTF-8; convert it")
        return [arguments.prompt]
    try:
        lines = Path(arguments.prompt_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompt-file {arguments.prompt_file}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompt-file {arguments.prompt_file} holds no text; write one prompt a line")
    return prompts


def inference_config(config: RunConfig, num_processes: int) -> RunConfig:
    """Return the configuration of a run as it is for generation: tensor-parallel over all processes, no dropout.

    Raises:
        ConfigurationError: the model cannot be cut over so many processes.
    """
    model = dataclasses.replace(
        config.model,
        tensor_model_parallel_size=num_processes,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config = dataclasses.replace(config, model=model, world_size=num_processes)
    problems = [problem for check in layout.CHECKS for problem in check.find(config)]
    if problems:
        raise ConfigurationError(
            f"{num_processes} processes cut each layer {num_processes} ways: {'; '.join(problems)}"
        )
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


def tokenize_prompts(prompts: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Return the ids of each prompt.

    Raises:
        InputError: the tokenizer is not the model's, or a prompt has no tokens.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, the model was trained with {vocab_size}; give the "
            "tokenizer of its training, or leave the tokenizer's flags out"
        )
    return [tokenizer.tokenize(prompt) for prompt in prompts]


def generate_texts(
    arguments: argparse.Namespace,
    launch: LaunchEnvironment,
    sampling: SamplingConfig,
    prompts: Sequence[str],
    log: Callable[[str], None],
) -> list[str]:
    """Load the checkpoint and return each prompt with what follows it.

    Raises:
        InputError: the checkpoint, the tokenizer or the prompts cannot be used.
    """
    from megatron.core.inference.engine import check_request, generate
    from megatron.training.checkpoint_loading import read_common

    common = read_common(arguments.load, arguments.ckpt_step, log)
    config = inference_config(RunConfig.from_dict(common["config"]), launch.world_size)
    tokenizer = load_tokenizer(arguments, config.tokenizer, common["tokenizer"])
    ids = tokenize_prompts(prompts, tokenizer, config.model.vocab_size)
    check_request(config.model, ids, arguments.tokens_to_generate)
    model, state = load_model(arguments, launch, config, log)
    generated = generate(model, ids, arguments.tokens_to_generate, sampling, tokenizer.eod_id, state)
    return [tokenizer.detokenize([*prompt, *new]) for prompt, new in zip(ids, generated, strict=True)]


def load_model(
    arguments: argparse.Namespace, launch: LaunchEnvironment, config: RunConfig, log: Callable[[str], None]
) -> tuple[Any, Any]:
    """Join the process group and return (model with the checkpoint's weights, parallel state)."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.tensor_parallel.random import RngStreams
    from megatron.training.checkpoint_loading import load_model_weights

    device = initialize_device(launch)
    initialize_distributed(launch, device, device.default_backend, TIMEOUT_MINUTES)
    state = create_parallel_state(tensor_model_parallel_size=launch.world_size)
    rng = RngStreams(device, config.initialization.seed, tp_rank=state.tp.rank, dp_rank=0, cp_rank=0, pp_rank=0)
    model = GPTModel(config.model, state.tp, rng, seed=None, device=device.torch_device)
    load_model_weights(arguments.load, [model], state, log, arguments.ckpt_step)
    return model, state


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Print the texts.

    Raises:
        InputError: something that was given cannot be used.
    """
    sampling = check_sampling(arguments)
    prompts = read_prompts(arguments)
    if not Path(arguments.load).is_dir():
        raise CheckpointError(f"--load {arguments.load} is not a folder; name the folder that a run saved to")

    said: set[str] = set()

    def log(line: str) -> None:
        # The configuration and the weights are read one after the other: a damaged checkpoint is met twice.
        if launch.rank == 0 and line not in said:
            said.add(line)
            print(line, file=sys.stderr, flush=True)

    try:
        texts = generate_texts(arguments, launch, sampling, prompts, log)
    finally:
        shut_down()
    if launch.rank == 0:
        print(f"\n{SEPARATOR}\n".join(texts), flush=True)


def main() -> int:
    """Run the command and return its exit status."""
    arguments = build_parser().parse_args()
    launch = launch_environment_or_exit()
    try:
        run(arguments, launch)
    except InputError as error:
        return refuse(["; ".join(str(error).splitlines())], launch.rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())
