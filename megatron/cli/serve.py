"""Serve the model of a checkpoint with OpenAI's API and a web page.

Run with plain python for one process, or under torchrun at any tensor- and pipeline-parallel size: a checkpoint of any
layout is resharded. Rank 0 listens. SIGTERM or SIGINT ends all ranks. Megatron-LM's PUT /api is also supported. The web
page is at the printed address. The generation flags are defaults of OpenAI requests that leave out these fields.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.generation_arguments import (
    Parser,
    ShutdownSignal,
    add_generation_flags,
    add_model_flags,
    add_server_flags,
    generation_problems,
    model_request,
    request_fields,
    run_on_ranks,
    server_problems,
)
from megatron.core.errors import ConfigurationError, InputError
from megatron.serving import Checkpoint, load_engine, open_checkpoint
from megatron.serving.openai import BASE_MODEL_TOKENS, COMPLETION_MODE, COMPLETION_TOKENS
from megatron.training import LaunchEnvironment, initialize_device, shut_down

if TYPE_CHECKING:
    from megatron.serving import JobQueue
    from megatron.serving.openai import HttpServer, Translator

_SEED = 1234
_SWITCH_S = 0.0005
_HERE = ("127.0.0.1", "localhost", "::1")


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_server_flags(parser, 8000)
    parser.add_argument("--api-key", metavar="KEY", help="require Authorization: Bearer KEY in requests")
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the API key")
    parser.add_argument("--served-model-name", metavar="NAME", help="model name in the API (the folder's name)")
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="chat template (the tokenizer's own)")
    limits = parser.add_argument_group("limits")
    for flag, default, text in (
        ("--inference-max-requests", 32, "maximum number of concurrent prompts"),
        ("--max-waiting", 256, "maximum number of queued requests; further requests get status 429"),
        ("--max-connections", 512, "maximum number of open requests; further requests get status 503"),
        ("--max-body-mib", 16, "maximum size of a request in MiB; larger requests get status 413"),
    ):
        limits.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} ({default})")
    add_generation_flags(
        parser,
        length=f"{COMPLETION_TOKENS} for completions, the rest of the context for conversations, {BASE_MODEL_TOKENS} "
        "without a chat template; never beyond the context",
        seed=f"{_SEED}",
        with_beams=False,
    )
    add_model_flags(parser)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = [*server_problems(arguments), *generation_problems(arguments)]
    for name in ("inference_max_requests", "max_waiting", "max_connections", "max_body_mib"):
        if getattr(arguments, name) < 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(arguments, name)} is not positive")
    if arguments.api_key is not None and arguments.api_key_file is not None:
        problems.append("--api-key and --api-key-file exclude each other; omit one of them")
    if problems:
        raise ConfigurationError(problems)


def read_key(arguments: argparse.Namespace) -> str | None:
    """Return the API key that clients must send, or None.

    Raises:
        InputError: the key is empty or has characters other than visible ASCII, or its file cannot be read.
    """
    key: str | None = arguments.api_key
    source = "--api-key"
    if arguments.api_key_file is not None:
        source = f"--api-key-file {arguments.api_key_file}"
        try:
            key = (Path(arguments.api_key_file).read_text(encoding="utf-8").splitlines() or [""])[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {source}: {error}") from error
    if key is not None and not (key and all("!" <= character <= "~" for character in key)):
        raise InputError(
            f"{source} contains no valid key: a key is one or more visible ASCII characters without spaces"
        )
    return key


def open_port(arguments: argparse.Namespace) -> HttpServer:
    """Bind the port. The server answers requests once the model is loaded.

    Raises:
        InputError: a package is missing, or the port is in use or not permitted.
    """
    try:
        from megatron.serving.openai import HttpServer

        # Imported early to report a missing fastapi before the model is loaded.
        importlib.import_module("megatron.serving.openai.application")
    except ImportError as error:
        if error.name is None or error.name.startswith("megatron"):
            raise
        raise InputError(
            f"serve needs the packages fastapi and uvicorn, but {error.name} cannot be imported; install them with: "
            "pip install fastapi uvicorn (or, in the checkout: pip install -e '.[serve]')"
        ) from error
    try:
        return HttpServer(arguments.host, arguments.port)
    except OSError as error:
        raise InputError(
            f"cannot listen at {arguments.host}:{arguments.port}: {error}; change --host or --port"
        ) from error


def make_translator(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Translator:
    """Build the translator of requests.

    Raises:
        InputError: the chat template does not exist, or has an error.
    """
    from megatron.serving.openai import Translator

    template = checkpoint.chat_template(arguments.chat_template)
    return Translator(
        checkpoint.tokenizer, checkpoint.config, arguments.max_tokens_to_oom, template, arguments.max_tokens
    )


def make_application(
    arguments: argparse.Namespace, translator: Translator, jobs: JobQueue, key: str | None, max_batch_size: int
) -> Any:
    """Build the ASGI application with its limits."""
    from megatron.serving import ApiTranslator, PutApi
    from megatron.serving.openai import Application, Guard, Limits, Metrics

    own = ApiTranslator(translator.tokenizer, translator.config, translator.max_tokens, max_batch_size)
    metrics = Metrics()
    put_api = PutApi(own, jobs, _SEED if arguments.seed is None else arguments.seed)
    defaults = {name: value for name, value in request_fields(arguments).items() if name not in ("seed", "max_tokens")}
    application = Application(translator, jobs, put_api, model_name(arguments), metrics, log_line, defaults)
    limits = Limits(body_bytes=arguments.max_body_mib * 2**20, requests=arguments.max_connections)
    return Guard(application.asgi(), limits, key, metrics)


def log_line(line: str) -> None:
    """Print a line; ignore a closed pipe, which must not fail a request."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def model_name(arguments: argparse.Namespace) -> str:
    """Return the name of the model in the API."""
    folder = arguments.load if arguments.load_hf is None else arguments.load_hf
    return arguments.served_model_name or Path(folder).resolve().name or "model"


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Serve until a signal.

    Raises:
        InputError: a flag, the checkpoint or the port is invalid, or a package is missing.
    """
    check_arguments(arguments)
    key = read_key(arguments)
    model = model_request(arguments)
    end = ShutdownSignal()
    from megatron.core.flight_recorder import FlightRecorder
    from megatron.core.inference import ContinuousEngine
    from megatron.serving import JobQueue, run_service
    from megatron.training.fault_tolerance import watching

    flight = FlightRecorder()
    server = open_port(arguments) if launch.rank == 0 else None
    checkpoint = open_checkpoint(model, launch)
    translator = make_translator(arguments, checkpoint)
    jobs = None if server is None else JobQueue(arguments.max_waiting)
    try:
        engine = load_engine(checkpoint, launch, flight)
        end.serving = True
        if server is not None and jobs is not None:
            # A short switch interval, so that the decoding loop does not block the HTTP threads' short tasks.
            sys.setswitchinterval(_SWITCH_S)
            server.start(make_application(arguments, translator, jobs, key, engine.max_batch_size))
            if key is None and arguments.host not in _HERE:
                print(
                    "everyone who can reach this address can use the model; add --api-key to require a key",
                    file=sys.stderr,
                )
            if translator.template is None:
                print(COMPLETION_MODE, file=sys.stderr, flush=True)
            print(f"serving {model_name(arguments)} at {server.url}", flush=True)
        continuous = ContinuousEngine(engine, arguments.inference_max_requests, arguments.max_tokens_to_oom)
        with watching(flight, engine.state, initialize_device(launch), arguments.hang_timeout_seconds, settling=0):
            run_service(continuous, jobs, lambda: end.asked, flight)
        if server is not None and jobs is not None:
            jobs.close()
            server.stop()
    finally:
        shut_down()


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
