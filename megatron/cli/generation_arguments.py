"""Arguments of the commands that generate text: model, layout, sampling, server, and shutdown on SIGTERM and SIGINT."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NoReturn

from megatron.cli.arguments import (
    SpellingParser,
    add_tokenizer_source,
    add_told_settings,
    declare_checkpoint_folder,
    declare_script,
    told_settings,
)
from megatron.core.errors import InputError
from megatron.core.inference import BeamConfig, SamplingConfig
from megatron.serving import ModelRequest
from megatron.training import LaunchEnvironment, launch_environment_or_exit, refuse

TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size")


class Parser(SpellingParser):
    """Argument parser that reports wrong usage in one line, on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(refuse([self.explained(message)], launch_environment_or_exit().rank))

    def warn(self, line: str) -> None:
        """Print a warning to standard error, on rank 0."""
        if launch_environment_or_exit().rank == 0:
            super().warn(line)


def add_model_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare the flags of the model's source, which may be ``required``, and of its parallel layout."""
    model = declare_checkpoint_folder(
        parser,
        "--load",
        help="checkpoint folder (--save of a run) of any format, or Hugging Face model folder",
        is_required=required,
    )
    model.add_argument(
        "--load-hf",
        metavar="DIR|NAME",
        help="Hugging Face model: a folder, or org/name or org/name@revision on the Hub",
    )
    declare_script(parser)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (the latest)")
    cut = parser.add_argument_group("parallel layout (torchrun must start TP x PP processes)")
    cut.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel size (world size / pipeline-parallel size)",
    )
    cut.add_argument(
        "--pipeline-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="number of pipeline stages (1)",
    )
    cut.add_argument(
        "--expert-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="expert-parallel size within the tensor-parallel ranks; the remaining factor shards each expert (1)",
    )
    add_tokenizer_source(parser, None, "tokenizer (by default the checkpoint's own)")
    add_told_settings(parser)


def model_request(arguments: argparse.Namespace) -> ModelRequest:
    """Build the model request from the flags of `add_model_flags`."""
    return ModelRequest(
        folder=arguments.load if arguments.load_hf is None else arguments.load_hf,
        is_hugging_face=arguments.load_hf is not None,
        ckpt_step=arguments.ckpt_step,
        tensor_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_parallel_size=arguments.pipeline_model_parallel_size,
        expert_parallel_size=arguments.expert_model_parallel_size,
        tokenizer={name: value for name in TOKENIZER_FLAGS if (value := getattr(arguments, name)) is not None},
        told=told_settings(arguments),
    )


def add_generation_flags(parser: argparse.ArgumentParser, *, length: str, seed: str, with_beams: bool = True) -> None:
    """Declare the flags of generation; a flag that is not given is None, or False for ``--greedy``.

    The commands differ in two defaults, which ``length`` and ``seed`` describe.
    """
    sampling = parser.add_argument_group("generation")
    sampling.add_argument(
        "--max-tokens",
        "--tokens-to-generate",
        type=int,
        metavar="N",
        help=f"maximum number of tokens to generate ({length})",
    )
    sampling.add_argument("--greedy", action="store_true", help="greedy decoding: take the most probable token")
    sampling.add_argument("--temperature", type=float, metavar="T", help="divides the logits; 0: greedy decoding (1.0)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens (0: all)")
    sampling.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling threshold (0: all tokens)")
    sampling.add_argument("--seed", type=int, metavar="N", help=f"sampling seed ({seed})")
    sampling.add_argument(
        "--no-repeat-ngram-size", type=int, metavar="N", help="never repeat an n-gram of N tokens (0: off)"
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divides the logits of tokens that the text already contains; above 1: repeat less (1.0)",
    )
    if not with_beams:
        parser.set_defaults(num_beams=None, length_penalty=None, early_stopping=None)
        return
    beams = parser.add_argument_group("beam search (no sampling)")
    beams.add_argument("--num-beams", type=int, metavar="N", help="number of beams (1: no beam search)")
    beams.add_argument(
        "--length-penalty",
        type=float,
        metavar="P",
        help="score = sum of log-probabilities / length ** P; above 0: favor long texts (1.0)",
    )
    beams.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        help="when to stop after N beams have finished: true: at once; false: if no running beam scores higher; never: "
        "if none ever can (false)",
    )


