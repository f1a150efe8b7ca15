"""Flags of older Megatron-LM versions and of its forks are read as current flags, with a line for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.megatron_flags import foreign_flags
from megatron.config.run_config import RunConfig
from megatron.config.translated_flags import translate_flags
from megatron.core.config_base import field_value
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import MINIMAL

EXPERTS = "--num-experts 4 --swiglu"
LATENT = "--multi-latent-attention --position-embedding-type rope --v-head-dim 8 --kv-lora-rank 16"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"


def without(*names: str) -> list[str]:
    """Return the smallest command line without flags that have one value each."""
    words = list(MINIMAL)
    for name in names:
        place = words.index(name)
        del words[place : place + 2]
    return words


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of a field by its name."""
    return next(value for spec, value in config.flags() if spec.name == name)


@pytest.mark.parametrize(
    ("typed", "more", "read", "values"),
    [
        ("--model-parallel-size 2", "", "--tensor-model-parallel-size 2", {"tensor_model_parallel_size": 2}),
        ("--batch-size 4", "", "--micro-batch-size 4", {"micro_batch_size": 4, "global_batch_size": 8}),
        ("--batch-size=4", "", "--micro-batch-size 4", {"micro_batch_size": 4}),
        ("--warmup .1", "--lr-decay-iters 10", "--lr-warmup-fraction .1", {"lr_warmup_fraction": 0.1}),
        ("--checkpoint-activations", "", f"{RECOMPUTED} 1", {"recompute_granularity": "full"}),
        ("--min-scale 2", "--fp16", "--min-loss-scale 2", {"min_loss_scale": 2.0}),
        ("--n-head-kv 2", "", "--num-query-groups 2 --group-query-attention", {"num_query_groups": 2}),
        ("--qk-nope-head-dim 16", LATENT, "--qk-head-dim 16", {"qk_head_dim": 16}),
        ("--qk-rope-head-dim 4", LATENT, "--qk-pos-emb-head-dim 4", {"qk_pos_emb_head_dim": 4}),
        (
            "--shared-moe-ffn-hidden-size 64",
            EXPERTS,
            "--moe-shared-expert-intermediate-size 64",
            {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": False},
        ),
        (
            "--enable-shared-expert",
            f"{EXPERTS} --moe-shared-expert-intermediate-size 64",
            "--moe-shared-expert-gate",
            {"moe_shared_expert_gate": True},
        ),
        ("--zero-stage 2", "", "--data-parallel-sharding-strategy optim_grads", {}),
    ],
)
def test_an_older_flag_is_read_as_a_current_flag(typed: str, more: str, read: str, values: dict[str, Any]) -> None:
    words = without("--micro-batch-size") if "--batch-size" in typed else MINIMAL
    parsed = resolve_arguments([*words, *typed.split(), *more.split()], 2)
    assert f"{typed.replace('=', ' ')} is read as {read}" in parsed.notes
    assert {name: value_of(parsed.config, name) for name in values} == values


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("--lazy-loader", "token files are always memory-mapped"),
        (
            "--cache-dir cache",
            "nothing is downloaded; index files and tokenized texts go to --data-cache-path",
        ),
        ("--deepspeed-activation-checkpointing", "--recompute-granularity decides what is recomputed"),
        ("--resume-dataloader", "a resumed run continues with the first sample that it has not trained on"),
        ("--mlp-type standard", "--num-experts makes the feed-forward layers mixtures of experts"),
        ("--create-moe-param-group", "gradients of experts are always reduced over their own copies"),
        ("--no-query-key-layer-scaling", "attention scores cannot overflow in float16"),
        ("--deepspeed", "torchrun starts the ranks, and this project's data parallelism does the rest"),
    ],
)
def test_an_older_flag_without_a_counterpart_has_no_effect(typed: str, reason: str) -> None:
    parsed = resolve_arguments([*MINIMAL, *typed.split()], 1)
    assert parsed.notes == (f"{typed} has no effect: {reason}",)
    assert parsed.config == resolve_arguments(MINIMAL, 1).config


