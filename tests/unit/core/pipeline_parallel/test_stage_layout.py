"""Which layers are on which stage, and what is refused with which advice."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import ParallelConfig
from megatron.core.pipeline_parallel.stage_layout import (
    layout_problems,
    mtp_modules_per_stage,
    parse_layout,
    plan_stage_layout,
)


def config(pp: int, **fields: Any) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=pp, **fields)


def layers(pp: int, num_layers: int, layout: str | None = None, **fields: Any) -> list[list[tuple[int, ...]]]:
    """Return the layer numbers of each rank's chunks; embedding, loss and order are checked on the way."""
    plan = plan_stage_layout(config(pp, **fields), num_layers, layout)
    assert [n for stage in plan.stages for n in stage.layer_numbers] == list(range(num_layers))
    assert [stage.has_embedding for stage in plan.stages] == [True] + [False] * (len(plan.stages) - 1)
    assert [stage.has_loss for stage in plan.stages] == [False] * (len(plan.stages) - 1) + [True]
    for rank in range(pp):
        assert plan.chunks(rank) == tuple(plan.contents(rank, chunk) for chunk in range(plan.num_chunks))
    return [[chunk.layer_numbers for chunk in plan.chunks(rank)] for rank in range(pp)]


def counts(pp: int, num_layers: int, layout: str | None = None, **fields: Any) -> list[list[int]]:
    return [[len(chunk) for chunk in rank] for rank in layers(pp, num_layers, layout, **fields)]


def test_an_even_split() -> None:
    assert layers(1, 1) == [[(0,)]]
    assert layers(1, 3) == [[(0, 1, 2)]]
    assert layers(3, 6) == [[(0, 1)], [(2, 3)], [(4, 5)]]


def test_chunks_go_around_the_ranks() -> None:
    expected = [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    assert layers(2, 8, num_virtual_stages_per_pipeline_rank=2) == expected
    assert layers(2, 8, num_layers_per_virtual_pipeline_stage=2) == expected


def test_uneven_splits() -> None:
    assert counts(4, 11, decoder_first_pipeline_num_layers=2) == [[2], [3], [3], [3]]
    assert counts(4, 11, decoder_last_pipeline_num_layers=5) == [[2], [2], [2], [5]]
    assert counts(4, 11, decoder_first_pipeline_num_layers=4, decoder_last_pipeline_num_layers=1) == [
        [4],
        [3],
        [3],
        [1],
    ]
    assert counts(2, 5, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=2) == [[3], [2]]
    assert counts(
        3,
        14,
        decoder_first_pipeline_num_layers=4,
        decoder_last_pipeline_num_layers=4,
        num_virtual_stages_per_pipeline_rank=2,
    ) == [[2, 2], [3, 3], [2, 2]]


def test_embedding_and_loss_count_as_layers() -> None:
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert counts(4, 6, **both) == [[1], [2], [2], [1]]
    assert counts(2, 6, num_virtual_stages_per_pipeline_rank=2, **both) == [[1, 2], [2, 1]]
    assert counts(2, 2, num_virtual_stages_per_pipeline_rank=2, **both) == [[0, 1], [1, 0]]
    assert counts(2, 5, account_for_embedding_in_pipeline_split=True) == [[2], [3]]
    assert counts(2, 5, account_for_loss_in_pipeline_split=True) == [[3], [2]]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ["EttL"]),
        ("E|t|t|L", ["E", "t", "t", "L"]),
        ("Et*3|(tt|)*4L", ["Ettt", "tt", "tt", "tt", "tt", "L"]),
        ("E t*2, (t |)*2, |L", ["Ettt", "t", "", "L"]),
        ("E((t|)*2t|)*2L", ["Et", "t", "t", "t", "t", "t", "L"]),
        ("E|t|*3L", ["E", "t", "", "", "L"]),
        ("E(t)*0|tL", ["E", "tL"]),
    ],
)
def test_the_notation(text: str, stages: list[str]) -> None:
    assert parse_layout(text, "".join(stages).count("t")) == tuple(stages)


def test_an_explicit_layout() -> None:
    assert layers(2, 2, "E|t|t|L") == [[(), (1,)], [(0,), ()]]
    assert layers(4, 3, "Et||tt|L") == [[(0,)], [()], [(1, 2)], [()]]
    assert plan_stage_layout(config(2), 5, "E|tt*2|(t)*2|L").describe() == "E|ttt|tt|L"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et|xL", "has 'x' at character 4"),
        ("Et|mtL", "has a layer t after an MTP module m"),
        ("Ett|m|mL", "has MTP modules m on several stages"),
        ("Ett|Lm", "the loss L once, at its end"),
        ("Ett|L)", "closing parenthesis without an opening"),
        ("E(tt|L", "has an opening parenthesis without a closing parenthesis"),
        ("*2EttL", "has nothing to repeat at character 1"),
        ("Et*999999999|L", "expands to 999999999 items"),
        ("tEt|L", "the embedding E once, at its beginning"),
        ("Ett|Lt", "the loss L once, at its end"),
        ("Et|L", "has 1 layers, but --num-layers is 2"),
    ],
)
def test_notation_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    assert any(words in problem for problem in layout_problems(config(2), 2, text))


