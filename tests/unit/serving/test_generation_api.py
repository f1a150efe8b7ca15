from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.inference.beam_search import BeamConfig, Hypothesis
from megatron.core.inference.inference_request import Continuation, TokenPairs
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.serving.text_generation_server import ApiRequest, ApiTranslator, BadRequest, read_body
from tests.unit.core.inference.small_models import odd_config


def parse(**fields: Any) -> ApiRequest:
    return read_body(json.dumps({"prompts": ["a"], **fields}).encode())


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> ApiTranslator:
    """Of a byte-level tokenizer that also knows a blank line and a full stop with a line's end."""
    folder = tmp_path_factory.mktemp("tokenizer")
    merges = ["Ċ Ċ", ". Ċ"]
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = build_tokenizer(vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")
    config = odd_config(vocab_size=tokenizer.vocab_size, max_position_embeddings=90)
    return ApiTranslator(tokenizer, config, max_tokens=300, max_batch_size=4)


def test_the_defaults_are_megatrons() -> None:
    request = parse()
    assert request == ApiRequest(prompts=("a",))
    assert (request.tokens_to_generate, request.temperature, request.top_k, request.top_p) == (None, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": "a"}, "prompts must be a list of strings"),
        ({"prompts": ["a", 3]}, "prompts must be a list of strings"),
        ({"prompts": []}, "prompts has 0 strings; 1 to 128 are accepted"),
        ({"prompts": ["a"] * 129}, "prompts has 129 strings"),
        ({"prompts": ["a", ""]}, "empty prompts require add_BOS: true"),
        ({"prompts": ["\ud800"]}, "prompt 1 contains half of a surrogate pair"),
        ({"tokens_to_generate": "3"}, "tokens_to_generate must be a whole number"),
        ({"tokens_to_generate": True}, "tokens_to_generate must be a whole number"),
        ({"tokens_to_generate": 2.0}, "tokens_to_generate must be a whole number"),
        ({"tokens_to_generate": -1}, "tokens_to_generate must be 0 or more"),
        ({"tokens_to_generate": 0}, "tokens_to_generate 0 requires logprobs: true"),
        ({"logprobs": 1}, "logprobs must be true or false"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": 0}, "temperature must be above 0 and at most 100"),
        (
            {"temperature": 1e-320},
            ("temperature must be at least 1.17549e-38, the smallest value that float32 can divide by"),
        ),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_p": 10**400}, "top_p must be a number"),
        ({"top_p": float("inf")}, "top_p must be between 0 and 1"),
        ({"beam_width": 1, "length_penalty": 10**400}, "length_penalty must be a number"),
        ({"top_k": 2**64}, "top_k must be a whole number"),
        ({"tokens_to_generate": 10**300}, "tokens_to_generate must be a whole number"),
        ({"x" * 100_000: 1}, "is not a known field"),
        ({"temperature": 100.5}, "temperature must be above 0 and at most 100"),
        ({"temperature": float("nan")}, "temperature must be above 0 and at most 100"),
        ({"top_k": -1}, "top_k must be 0 or more"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"top_p_decay": 0.5}, "top_p_decay needs top_p"),
        ({"top_p": 0.5, "top_p_decay": 2}, "top_p_decay must be between 0 and 1"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be between 0 and top_p"),
        ({"add_BOS": "yes"}, "add_BOS must be true or false"),
        ({"random_seed": -2}, "random_seed must be 0 or more"),
        ({"random_seed": 1.0}, "random_seed must be a whole number"),
        ({"stop_token": "x"}, "stop_token must be a whole number"),
        ({"beam_width": 0}, "beam_width must be 1 or more"),
        ({"beam_width": 2.0}, "beam_width must be a whole number"),
        ({"beam_width": 2, "tokens_to_generate": 0, "logprobs": True}, "beam_width needs tokens_to_generate"),
        ({"length_penalty": 2}, "length_penalty needs beam_width"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be 0 or more"),
        ({"max_len": 4}, "max_len has been renamed to tokens_to_generate"),
        ({"token_to_generate": 4}, "did you mean tokens_to_generate?"),
        ({"xyz": 4}, "xyz is not a known field; known fields are prompts, "),
    ],
)
def test_a_field_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"\xff", "the body is not valid JSON"),
        (b"[" * 100000, "the body is not valid JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"{}", "prompts is missing"),
    ],
)
def test_a_body_that_cannot_be_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_body(body)


