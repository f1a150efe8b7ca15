from __future__ import annotations

import math

import pytest

from megatron.core.inference.sampling_config import MIN_TEMPERATURE, SamplingConfig


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"greedy": True},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"top_p": 1.0},
        {"temperature": MIN_TEMPERATURE},
        {"top_p": 0.5, "top_p_decay": 1.0, "top_p_bound": 0.5},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"greedy": True, "seed": 0},
    ],
)
def test_usable_values_have_no_problems(values) -> None:
    assert SamplingConfig(**values).problems() == ()


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": 0.0}, "--temperature 0 "),
        ({"temperature": -1.5}, "--temperature -1.5 "),
        ({"temperature": math.nan}, "--temperature nan "),
        ({"temperature": math.inf}, "--temperature inf "),
        ({"temperature": MIN_TEMPERATURE / 2}, "--temperature 5.87747e-39 is below 1.17549e-38"),
        ({"top_k": -3}, "--top-k -3 "),
        ({"top_p": 1.25}, "--top-p 1.25 "),
        ({"top_p": -0.25}, "--top-p -0.25 "),
        ({"top_p": math.nan}, "--top-p nan "),
        ({"top_p": 0.9, "top_p_decay": 1.5}, "--top-p-decay 1.5 "),
        ({"top_p": 0.9, "top_p_decay": -0.5}, "--top-p-decay -0.5 "),
        ({"top_p": 0.3, "top_p_bound": -0.1}, "--top-p-bound -0.1 "),
        ({"top_p_decay": 0.5}, "--top-p-decay 0.5 needs --top-p"),
        ({"top_p": 0.3, "top_p_bound": 0.4}, "--top-p-bound 0.4 "),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0 "),
        ({"repetition_penalty": math.nan}, "--repetition-penalty nan "),
        ({"repetition_penalty": 101.0}, "--repetition-penalty 101 "),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5 "),
        ({"frequency_penalty": -2.5}, "frequency_penalty -2.5 "),
        ({"frequency_penalty": math.nan}, "frequency_penalty nan "),
        ({"seed": -1}, "--seed -1 "),
        ({"greedy": True, "top_k": 5}, "--greedy "),
        ({"greedy": True, "temperature": 0.5}, "--greedy "),
        ({"greedy": True, "top_p": 0.5}, "--greedy "),
    ],
)
def test_a_problem_names_the_flag_and_the_value(values, flag: str) -> None:
    (problem,) = SamplingConfig(**values).problems()
    assert problem.startswith(flag)


def test_by_default_tokens_are_drawn_from_the_models_own_distribution() -> None:
    default = SamplingConfig()
    assert not default.greedy
    assert not default.has_penalty
    assert (default.temperature, default.top_k, default.top_p, default.no_repeat_ngram_size) == (1.0, 0, 0.0, 0)
    assert default.at_step(3) is default


@pytest.mark.parametrize(
    "values", [{"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]
)
def test_a_penalty_of_any_kind_counts(values) -> None:
    assert SamplingConfig(**values).has_penalty


def test_all_problems_are_found_at_once() -> None:
    assert len(SamplingConfig(temperature=0.0, top_k=-1, top_p=2.0).problems()) == 3


def test_top_p_decays_down_to_its_bound() -> None:
    sampling = SamplingConfig(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    assert [sampling.at_step(step).top_p for step in range(4)] == [0.8, 0.4, 0.3, 0.3]


def test_top_p_never_decays_to_drawing_from_all() -> None:
    assert 0.0 < SamplingConfig(top_p=0.8, top_p_decay=0.5).at_step(5000).top_p < 1e-300


@pytest.mark.parametrize("values", [{"top_p": 0.8}, {"top_k": 3}, {"top_p_decay": 0.5}])
def test_without_a_decay_every_token_is_chosen_alike(values) -> None:
    sampling = SamplingConfig(**values)
    assert sampling.at_step(7) == sampling