def test_an_old_and_a_current_flag_must_agree() -> None:
    assert resolve_arguments([*MINIMAL, "--batch-size", "2"], 1).config.training.micro_batch_size == 2
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, "--batch-size", "4"], 1)
    assert caught.value.problems == (
        "--batch-size 4 means --micro-batch-size 4, and --micro-batch-size 2 is given; keep one",
    )
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, "--checkpoint-activations", "--recompute-granularity", "selective"], 1)
    assert caught.value.problems == (
        "--checkpoint-activations means --recompute-granularity full, and --recompute-granularity selective is given; "
        "keep one",
    )


def test_a_required_flag_is_added_only_if_the_command_line_does_not_set_it() -> None:
    words = ["--checkpoint-activations", "--checkpoint-num-layers", "2", "--recompute-method", "block"]
    translated = translate_flags(words)
    assert translated.words == [
        *("--recompute-granularity", "full"),
        *("--recompute-num-layers", "2"),
        *("--recompute-method", "block"),
    ]
    assert translated.notes == [
        "--checkpoint-activations is read as --recompute-granularity full",
        "--checkpoint-num-layers 2 is read as --recompute-num-layers 2",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--learning-rate 1e-4",  # of another program
        "--epochs 3",  # for the user to decide
        "--batch-size",  # without its value
        "--lazy-loader yes",  # with a value that it does not take
        "--moe-deepep-unknown 3",  # of a whole group of flags
        "--optimizer adamw",  # a value of a current flag
        "-- --batch-size 4",  # of another command
    ],
)
def test_other_flags_stay_as_they_are(words: str) -> None:
    translated = translate_flags(words.split())
    assert (translated.words, translated.notes, translated.problems) == (words.split(), [], [])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--topk 2", "unknown flag --topk 2 (of DeepSpeed); use --moe-router-topk 2: tokens are dropped only if"),
        ("--mlp-type residual", "--mlp-type residual (of DeepSpeed) is not supported: residual experts are not built"),
        ("--load-hf model", "unknown flag --load-hf model (of megatron generate); use --load model: a run loads"),
    ],
)
def test_a_flag_of_another_command_is_rejected_with_its_counterpart(words: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words.split()], 1)
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_every_flag_of_the_table_can_be_translated() -> None:
    translated = 0
    for name, row in foreign_flags().items():
        values = [] if " " in name or row.arity == 0 else ["4"]
        result = translate_flags([*name.split(), *values])
        translated += bool(result.notes)
    assert translated > 60


def test_the_script_that_trained_gpt2_with_deepspeed_in_2020_is_read_as_it_stands(tmp_path: Path) -> None:
    for name in ("data.json", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    script = (
        "--model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 "
        "--seq-length 1024 --max-position-embeddings 1024 --train-iters 100000 --resume-dataloader "
        "--train-data data.json --lazy-loader --tokenizer-type GPT2BPETokenizer --split 949,50,1 "
        "--distributed-backend nccl --lr 0.00015 --no-load-optim --lr-decay-style cosine --weight-decay 1e-2 "
        "--clip-grad 1.0 --warmup 0.01 --checkpoint-activations --deepspeed-activation-checkpointing --fp16 "
        "--cache-dir cache --vocab-file vocab.json --merge-file merges.txt"
    )
    words = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in script.split()]
    parsed = resolve_arguments(words, 8)
    config = parsed.config
    assert (config.data_parallel_size, config.training.micro_batch_size, config.training.global_batch_size) == (
        4,
        8,
        32,
    )
    assert config.data.train_data == (str(tmp_path / "data.json"),)
    assert field_value(config.model, "recompute_granularity") == "full"
    assert sum(" is read as " in note for note in parsed.notes) == 4
    assert sum(" has no effect: " in note for note in parsed.notes) == 4
