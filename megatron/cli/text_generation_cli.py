"""Generate text from prompts with the model of a checkpoint.

    megatron generate checkpoints --prompt "The castle stood"
    megatron generate checkpoints                               prompts that are typed, until the line stop
    megatron generate localhost:5000                            the same, with a server of PUT /api

Run with plain python for one process, or under torchrun at any tensor- and pipeline-parallel size: a checkpoint of any
layout is resharded. By default all ranks are tensor-parallel. The model configuration and the tokenizer are read from
the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.generation_arguments import (
    Parser,
    add_generation_flags,
    add_model_flags,
    beam_config,
    generation_problems,
    model_request,
    run_on_ranks,
    sampling_config,
)
from megatron.cli.terminal import LineInput, printable
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference import (
    BeamConfig,
    GenerationRequest,
    SamplingConfig,
    StopRule,
    check_request,
    context_length,
    new_tokens_that_fit,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.tokenizers import Tokenizer
from megatron.serving import Checkpoint, PutClient, load_engine, open_checkpoint, server_address
from megatron.training import LaunchEnvironment, shut_down

if TYPE_CHECKING:
    from megatron.core.inference import InferenceEngine

SEPARATOR = "-" * 40
STOP = "stop"
"""Line that ends the interactive generation, as in Megatron-LM."""
_TYPE_HERE = "Context prompt (stop to exit) >>> "
_DEFAULT_LENGTH = 64
_TYPING_MINUTES = 7 * 24 * 60
"""Time limit of a collective while the other ranks wait for a prompt to be typed."""

_PUT_FIELDS = {
    "max_tokens": "tokens_to_generate",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "random_seed",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "num_beams": "beam_width",
    "length_penalty": "length_penalty",
}
"""Flags, and the fields of Megatron-LM's server that they set."""


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="text_generation_cli.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; repeat the flag for several texts (by default prompts are read from the terminal)",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with one prompt per line; blank lines are skipped")
    add_generation_flags(
        parser,
        length=f"{_DEFAULT_LENGTH}, or the rest of the context",
        seed=f"{SamplingConfig.seed}",
    )
    add_model_flags(parser)
    return parser


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Read the prompts from the flags.

    Raises:
        InputError: there is no prompt, or the file cannot be read.
    """
    if arguments.prompt_file is None:
        given: list[str] = arguments.prompt
        if not all(given):
            raise InputError("--prompt is empty; pass some text")
        # Python decodes command line bytes that are not UTF-8 to lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in "".join(given)):
            raise InputError("--prompt is not valid UTF-8; convert it")
        return given
    try:
        lines = Path(arguments.prompt_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompt-file {arguments.prompt_file}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompt-file {arguments.prompt_file} contains no text; write one prompt per line")
    return prompts


class Generation:
    """Options of generation for one model.

    Args:
        max_new_tokens: maximum number of new tokens; None: 64, or the rest of the context after the longest prompt.
    """

    def __init__(
        self,
        config: GPTConfig,
        tokenizer: Tokenizer,
        max_new_tokens: int | None,
        sampling: SamplingConfig,
        beams: BeamConfig | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._beams = beams

    def request(self, prompts: Sequence[str]) -> GenerationRequest:
        """Build the engine's request; generation of each prompt stops at the end-of-document token.

        Raises:
            InputError: a prompt cannot be continued by the model.
        """
        ids = tuple(tuple(self._tokenizer.tokenize(prompt)) for prompt in prompts)
        count = self._max_new_tokens
        if count is None:
            count = new_tokens_that_fit(self._config, [*map(len, ids)], _DEFAULT_LENGTH)
        end = self._tokenizer.eod_id
        request = GenerationRequest(
            prompts=ids,
            max_new_tokens=count,
            sampling=self._sampling,
            stop=StopRule(end_tokens=frozenset() if end is None else frozenset((end,))),
            beams=self._beams,
        )
        check_request(self._config, request)
        return request


def describe_long_text(config: GPTConfig, request: GenerationRequest) -> str | None:
    """Return a warning if a text may exceed the context length.

    Models with learned position embeddings reject such a request instead.
    """
    prompt, count = max(map(len, request.prompts)), request.max_new_tokens
    limit = context_length(config, prompt + count)
    if prompt + count <= limit:
        return None
    return (
        f"WARNING: a prompt of {prompt} tokens and --tokens-to-generate {count} are {prompt + count} tokens, but the "
        f"model was trained on {limit} positions: later text will be worse; shorten the prompt or lower "
        "--tokens-to-generate"
    )


def _warn_of_long_text(config: GPTConfig, request: GenerationRequest, launch: LaunchEnvironment) -> None:
    warning = describe_long_text(config, request)
    if warning is not None and launch.rank == 0:
        print(warning, file=sys.stderr, flush=True)


def generate_texts(
    checkpoint: Checkpoint, generation: Generation, prompts: Sequence[str], launch: LaunchEnvironment
) -> list[str]:
    """Load the model and return each prompt with its continuation.

    Raises:
        InputError: the weights cannot be loaded, or the prompts are invalid.
    """
    request = generation.request(prompts)
    _warn_of_long_text(checkpoint.config, request, launch)
    continuations = load_engine(checkpoint, launch).generate(request)
    return [
        checkpoint.tokenizer.detokenize([*prompt, *continuation.tokens])
        for prompt, continuation in zip(request.prompts, continuations, strict=True)
    ]


def generate_interactively(checkpoint: Checkpoint, generation: Generation, launch: LaunchEnvironment) -> None:
    """Read prompts from standard input of rank 0, and print each with its continuation as it is generated.

    A prompt that cannot be continued is reported, and the next one is read.

    Raises:
        InputError: the weights cannot be loaded, or a pipe contains no prompt.
    """
    lines = LineInput(_TYPE_HERE) if launch.rank == 0 else None
    engine = load_engine(checkpoint, launch, timeout_minutes=_TYPING_MINUTES)

    def show(prompt: str) -> None:
        request = generation.request([prompt])
        _warn_of_long_text(checkpoint.config, request, launch)
        _print_text(checkpoint.tokenizer, engine, request, is_shown=launch.rank == 0)

    _show_each(_prompts_of_all_ranks(lines, engine), lines, show)


def typed_prompts(lines: LineInput) -> Iterator[str]:
    """Yield the lines that are not blank, until the line ``stop`` or the end of the input.

    Raises:
        InputError: a pipe contains no prompt.
    """
    is_empty = True
    while (line := lines.read()) not in (None, STOP):
        if line:
            is_empty = False
            yield line
    if line is None and is_empty and not lines.is_terminal:
        raise InputError("standard input has no prompt; give --prompt TEXT, --prompt-file FILE, or lines")


def _prompts_of_all_ranks(lines: LineInput | None, engine: InferenceEngine) -> Iterator[str]:
    """Yield on every rank the prompts that rank 0 reads."""
    from megatron.core.collectives import broadcast_object

    typed = iter(()) if lines is None else typed_prompts(lines)
    while True:
        prompt, failure = None, None
        try:
            prompt = next(typed, None)
        except InputError as error:
            failure = error
        prompt, failure = broadcast_object((prompt, failure), engine.state.world)
        if failure is not None:
            raise failure
        if prompt is None:
            return
        yield prompt


def _show_each(prompts: Iterable[str], lines: LineInput | None, show: Callable[[str], None]) -> None:
    """Show the text of each prompt; the rank with the ``lines`` prints separators and errors."""
    for number, prompt in enumerate(prompts):
        if number and lines is not None and not lines.is_terminal:
            print(SEPARATOR, flush=True)
        try:
            show(prompt)
        except InputError as error:
            if lines is not None:
                print(f"error: {'; '.join(str(error).splitlines())}", file=sys.stderr, flush=True)


def _print_text(tokenizer: Tokenizer, engine: InferenceEngine, request: GenerationRequest, *, is_shown: bool) -> None:
    from megatron.serving.openai import ChoiceText

    (prompt,) = request.prompts
    text = ChoiceText(tokenizer, prompt, ())

    def show() -> None:
        if is_shown:
            print(printable(text.take()[0]), end="", flush=True)

    def on_token(number: int, token: int) -> None:
        text.add(token, None)
        show()

    if is_shown:
        print(printable(tokenizer.detokenize(list(prompt))), end="", flush=True)
    try:
        engine.generate(request, on_token=on_token)
    finally:
        text.end("length")
        show()
        if is_shown:
            print(flush=True)


def put_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of Megatron-LM's PUT /api that the flags set.

    Raises:
        ConfigurationError: the server has no such field, or a flag is about a checkpoint.
    """
    default = build_parser().get_default
    others = vars(arguments).keys() - _PUT_FIELDS.keys() - {"load", "prompt", "prompt_file", "greedy"}
    problems = [
        f"--{name.replace('_', '-')} does not apply to a server of PUT /api; omit it"
        for name in sorted(others)
        if getattr(arguments, name) != default(name)
    ]
    if problems:
        raise ConfigurationError(problems)
    fields = {field: getattr(arguments, name) for name, field in _PUT_FIELDS.items()}
    if arguments.greedy or arguments.temperature == 0.0:
        fields |= {"temperature": None, "top_k": 1}
    if fields["beam_width"] == 1:
        fields["beam_width"] = None  # no beam search
    return {field: value for field, value in fields.items() if value is not None}


