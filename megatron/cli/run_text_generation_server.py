"""Serve the model of a checkpoint with Megatron's PUT /api.

Run with plain python for one process, or under torchrun at any tensor- and pipeline-parallel size: a checkpoint of any
layout is resharded. Rank 0 listens. SIGTERM or SIGINT ends all ranks. Example request:

    curl -X PUT -H 'Content-Type: application/json' http://127.0.0.1:5000/api \\
        -d '{"prompts": ["The castle stood"], "tokens_to_generate": 32}'
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron.cli.generation_arguments import (
    Parser,
    ShutdownSignal,
    add_model_flags,
    add_server_flags,
    model_request,
    run_on_ranks,
    server_problems,
)
from megatron.core.errors import ConfigurationError, InputError
from megatron.serving import load_engine, open_checkpoint
from megatron.training import LaunchEnvironment, initialize_device, shut_down

if TYPE_CHECKING:
    from megatron.serving import GenerationServer

_LAST_ANSWERS_S = 2.0


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="run_text_generation_server.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_server_flags(parser, 5000)
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of requests without a seed (1234)")
    add_model_flags(parser)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = [] if arguments.seed >= 0 else [f"--seed {arguments.seed} is negative"]
    problems += server_problems(arguments)
    if problems:
        raise ConfigurationError(problems)


def open_port(arguments: argparse.Namespace) -> GenerationServer:
    """Bind the port. The server answers requests once the model is loaded.

    Raises:
        InputError: the port is in use or not permitted.
    """
    from megatron.serving import GenerationServer

    try:
        return GenerationServer(arguments.host, arguments.port)
    except OSError as error:
        raise InputError(
            f"cannot listen at {arguments.host}:{arguments.port}: {error}; change --host or --port"
        ) from error


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Serve until a signal.

    Raises:
        InputError: a flag, the checkpoint or the port is invalid.
    """
    check_arguments(arguments)
    model = model_request(arguments)
    end = ShutdownSignal()
    from megatron.core.flight_recorder import FlightRecorder
    from megatron.core.inference import ContinuousEngine
    from megatron.serving import ApiTranslator, run_service
    from megatron.training.fault_tolerance import watching

    flight = FlightRecorder()
    checkpoint = open_checkpoint(model, launch)
    server = open_port(arguments) if launch.rank == 0 else None
    try:
        engine = load_engine(checkpoint, launch, flight)
        end.serving = True
        if server is not None:
            limit = arguments.max_tokens_to_oom
            server.start(
                ApiTranslator(checkpoint.tokenizer, checkpoint.config, limit, engine.max_batch_size), arguments.seed
            )
            print(f"serving at {server.url}", flush=True)
        jobs = None if server is None else server.jobs
        continuous = ContinuousEngine(engine, engine.max_batch_size, arguments.max_tokens_to_oom)
        with watching(flight, engine.state, initialize_device(launch), arguments.hang_timeout_seconds, settling=0):
            run_service(continuous, jobs, lambda: end.asked, flight)
        if server is not None:
            server.stop(_LAST_ANSWERS_S)
    finally:
        shut_down()


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
