"""Arguments of the commands that generate text: model, layout, server, and shutdown on SIGTERM and SIGINT."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from megatron.cli.arguments import SpellingParser, add_tokenizer_source, add_told_settings, told_settings
from megatron.core.errors import InputError
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
    model = parser.add_mutually_exclusive_group(required=required)
    model.add_argument(
        "--load",
        metavar="DIR",
        help="checkpoint folder (--save of a run), in the native or a Megatron-LM format",
    )
    model.add_argument(
        "--load-hf",
        metavar="DIR|NAME",
        help="Hugging Face model: a folder, or org/name or org/name@revision on the Hub",
    )
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


def run_on_ranks(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, LaunchEnvironment], None],
    argv: list[str] | None,
) -> int:
    """Run a command's work on this rank and return its exit status.

    Rank 0 reports invalid input in one line; the status is then 2.
    """
    arguments = parser.parse_args(argv)
    launch = launch_environment_or_exit()
    try:
        run(arguments, launch)
    except InputError as error:
        return refuse(["; ".join(str(error).splitlines())], launch.rank)
    return 0


def add_server_flags(parser: SpellingParser, port: int) -> None:
    """Declare the flags of a server: its address, by default ``port``, and its limits."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this host only)")
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help=f"port to listen on ({port}); 0: a free port"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of requests without a seed (1234)")
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
    if arguments.seed < 0:
        yield f"--seed {arguments.seed} is negative"
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