_SAMPLING = ("greedy", "temperature", "top_k", "top_p", "seed", "no_repeat_ngram_size", "repetition_penalty")
_FIELDS = (*_SAMPLING[1:], "max_tokens", "num_beams", "length_penalty", "early_stopping")
_STOPPING: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}


def sampling_config(arguments: argparse.Namespace, default_seed: int) -> SamplingConfig:
    """Build the sampling configuration from the flags of `add_generation_flags`."""
    given = {name: getattr(arguments, name) for name in _SAMPLING}
    if given["temperature"] == 0.0:
        given |= {"temperature": None, "greedy": True}
    if given["top_p"] == 1.0:
        given["top_p"] = None  # all tokens
    if given["seed"] is None:
        given["seed"] = default_seed
    return SamplingConfig(**{name: value for name, value in given.items() if value is not None})


def beam_config(arguments: argparse.Namespace) -> BeamConfig | None:
    """Build the beam search configuration from the flags of `add_generation_flags`; None without beam search."""
    if arguments.num_beams in (None, 1):
        return None
    return BeamConfig(
        num_beams=arguments.num_beams,
        length_penalty=1.0 if arguments.length_penalty is None else arguments.length_penalty,
        early_stopping=_STOPPING[arguments.early_stopping or "false"],
    )


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields of OpenAI's API that the flags of `add_generation_flags` set."""
    fields = {name: getattr(arguments, name) for name in _FIELDS}
    if arguments.greedy:
        fields["temperature"] = 0.0
    if fields["top_p"] == 0.0:
        fields["top_p"] = 1.0  # In the API 0 keeps only the most probable token.
    if fields["early_stopping"] is not None:
        fields["early_stopping"] = _STOPPING[fields["early_stopping"]]
    return {name: value for name, value in fields.items() if value is not None}


def generation_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield one line for each invalid value of the flags of `add_generation_flags`."""
    yield from sampling_config(arguments, SamplingConfig.seed).problems()
    beams = arguments.num_beams
    if beams is not None and beams < 1:
        yield f"--num-beams {beams} is not positive; use 1 for no beam search"
    for name in ("length_penalty", "early_stopping"):
        value = getattr(arguments, name)
        if value is not None and beams in (None, 1):
            yield f"--{name.replace('_', '-')} {value} has no effect without --num-beams 2 or more"
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        yield f"--max-tokens (--tokens-to-generate) {arguments.max_tokens} is not positive"


def run_on_ranks(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, LaunchEnvironment], None],
    argv: list[str] | None,
) -> int:
    """Run a command's work on this rank and return its exit status.

    Rank 0 reports invalid input in one line; the status is then 2. It is 130 after Ctrl-C, as shells report it.
    """
    arguments = parser.parse_args(argv)
    launch = launch_environment_or_exit()
    try:
        run(arguments, launch)
    except InputError as error:
        return refuse(["; ".join(str(error).splitlines())], launch.rank)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def add_server_flags(parser: SpellingParser, port: int) -> None:
    """Declare the flags of a server: its address, by default ``port``, and its limits."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this host only)")
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help=f"port to listen on ({port}); 0: a free port"
    )
    parser.add_argument(
        "--max-tokens-to-oom",
        type=int,
        default=12000,
        metavar="N",
        help="limit of concurrent prompts x (longest prompt + tokens to generate); larger requests are rejected "
        "(12000)",
    )
    parser.add_argument(
        "--hang-timeout-seconds",
        type=int,
        metavar="N",
        help="report a rank that blocks the others for this long, and end all ranks (60; 0: never)",
    )
    parser.add_deprecated_flag("--hang-report-seconds", "--hang-timeout-seconds")


def server_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield one line for each invalid value of the server's flags."""
    if not 0 <= arguments.port < 2**16:
        yield f"--port {arguments.port} is not between 0 and {2**16 - 1}"
    if arguments.hang_timeout_seconds is not None and arguments.hang_timeout_seconds < 0:
        yield f"--hang-timeout-seconds {arguments.hang_timeout_seconds} is negative"
    if arguments.max_tokens_to_oom < 1:
        yield f"--max-tokens-to-oom {arguments.max_tokens_to_oom} is not positive"


class ShutdownSignal:
    """Handler of SIGTERM and SIGINT, which sets ``asked``; until ``serving`` is set, it exits at once with status 0."""

    def __init__(self) -> None:
        self.asked = False
        self.serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.serving:
            raise SystemExit(0)
