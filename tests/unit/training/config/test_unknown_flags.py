"""Words that are no flags: suggestions only where they are close, other trainers' flags with what stands for them."""

from __future__ import annotations

import pytest

from megatron.config.arguments import all_flags
from megatron.config.megatron_flags import foreign_flags, unknown_flags


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
        ("--tensor-parallel-size 2", "--tensor-model-parallel-size"),
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
        ("--model-parallel-size 2", "(of Megatron-LM before 2021); give --tensor-model-parallel-size 2"),
        ("--batch-size=4", "(of Megatron-LM before 2021); give --micro-batch-size 4"),
        ("--warmup .01", "(of Megatron-LM before 2021); give --lr-warmup-fraction .01"),
        ("--zero-stage 2", "(of DeepSpeed); give --data-parallel-sharding-strategy optim_grads"),
        ("--learning_rate 1e-4", "(of Hugging Face transformers); give --lr 1e-4"),
        ("--n_embd 768", "(of nanoGPT); give --hidden-size 768"),
        (
            "--train-data a.json",
            "give --train-data-path a.json: data are tokenized beforehand: run tools/preprocess_data.py",
        ),
        ("--deepspeed", "leave it out: torchrun starts the ranks"),
        ("--lazy-loader", "leave it out: token files are always memory-mapped"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_what_to_give(typed: str, line: str) -> None:
    assert line in answer(typed)
    assert answer(typed).startswith(f"unknown flag {typed.replace('=', ' ')}")


def test_a_feature_that_is_not_there_is_refused_by_name() -> None:
    counted = "a run is counted in iterations: give --train-iters or --train-samples"
    assert answer("--epochs 3") == f"--epochs 3 (of Megatron-LM before 2021) is not supported: {counted}"
    assert "is not supported: this choice of a mixture of experts is not built" in answer("--moe-latent-size 8")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--shared-moe-ffn-hidden-size 64", "; give --moe-shared-expert-intermediate-size 64: add --moe-shared-expert"),
        ("--enable-shared-expert", "give --moe-shared-expert-intermediate-size for a shared expert"),
        ("--moe-hybridep-num-blocks-permute 8", "; leave it out: --moe-token-dispatcher-type says how tokens"),
        ("--use-fused-weighted-squared-relu", "; leave it out: "),
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
