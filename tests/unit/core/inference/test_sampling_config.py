from __future__ import annotations

import math

import pytest

from megatron.core.inference.sampling_config import SamplingConfig


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"greedy": True},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"top_p": 1.0},
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
        ({"top_k": -3}, "--top-k -3 "),
        ({"top_p": 1.25}, "--top-p 1.25 "),
        ({"top_p": math.nan}, "--top-p nan "),
        ({"seed": -1}, "--seed -1 "),
        ({"greedy": True, "top_k": 5}, "--greedy "),
        ({"greedy": True, "temperature": 0.5}, "--greedy "),
    ],
)
def test_a_problem_names_the_flag_and_the_value(values, flag: str) -> None:
    (problem,) = SamplingConfig(**values).problems()
    assert problem.startswith(flag)


def test_all_problems_are_found_at_once() -> None:
    assert len(SamplingConfig(temperature=0.0, top_k=-1, top_p=2.0).problems()) == 3
