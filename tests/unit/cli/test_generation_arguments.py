"""Checkpoint folders and generation flags, which the commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import chat, convert, evaluate, inspect_batch, serve, text_generation_cli
from megatron.cli.arguments import SpellingParser
from megatron.cli.generation_arguments import (
    Parser,
    add_generation_flags,
    beam_config,
    generation_problems,
    request_fields,
    sampling_config,
)
from megatron.cli.run_text_generation_server import build_parser as put_server_parser
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.sampling_config import SamplingConfig

SAMPLING = {
    *("--max-tokens", "--tokens-to-generate", "--greedy", "--temperature", "--top-k", "--top-p", "--seed"),
    *("--no-repeat-ngram-size", "--repetition-penalty"),
}
BEAMS = {"--num-beams", "--length-penalty", "--early-stopping"}


def flags_of(parser: SpellingParser) -> dict[str, str | None]:
    """Return the help of each flag."""
    return {flag: action.help for action in parser._actions for flag in action.option_strings}


def test_generate_chat_and_serve_have_the_same_flags() -> None:
    generate, chatting, serving = (flags_of(module.build_parser()) for module in (text_generation_cli, chat, serve))
    assert generate.keys() & (SAMPLING | BEAMS) == chatting.keys() & (SAMPLING | BEAMS) == SAMPLING | BEAMS
    assert serving.keys() & (SAMPLING | BEAMS) == SAMPLING
    for flag in SAMPLING - {"--max-tokens", "--tokens-to-generate", "--seed"}:
        assert generate[flag] == chatting[flag] == serving[flag]


@pytest.mark.parametrize(
    ("build_parser", "needed", "flag"),
    [
        (text_generation_cli.build_parser, (), "--load"),
        (chat.build_parser, (), "--load"),
        (serve.build_parser, (), "--load"),
        (put_server_parser, (), "--load"),
        (evaluate.build_parser, ("--batch-size", "2"), "--load"),
        (inspect_batch.build_parser, ("--step", "3"), "--load"),
        (convert.build_parser, ("--save-dir", "out"), "--load-dir"),
        (convert.build_parser, ("--save", "out"), "--load"),
    ],
)
def test_the_folder_may_follow_the_command_or_a_flag(
    build_parser: Callable[[], SpellingParser], needed: tuple[str, ...], flag: str
) -> None:
    expected = vars(build_parser().parse_args([flag, "runs", *needed]))
    for words in (("runs", *needed), (*needed, "runs")):
        assert vars(build_parser().parse_args(words)) == expected
    name = "load_dir" if build_parser is convert.build_parser else "load"
    assert Path(expected[name]) == Path("runs")


def parsed(*words: str, with_beams: bool = True) -> Any:
    parser = Parser(prog="program")
    add_generation_flags(parser, length="all", seed="none", with_beams=with_beams)
    return parser.parse_args(words)


def test_a_flag_that_is_not_given_sets_nothing() -> None:
    for with_beams in (True, False):
        arguments = parsed(with_beams=with_beams)
        assert request_fields(arguments) == {}
        assert sampling_config(arguments, 7) == SamplingConfig(seed=7)
        assert beam_config(arguments) is None
        assert list(generation_problems(arguments)) == []


def test_flags_become_request_fields_with_the_meaning_of_the_api() -> None:
    words = "--max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --seed 4 --repetition-penalty 1.5"
    given = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.5}
    assert request_fields(parsed(*words.split())) == given
    assert request_fields(parsed("--greedy", "--top-p", "0")) == {"temperature": 0.0, "top_p": 1.0}
    beams = parsed("--num-beams", "4", "--early-stopping", "never", "--length-penalty", "0.5")
    assert request_fields(beams) == {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5}
    assert beam_config(beams) == BeamConfig(num_beams=4, length_penalty=0.5, early_stopping="never")


def test_temperature_0_is_greedy_and_top_p_1_keeps_all_tokens() -> None:
    greedy = SamplingConfig(greedy=True, seed=1)
    for words in (["--greedy"], ["--temperature", "0"], ["--temperature", "0", "--top-p", "1"]):
        assert sampling_config(parsed(*words), 1) == greedy
        assert list(generation_problems(parsed(*words))) == []
    words = ["--num-beams", "0", "--length-penalty", "2", "--max-tokens", "0", "--top-k", "-1"]
    assert list(generation_problems(parsed(*words))) == [
        "--top-k -1 is negative; use 0 to sample from all tokens",
        "--num-beams 0 is not positive; use 1 for no beam search",
        "--max-tokens (--tokens-to-generate) 0 is not positive",
    ]