def ask_server(address: tuple[str, int], prompts: Sequence[str] | None, fields: Mapping[str, Any]) -> None:
    """Print each prompt with the continuation from Megatron-LM's server; None reads prompts from standard input.

    Raises:
        InputError: the server rejects a given prompt, or a pipe contains no prompt.
    """
    client = PutClient(*address, fields)
    if prompts is not None:
        print(f"\n{SEPARATOR}\n".join(client.text(prompt) for prompt in prompts), flush=True)
        return
    lines = LineInput(_TYPE_HERE)
    _show_each(typed_prompts(lines), lines, lambda prompt: print(printable(client.text(prompt)), flush=True))


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Print each prompt with its continuation.

    Raises:
        InputError: a flag, a prompt or the checkpoint is invalid.
    """
    if problems := list(generation_problems(arguments)):
        raise ConfigurationError(problems)
    is_interactive = arguments.prompt is None and arguments.prompt_file is None
    address = None if arguments.load is None or Path(arguments.load).is_dir() else server_address(arguments.load)
    if address is not None:
        if launch.world_size > 1:
            raise InputError(f"{arguments.load} is a server, which one process asks, and not {launch.world_size}")
        ask_server(address, None if is_interactive else read_prompts(arguments), put_fields(arguments))
        return
    prompts = [] if is_interactive else read_prompts(arguments)
    checkpoint = open_checkpoint(model_request(arguments), launch)
    generation = Generation(
        checkpoint.config,
        checkpoint.tokenizer,
        arguments.max_tokens,
        sampling_config(arguments, SamplingConfig.seed),
        beam_config(arguments),
    )
    try:
        if is_interactive:
            generate_interactively(checkpoint, generation, launch)
            return
        texts = generate_texts(checkpoint, generation, prompts, launch)
    finally:
        shut_down()
    if launch.rank == 0:
        print(f"\n{SEPARATOR}\n".join(texts), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
