"""Generate text from a prompt with the model of a checkpoint.

Run with plain python for one process, or under torchrun at any tensor- and pipeline-parallel size: a checkpoint of any
layout is resharded. By default all ranks are tensor-parallel. The model configuration and the tokenizer are read from
the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron.cli.generation_arguments import Parser, add_model_flags, model_request, run_on_ranks
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference import (
    BeamConfig,
    GenerationRequest,
    SamplingConfig,
    StopRule,
    check_request,
    context_length,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.tokenizers import Tokenizer
from megatron.serving import ModelRequest, load_engine, open_checkpoint
from megatron.training import LaunchEnvironment, shut_down

SEPARATOR = "-" * 40


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="text_generation_cli.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with one prompt per line; blank lines are skipped")
    parser.add_argument(
        "--tokens-to-generate",
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of tokens to generate per prompt (64)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--greedy", action="store_true", help="greedy decoding: select the most probable token")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (1.0)")
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most probable tokens (0: all)"
    )
    sampling.add_argument(
        "--top-p", type=float, default=0.0, metavar="P", help="nucleus sampling threshold (0: all tokens)"
    )
    sampling.add_argument("--seed", type=int, default=1234, metavar="N", help="sampling seed (1234)")
    sampling.add_argument(
        "--no-repeat-ngram-size", type=int, default=0, metavar="N", help="never repeat an n-gram of N tokens (0: off)"
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides the logits of tokens that the text already contains; above 1: repeat less (1.0)",
    )
    beams = parser.add_argument_group("beam search (no sampling)")
    beams.add_argument("--num-beams", type=int, default=1, metavar="N", help="number of beams (1: no beam search)")
    beams.add_argument(
        "--length-penalty",
        type=float,
        metavar="P",
        help="score = sum of log-probabilities / length ** P; above 0: favor long texts (1.0)",
    )
    beams.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        help=(
            "when to stop after N beams have finished: true: immediately; false: if no running beam scores higher; "
            "never: if none ever can (false)"
        ),
    )
    add_model_flags(parser)
    return parser


def check_sampling(arguments: argparse.Namespace) -> SamplingConfig:
    """Return the sampling configuration.

    Raises:
        ConfigurationError: a value is invalid.
    """
    sampling = SamplingConfig(
        greedy=arguments.greedy,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        repetition_penalty=arguments.repetition_penalty,
    )
    problems = list(sampling.problems())
    if arguments.num_beams < 1:
        problems.append(f"--num-beams {arguments.num_beams} is not positive; use 1 for no beam search")
    for flag, value in (("--length-penalty", arguments.length_penalty), ("--early-stopping", arguments.early_stopping)):
        if value is not None and arguments.num_beams == 1:
            problems.append(f"{flag} {value} has no effect without --num-beams 2 or more")
    if arguments.tokens_to_generate < 1:
        problems.append(f"--tokens-to-generate {arguments.tokens_to_generate} is not positive")
    if problems:
        raise ConfigurationError(problems)
    return sampling


def beam_config(arguments: argparse.Namespace) -> BeamConfig | None:
    """Return the beam search configuration; None without beam search."""
    if arguments.num_beams == 1:
        return None
    stopping: dict[str | None, bool | Literal["never"]] = {"true": True, "never": "never"}
    return BeamConfig(
        num_beams=arguments.num_beams,
        length_penalty=1.0 if arguments.length_penalty is None else arguments.length_penalty,
        early_stopping=stopping.get(arguments.early_stopping, False),
    )


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Read the prompts from the flags.

    Raises:
        InputError: there is no prompt, or the file cannot be read.
    """
    if arguments.prompt_file is None:
        if not arguments.prompt:
            raise InputError("--prompt is empty; pass some text")
        # Python decodes command line bytes that are not UTF-8 to lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in arguments.prompt):
            raise InputError("--prompt is not valid UTF-8; convert it")
        return [arguments.prompt]
    try:
        lines = Path(arguments.prompt_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompt-file {arguments.prompt_file}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompt-file {arguments.prompt_file} contains no text; write one prompt per line")
    return prompts


def make_request(
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    max_new_tokens: int,
    sampling: SamplingConfig,
    beams: BeamConfig | None = None,
) -> GenerationRequest:
    """Build the engine's request; generation of each prompt stops at the end-of-document token."""
    return GenerationRequest(
        prompts=tuple(tuple(tokenizer.tokenize(prompt)) for prompt in prompts),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=StopRule(end_tokens=frozenset() if tokenizer.eod_id is None else frozenset((tokenizer.eod_id,))),
        beams=beams,
    )


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


def generate_texts(
    model: ModelRequest,
    launch: LaunchEnvironment,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: SamplingConfig,
    beams: BeamConfig | None = None,
) -> list[str]:
    """Load the checkpoint and return each prompt with its continuation.

    Raises:
        InputError: the checkpoint, the tokenizer or the prompts are invalid.
    """
    checkpoint = open_checkpoint(model, launch)
    tokenizer = checkpoint.tokenizer
    request = make_request(prompts, tokenizer, max_new_tokens, sampling, beams)
    check_request(checkpoint.config, request)
    warning = describe_long_text(checkpoint.config, request)
    if warning is not None and launch.rank == 0:
        print(warning, file=sys.stderr)
    engine = load_engine(checkpoint, launch)
    continuations = engine.generate(request)
    return [
        tokenizer.detokenize([*prompt, *continuation.tokens])
        for prompt, continuation in zip(request.prompts, continuations, strict=True)
    ]


def run(arguments: argparse.Namespace, launch: LaunchEnvironment) -> None:
    """Print each prompt with its continuation.

    Raises:
        InputError: a flag, a prompt or the checkpoint is invalid.
    """
    sampling = check_sampling(arguments)
    prompts = read_prompts(arguments)
    model = model_request(arguments)
    try:
        texts = generate_texts(model, launch, prompts, arguments.tokens_to_generate, sampling, beam_config(arguments))
    finally:
        shut_down()
    if launch.rank == 0:
        print(f"\n{SEPARATOR}\n".join(texts), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    return run_on_ranks(build_parser(), run, argv)
