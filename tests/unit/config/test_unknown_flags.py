"""Answers to mistakes: close flags, other trainers' flags, and the values that would work."""

from __future__ import annotations

import random
import re

import pytest

from megatron.config.arguments import all_flags, resolve_arguments
from megatron.config.megatron_flags import foreign_flags, unknown_flags
from megatron.core.errors import ConfigurationError, choices
from megatron.core.pipeline_parallel.stage_layout import _listed
from tests.unit.config.mistakes import MISTAKES, RIGHT, Mistake, workplace


def answer(text: str) -> str:
    (line,) = unknown_flags(text.split(), all_flags(), text.split())
    return line


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--hiden-size 3", "--hidden-size"),
        ("--train_iters 3", "--train-iters"),
        ("-lr 1e-3", "--lr"),
        ("--Num-Layers 2", "--num-layers"),
        ("--tensor-model-paralel-size 2", "--tensor-model-parallel-size"),
        ("--warmup-iters 10", "--lr-warmup-iters"),
        ("--no-save-optimizer", "--no-save-optim"),
    ],
)
def test_a_near_miss_gets_a_suggestion(typed: str, meant: str) -> None:
    assert answer(typed) == f"unknown flag {typed.split()[0]}; did you mean {meant}?"


@pytest.mark.parametrize("typed", ["--zzqqxx", "--deep", "--rope-kind", "--loader", "--cache", "--seeds-of-love"])
def test_a_far_one_gets_none(typed: str) -> None:
    assert answer(typed) == f"unknown flag {typed}; see --help"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--model-parallel-size 2", "(of Megatron-LM before 2021); use --tensor-model-parallel-size 2"),
        ("--batch-size=4", "(of Megatron-LM before 2021); use --micro-batch-size 4"),
        ("--warmup .01", "(of Megatron-LM before 2021); use --lr-warmup-fraction .01"),
        ("--zero-stage 2", "(of DeepSpeed); use --data-parallel-sharding-strategy optim_grads"),
        ("--learning_rate 1e-4", "(of Hugging Face transformers); use --lr 1e-4"),
        ("--n_embd 768", "(of nanoGPT); use --hidden-size 768"),
        ("--deepspeed", "omit it: torchrun starts the ranks"),
        ("--lazy-loader", "omit it: token files are always memory-mapped"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_what_to_give(typed: str, line: str) -> None:
    assert line in answer(typed)
    assert answer(typed).startswith(f"unknown flag {typed.replace('=', ' ')}")


def test_a_feature_that_is_not_there_is_refused_by_name() -> None:
    counted = "a run is counted in iterations: pass --train-iters or --train-samples"
    assert answer("--epochs 3") == f"--epochs 3 (of Megatron-LM before 2021) is not supported: {counted}"
    assert "is not supported: this choice of a mixture of experts is not built" in answer("--moe-token-dropping 8")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--moe-hybridep-num-blocks-permute 8", "; omit it: --moe-token-dispatcher-type"),
        ("--use-fused-weighted-squared-relu", "; omit it: "),
        ("--mtp-use-repeated-layer", "is not supported: this choice of multi-token prediction is not built"),
    ],
)
def test_a_flag_of_others_experts_is_answered_with_what_is_built(typed: str, line: str) -> None:
    assert line in answer(typed)


def test_several_words_make_a_line_each() -> None:
    words = ["stray", "--hiden-size", "3", "--epochs", "2", "--lazy-loader"]
    lines = list(unknown_flags(words, all_flags(), words))
    assert [line.split(";")[0].split(" (")[0] for line in lines] == [
        "unexpected value 'stray'",
        "unknown flag --hiden-size",
        "--epochs 2",
        "unknown flag --lazy-loader",
    ]


def test_what_stands_for_a_foreign_flag_is_a_flag_here() -> None:
    known = all_flags()
    for foreign in foreign_flags().values():
        named = [word for word in foreign.becomes.split() if word.startswith("--")]
        assert all(known.get(name) in ("effective", "not supported yet") for name in named), foreign
        assert foreign.becomes or foreign.change.removeprefix("nothing"), foreign


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


ALL = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]


def test_the_command_line_that_they_change_is_right() -> None:
    with workplace():
        assert Mistake("").answers() == ()
    assert len(ALL) >= 50
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("mistake", ALL, ids=str)
def test_each_is_answered_in_one_line_that_names_a_flag(mistake: Mistake) -> None:
    with workplace():
        (answer,) = mistake.answers()
    assert "\n" not in answer
    typed = [word for word in (*mistake.added.split(), *mistake.without) if word.startswith("-")]
    names = [word.split("=")[0] for word in typed]
    assert any(name in answer for name in (*names, *(word for word in RIGHT.split() if word.startswith("--"))))
