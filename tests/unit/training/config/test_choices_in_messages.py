"""Messages that say which values would work always name some, or say that there are none."""

from __future__ import annotations

import random
import re

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError, choices
from megatron.core.pipeline_parallel.stage_layout import _listed

_NOTHING = re.compile(r"(work|one of|use tp|use|give|possible|known|values): *(;|,|\)|\(|$|and |or )")
_FIXED = (
    *("--lr", "1e-4", "--train-iters", "2", "--mock-data", "--vocab-size", "100", "--tokenizer-type", "NullTokenizer"),
    *("--max-position-embeddings", "4096", "--micro-batch-size", "2"),
)
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 18)
_FLAGS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups"),
    *("--seq-length", "--global-batch-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--num-layers-per-virtual-pipeline-stage", "--num-distributed-optimizer-instances"),
    *("--num-virtual-stages-per-pipeline-rank", "--num-experts", "--moe-router-topk", "--moe-router-num-groups"),
    *("--moe-router-group-topk", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--mtp-num-layers"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--kv-channels"),
)
_SWITCHES = ("--sequence-parallel", "--swiglu", "--group-query-attention", "--use-distributed-optimizer", "--bf16")


def problems_of(flags: list[str], world_size: int) -> tuple[str, ...]:
    try:
        resolve_arguments(flags, world_size, needs_files=False)
    except ConfigurationError as error:
        return error.problems
    return ()


def test_no_list_of_values_that_work_is_empty() -> None:
    generator = random.Random(3)
    seen = 0
    for _ in range(150):
        flags = list(_FIXED)
        for name in generator.sample(_FLAGS, 8):
            flags += [name, str(generator.choice(_NUMBERS))]
        flags += generator.sample(_SWITCHES, 2)
        flags += ["--cp-comm-type", generator.choice(["p2p", "a2a", "a2a+p2p"])]
        problems = problems_of(flags, generator.choice((1, 4, 6, 8, 12)))
        seen += sum("work" in problem for problem in problems)
        assert [problem for problem in problems if _NOTHING.search(problem)] == []
    assert seen > 100


def test_heads_that_no_groups_divide_are_one_problem_of_a_context_parallel_run() -> None:
    model = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64")
    groups = ("--group-query-attention", "--num-query-groups", "3", "--context-parallel-size", "4")
    problems = problems_of([*_FIXED, *model, *groups, "--cp-comm-type", "a2a", "--global-batch-size", "2"], 4)
    assert problems == (
        "--num-attention-heads 4 is not divisible by --num-query-groups 3; numbers of groups that work: 1, 2, 4",
    )


@pytest.mark.parametrize(("values", "text"), [((), "none"), ((2,), "2"), ((2, 4), "2, 4")])
def test_choices(values: tuple[int, ...], text: str) -> None:
    assert choices(values) == text


@pytest.mark.parametrize(("values", "text"), [((), "none"), ((2,), "2"), ((2, 4), "2 or 4"), ((1, 2, 4), "1, 2 or 4")])
def test_alternatives(values: tuple[int, ...], text: str) -> None:
    assert _listed(values) == text