def test_a_request_becomes_tokens(translator: ApiTranslator) -> None:
    fields = {"temperature": 2, "top_k": 4, "top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.25, "logprobs": True}
    asked = translator.generation_request(parse(prompts=["ab", "c"], tokens_to_generate=7, **fields), default_seed=99)
    tokenizer = translator.tokenizer
    assert asked.prompts == (tuple(tokenizer.tokenize("ab")), tuple(tokenizer.tokenize("c")))
    assert asked.max_new_tokens == 7
    assert asked.log_probabilities
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (2.0, 4, 0.5)
    assert (sampling.top_p_decay, sampling.top_p_bound, sampling.seed) == (0.5, 0.25, 99)
    assert asked.stop.end_tokens == {tokenizer.eod_id}
    assert not asked.stop.closing_tokens
    assert asked.never == TokenPairs()


def test_a_seed_and_an_end_of_its_own(translator: ApiTranslator) -> None:
    asked = translator.generation_request(parse(random_seed=5, stop_token=17), default_seed=99)
    assert asked.sampling.seed == 5
    assert asked.stop.end_tokens == {17}
    assert translator.generation_request(parse(random_seed=-1), default_seed=99).sampling.seed == 99


def test_lines_are_known_by_the_text_of_tokens(translator: ApiTranslator) -> None:
    vocabulary = translator.tokenizer
    (newline,) = vocabulary.tokenize("\n")
    (blank,) = vocabulary.tokenize("\n\n")
    stop = vocabulary.vocab_size - 2  # No text is cut so that it comes about, but the model may choose it.
    assert vocabulary.detokenize([stop]) == ".\n"
    (colon,) = vocabulary.tokenize(":")
    on_line = translator.generation_request(parse(stop_on_eol=True), 0)
    assert on_line.stop.closing_tokens == {newline, blank, stop}
    on_blank = translator.generation_request(parse(stop_on_double_eol=True), 0)
    assert on_blank.stop.closing_tokens == {blank}
    assert on_blank.stop.closes(newline, newline)
    assert on_blank.stop.closes(stop, newline)
    assert not on_blank.stop.closes(colon, newline)
    never = translator.generation_request(parse(prevent_newline_after_colon=True), 0).never
    assert (never.first, never.second) == ({colon}, {newline, blank, stop})


def test_a_beginning_is_in_the_segments_and_not_in_the_text(translator: ApiTranslator) -> None:
    api = parse(prompts=["", "é"], add_BOS=True, logprobs=True)
    asked = translator.generation_request(api, 0)
    eod = translator.tokenizer.eod_id
    assert asked.prompts == ((eod,), (eod, *translator.tokenizer.tokenize("é")))
    (token,) = translator.tokenizer.tokenize("x")
    given = [
        Continuation(tokens=[token], log_probabilities=[-1.0]),
        Continuation(tokens=[token, token], log_probabilities=[-1.0, -2.0, -3.0, -4.0]),
    ]
    answer = translator.answer(asked, api, given)
    assert answer["text"] == ["x", "éxx"]
    assert answer["segments"] == [[END_OF_TEXT, "x"], [END_OF_TEXT, "\ufffd", "\ufffd", "x", "x"]]
    assert [len(row) for row in answer["logprobs"]] == [len(row) - 1 for row in answer["segments"]]
    assert translator.answer(asked, parse(add_BOS=True), given)["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": ["a" * 30], "tokens_to_generate": 61}, "the model has 90 learned positions"),
        ({"prompts": ["a", "a" * 60], "tokens_to_generate": 20}, None),
        (
            {"prompts": ["a"] * 9, "tokens_to_generate": 80},
            "4 prompts x 81 tokens = 324 tokens at once, but at most 300 are accepted",
        ),
        ({"prompts": ["a"] * 9, "tokens_to_generate": 74}, None),
        (
            {"prompts": ["a"] * 9, "tokens_to_generate": 80, "beam_width": 2},
            "2 prompts x 2 beams x 81 tokens = 324 tokens at once, but at most 300 are accepted",
        ),
        ({"prompts": ["a"] * 9, "tokens_to_generate": 80, "beam_width": 3}, None),
        ({"beam_width": 300}, "num_beams 300 is too large: "),
        ({"beam_width": 2, "top_k": 3}, "beam search does not sample"),
        ({"beam_width": 2, "stop_on_eol": True}, "beam search ends only at an end token"),
    ],
)
def test_what_is_too_long_is_refused(translator: ApiTranslator, fields: dict[str, Any], message: str | None) -> None:
    if message is None:
        translator.generation_request(parse(**fields), 0)
        return
    with pytest.raises(BadRequest) as caught:
        translator.generation_request(parse(**fields), 0)
    assert message in str(caught.value)


def test_beams_give_all_their_texts_and_scores(translator: ApiTranslator) -> None:
    api = parse(prompts=["a", "b"], beam_width=2, length_penalty=2, stop_token=17, no_repeat_ngram_size=3)
    asked = translator.generation_request(api, 0)
    assert asked.beams == BeamConfig(num_beams=2, length_penalty=2.0)
    assert asked.sampling.no_repeat_ngram_size == 3
    assert asked.stop.end_tokens == {17}
    (x,), (y,) = translator.tokenizer.tokenize("x"), translator.tokenizer.tokenize("y")
    found = (Hypothesis((x, y), -1.0), Hypothesis((), -2.0))
    given = [Continuation(tokens=[x, y], hypotheses=found)] * 2
    assert translator.answer(asked, api, given) == {
        "text": ["axy", "a", "bxy", "b"],
        "segments": [["a", "x", "y"], ["a"], ["b", "x", "y"], ["b"]],
        "scores": [-1.0, -2.0, -1.0, -2.0],
    }


def test_a_tokenizer_without_an_end_has_no_beginning(tmp_path: Path) -> None:
    class Endless:
        name = "Endless"
        vocab_size = 3
        eod_id = None

        def tokenize(self, text: str) -> list[int]:
            return [1] * len(text)

    translator = ApiTranslator(Endless(), odd_config(), 300, 4)  # type: ignore[arg-type]
    assert translator.generation_request(parse(tokens_to_generate=3), 0).stop.end_tokens == frozenset()
    with pytest.raises(BadRequest, match="Endless has no end-of-document token"):
        translator.generation_request(parse(add_BOS=True), 0)