@pytest.mark.parametrize(
    ("pp", "num_layers", "fields", "words"),
    [
        (
            5,
            24,
            {},
            "cannot split 24 layers evenly over --pipeline-model-parallel-size 5 stages; use a pipeline size of 1, 2",
        ),
        (5, 24, {}, "--num-layers 20 or 25"),
        (4, 6, {"account_for_loss_in_pipeline_split": True}, "use a pipeline size of 1 or 7, --num-layers 3 or 7"),
        (4, 11, {"decoder_first_pipeline_num_layers": 3}, "use --decoder-first-pipeline-num-layers 2, 5 or 8"),
        (2, 5, {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1}, "num-layers 2"),
        (4, 11, {"decoder_last_pipeline_num_layers": 0}, "--decoder-last-pipeline-num-layers 0 must be 1 or more"),
        (1, 4, {"decoder_first_pipeline_num_layers": 2}, "use 2 or more, or omit them"),
        (2, 8, {"num_virtual_stages_per_pipeline_rank": 3}, "use 1, 2 or 4"),
        (2, 2, {"num_virtual_stages_per_pipeline_rank": 3}, "pipeline ranks; use 1"),
        (2, 120, {"num_virtual_stages_per_pipeline_rank": 7}, "use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60"),
        (2, 240, {"num_virtual_stages_per_pipeline_rank": 7}, "use 1, 2, 3, 4, 5, 6, …, 40, 60 or 120"),
        (2, 8, {"num_layers_per_virtual_pipeline_stage": 3}, "use 1, 2 or 4"),
        (2, 8, {"num_layers_per_virtual_pipeline_stage": 0}, "use 1, 2 or 4"),
        (
            2,
            8,
            {"num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2},
            "set the same thing",
        ),
        (
            2,
            8,
            {"decoder_first_pipeline_num_layers": 2, "account_for_loss_in_pipeline_split": True},
            "requires an even split; omit",
        ),
        (
            2,
            8,
            {"decoder_last_pipeline_num_layers": 2, "num_layers_per_virtual_pipeline_stage": 2},
            "--num-layers-per-virtual-pipeline-stage requires an even split",
        ),
        (0, 8, {}, "--pipeline-model-parallel-size 0 must be 1 or more"),
        (2, 0, {}, "--num-layers 0 is not a number of layers"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_what_could(
    pp: int, num_layers: int, fields: dict[str, Any], words: str
) -> None:
    problems = layout_problems(config(pp, **fields), num_layers)
    assert any(words in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_every_value_that_is_advised_works() -> None:
    for pp in range(2, 6):
        for num_layers in range(pp, 14):
            for first in range(1, num_layers + 1):
                fields = {"decoder_first_pipeline_num_layers": first}
                for problem in layout_problems(config(pp, **fields), num_layers):
                    advice = problem.split("use --decoder-first-pipeline-num-layers ")[1].replace(" or ", ", ")
                    for value in advice.split(", "):
                        assert (
                            layout_problems(config(pp, decoder_first_pipeline_num_layers=int(value)), num_layers) == ()
                        )


@pytest.mark.parametrize(
    ("pp", "layout", "fields", "words"),
    [
        (3, "E|t|t|L", {}, "has 4 stages, not a multiple of --pipeline-model-parallel-size 3; write 3 or 6 stages"),
        (2, "E|t|t|L", {"num_virtual_stages_per_pipeline_rank": 3}, "use 2 or omit it"),
        (2, "E|t|t|L", {"decoder_first_pipeline_num_layers": 1}, "omit --decoder-first-pipeline-num-layers"),
    ],
)
def test_explicit_layouts_that_do_not_fit_the_pipeline(
    pp: int, layout: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan_stage_layout(config(pp, **fields), 2, layout)


def test_the_layout_of_deepseek_v3_has_its_multi_token_prediction_before_the_loss() -> None:
    text = "Et*3|(tt|)*29,m|L"
    assert counts(16, 61, text) == [[3, 2]] + [[2, 2]] * 13 + [[2, 0], [2, 0]]
    assert mtp_modules_per_stage(text) == (0,) * 30 + (1, 0)
    assert mtp_modules_per_stage("Ett|(t)*2,m*2L") == (0, 2)
