"""Chat with a model in the terminal: over OpenAI's API, or with a checkpoint loaded here.

    megatron chat                          the server at http://127.0.0.1:8000
    megatron chat --load checkpoints/sft   a checkpoint, in this process

Answers are streamed. The line /reset starts a new conversation, /exit or the end of the input (Ctrl-D) ends the chat,
and Ctrl-C stops the current answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.cli.generation_arguments import Parser, add_model_flags, model_request, run_on_ranks
from megatron.core.errors import ConfigurationError, InputError
from megatron.serving import load_engine, open_checkpoint
from megatron.serving.openai import ChatClient, ChatFailed
from megatron.training import LaunchEnvironment, shut_down

URL = "http://127.0.0.1:8000"
Answer = Callable[[Sequence[Mapping[str, str]]], Iterator[str]]


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--url", metavar="URL", help=f"URL of the server ({URL})")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    parser.add_argument("--model", metavar="NAME", help="model name on the server (its first model)")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="chat template, with --load or --load-hf")
    parser.add_argument(
        "--max-tokens",
        "--tokens-to-generate",
        type=int,
        metavar="N",
        help="maximum number of tokens per answer (the rest of the context)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy decoding (1.0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling threshold (1.0)")
    parser.add_argument("--seed", type=int, metavar="N", help="sampling seed (a different one for each answer)")
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="repetition penalty; above 1: repeat less (1.0)",
    )
    add_model_flags(parser, required=False)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = []
    has_model = arguments.load is not None or arguments.load_hf is not None
    for name in ("url", "api_key", "model"):
        if has_model and getattr(arguments, name) is not None:
            problems.append(f"--{name.replace('_', '-')} applies to a server; omit it with --load and --load-hf")
    if not has_model and arguments.chat_template is not None:
        problems.append(
            "--chat-template applies only to a checkpoint, because a server has its own template; pass --load, or "
            "omit it"
        )
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        problems.append(f"--max-tokens {arguments.max_tokens} is not positive")
    if not 0.0 <= arguments.temperature <= 100.0:
        problems.append(f"--temperature {arguments.temperature:g} is not between 0 and 100")
    if not 0.0 <= arguments.top_p <= 1.0:
        problems.append(f"--top-p {arguments.top_p:g} is not between 0 and 1")
    if not 0.0 < arguments.repetition_penalty <= 100.0:
        problems.append(f"--repetition-penalty {arguments.repetition_penalty:g} is not above 0 and at most 100")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        problems.append(f"--seed {arguments.seed} is not between 0 and {2**63 - 1}")
    if problems:
        raise ConfigurationError(problems)


def talk(answer: Answer, system: str | None) -> None:
    """Read messages from standard input and print the answers, until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - enables line editing in input()
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    while (line := _next_line(is_terminal)) not in (None, "/exit"):
        if line == "/reset":
            messages = list(beginning)
        elif line:
            messages.append({"role": "user", "content": line})
            said = _print_answer(answer, messages)
            if said is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said})


def _next_line(is_terminal: bool) -> str | None:
    try:
        return input("> " if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            print()
        return None


def _print_answer(answer: Answer, messages: Sequence[Mapping[str, str]]) -> str | None:
    """Print an answer as it is streamed and return its text; None if it failed."""
    said = ""
    pieces = answer(messages)
    try:
        for piece in pieces:
            said += piece
            print(_printable(piece), end="", flush=True)
    except ChatFailed as error:
        print(f"{chr(10) if said else ''}error: {error}", file=sys.stderr, flush=True)
        return None
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    print(flush=True)
    return said


def _printable(text: str) -> str:
    """Replace control characters, which could change the state of the terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields that the flags set."""
    fields = {
        "model": arguments.model,
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
    }
    if arguments.repetition_penalty != 1.0:  # not part of OpenAI's API: other servers may reject it
        fields["repetition_penalty"] = arguments.repetition_penalty
    return {name: value for name, value in fields.items() if value is not None}


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Chat until the input ends.

    Raises:
        InputError: a flag is invalid, or the server or the checkpoint cannot be used.
    """
    check_arguments(arguments)
    if launch.world_size > 1:
        raise InputError(
            f"chat runs in one process, but {launch.world_size} were started; start serve in these processes and chat "
            "with --url"
        )
    if arguments.load is None and arguments.load_hf is None:
        client = ChatClient(arguments.url or URL, arguments.api_key, request_fields(arguments))
        name = client.model()
        if sys.stdin.isatty():
            print(f"{_printable(name)} at {arguments.url or URL}; /reset, /exit")
        talk(client.answer, arguments.system)
        return
    try:
        talk(_local_answer(arguments, launch), arguments.system)
    finally:
        shut_down()


def _local_answer(arguments: argparse.Namespace, launch: LaunchEnvironment) -> Answer:
    from megatron.core.datasets import choose_template
    from megatron.core.inference import ContinuousEngine
    from megatron.serving.openai import LocalChat, Translator

    checkpoint = open_checkpoint(model_request(arguments), launch)
    longest = checkpoint.config.max_position_embeddings
    template = choose_template(checkpoint.tokenizer, arguments.chat_template)
    translator = Translator(checkpoint.tokenizer, checkpoint.config, longest, template)
    engine = ContinuousEngine(load_engine(checkpoint, launch), max_rows=1, max_tokens=longest)
    return LocalChat(engine, translator, request_fields(arguments)).answer


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
