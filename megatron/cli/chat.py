"""Chat with a model in the terminal: over OpenAI's API, or with a checkpoint loaded here.

    megatron chat                   the server at http://127.0.0.1:8000
    megatron chat checkpoints/sft   a checkpoint, in this process

Answers are streamed. A model without a chat template continues the text (completion mode). The line /reset starts a new
conversation, /exit or the end of the input (Ctrl-D) ends the chat, and Ctrl-C stops the current answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.cli.generation_arguments import (
    Parser,
    add_generation_flags,
    add_model_flags,
    generation_problems,
    model_request,
    request_fields,
    run_on_ranks,
)
from megatron.cli.terminal import LineInput, printable
from megatron.core.errors import ConfigurationError, InputError
from megatron.serving import load_engine, open_checkpoint
from megatron.serving.openai import BASE_MODEL_TOKENS, COMPLETION_MODE, ChatClient, ChatFailed
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
    parser.add_argument(
        "--chat-template", metavar="NAME|FILE", help="chat template, with a checkpoint (the tokenizer's own)"
    )
    add_generation_flags(
        parser,
        length=f"the rest of the context, {BASE_MODEL_TOKENS} without a chat template",
        seed="a different one for each answer",
    )
    add_model_flags(parser, required=False)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = list(generation_problems(arguments))
    has_model = arguments.load is not None or arguments.load_hf is not None
    for name in ("url", "api_key", "model"):
        if has_model and getattr(arguments, name) is not None:
            problems.append(f"--{name.replace('_', '-')} applies to a server; omit it, or the checkpoint")
    if not has_model and arguments.chat_template is not None:
        problems.append(
            "--chat-template applies only to a checkpoint, because a server has its own template; name a checkpoint, "
            "or omit it"
        )
    if problems:
        raise ConfigurationError(problems)


def talk(answer: Answer, system: str | None) -> None:
    """Read messages from standard input and print the answers, until the input ends."""
    lines = LineInput("> ")
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    while (line := lines.read()) not in (None, "/exit"):
        if line == "/reset":
            messages = list(beginning)
        elif line:
            messages.append({"role": "user", "content": line})
            said = _print_answer(answer, messages)
            if said is None:
                messages.pop()
                if len(messages) > len(beginning):
                    print("/reset starts a new conversation", file=sys.stderr, flush=True)
            else:
                messages.append({"role": "assistant", "content": said})


def _print_answer(answer: Answer, messages: Sequence[Mapping[str, str]]) -> str | None:
    """Print an answer as it is streamed and return its text; None if it failed."""
    said = ""
    pieces = answer(messages)
    try:
        for piece in pieces:
            said += piece
            print(printable(piece), end="", flush=True)
    except ChatFailed as error:
        print(f"{chr(10) if said else ''}error: {error}", file=sys.stderr, flush=True)
        return None
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    print(flush=True)
    return said


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
        fields = request_fields(arguments)
        if arguments.model is not None:
            fields["model"] = arguments.model
        client = ChatClient(arguments.url or URL, arguments.api_key, fields)
        name = client.model()
        if client.mode == "completion":
            print(COMPLETION_MODE, file=sys.stderr)
        if sys.stdin.isatty():
            print(f"{printable(name)} at {arguments.url or URL}; /reset, /exit")
        talk(client.answer, arguments.system)
        return
    try:
        talk(_local_answer(arguments, launch), arguments.system)
    finally:
        shut_down()


def _local_answer(arguments: argparse.Namespace, launch: LaunchEnvironment) -> Answer:
    from megatron.core.inference import ContinuousEngine
    from megatron.serving.openai import LocalChat, Translator

    checkpoint = open_checkpoint(model_request(arguments), launch)
    longest = checkpoint.config.max_position_embeddings
    template = checkpoint.chat_template(arguments.chat_template)
    if template is None:
        print(COMPLETION_MODE, file=sys.stderr)
    fields = request_fields(arguments)
    translator = Translator(checkpoint.tokenizer, checkpoint.config, longest, template, fields.pop("max_tokens", None))
    engine = ContinuousEngine(load_engine(checkpoint, launch), max_rows=arguments.num_beams or 1, max_tokens=longest)
    return LocalChat(engine, translator, fields).answer


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
