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
    """Report wrong usage in one line, once for all processes."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(refuse([self.explained(message)], launch_environment_or_exit().rank))

    def warn(self, line: str) -> None:
        """Print a warning to standard error, on rank 0."""
        if launch_environment_or_exit().rank == 0:
            super().warn(line)


def add_model_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare where the model comes from, which may be ``required``, and how it is sharded."""
    model = parser.add_mutually_exclusive_group(required=required)
    model.add_argument(
        "--load",
        metavar="DIR",
        help="folder that a run saved its checkpoints to, natively or in a format of Megatron's",
    )
    model.add_argument("--load-hf", metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest)")
    cut = parser.add_argument_group("layout: as many processes as tensor x pipeline, started by torchrun")
    cut.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help="processes over which each layer is sharded (all that the pipeline leaves)",
    )
    cut.add_argument(
        "--pipeline-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="stages over which the layers are spread (1)",
    )
    cut.add_argument(
        "--expert-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="how many of a layer's tensor-parallel processes hold different experts; the others cut them (1)",
    )
    add_tokenizer_source(parser, None, "tokenizer, in place of the checkpoint's own")
    add_told_settings(parser)


def model_request(arguments: argparse.Namespace) -> ModelRequest:
    """Return which model the flags of `add_model_flags` ask for."""
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

    Input that cannot be used is reported in one line, by rank 0; the status is then 2.
    """
    arguments = parser.parse_args(argv)
    launch = launch_environment_or_exit()
    try:
        run(arguments, launch)
    except InputError as error:
        return refuse(["; ".join(str(error).splitlines())], launch.rank)
    return 0


def add_server_flags(parser: SpellingParser, port: int) -> None:
    """Declare where a server listens, by default at ``port``, and what it takes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help=f"port to listen at ({port}); 0: a free one"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of requests that bring none (1234)")
    parser.add_argument(
        "--max-tokens-to-oom",
        type=int,
        default=12000,
        metavar="N",
        help="most prompts that run together x (longest prompt + tokens to generate); larger requests are refused "
        "(12000)",
    )
    parser.add_argument(
        "--hang-timeout-seconds",
        type=int,
        metavar="N",
        help="report a process that holds up the others for this long, and end all (60; 0: never)",
    )
    parser.add_deprecated_flag("--hang-report-seconds", "--hang-timeout-seconds")


def server_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the values of these flags, one line each."""
    if not 0 <= arguments.port < 2**16:
        yield f"--port {arguments.port} is not between 0 and {2**16 - 1}"
    if arguments.seed < 0:
        yield f"--seed {arguments.seed} is negative"
    if arguments.hang_timeout_seconds is not None and arguments.hang_timeout_seconds < 0:
        yield f"--hang-timeout-seconds {arguments.hang_timeout_seconds} is negative"
    if arguments.max_tokens_to_oom < 1:
        yield f"--max-tokens-to-oom {arguments.max_tokens_to_oom} is not positive"


class ShutdownSignal:
    """Note SIGTERM and SIGINT. Before ``serving`` is set they end the program at once, with status 0."""

    def __init__(self) -> None:
        self.asked = False
        self.serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.serving:
            raise SystemExit(0)
