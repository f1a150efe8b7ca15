"""Flags that users' scripts rely on mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.config.run_config import command_line_fields
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL, SHAPE, TRAINING

UNNAMED = [*SHAPE, *TRAINING, "--mock-data"]
"""A command line that names no tokenizer."""


def parse(text: str, base: list[str] = MINIMAL) -> ParsedArguments:
    return resolve_arguments([*base, *text.split()], 1)


def problems_of(text: str, base: list[str] = MINIMAL) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, base)
    return caught.value.problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer, whose content no check of flags reads."""
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("patch", ["", "--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 421"])
def test_the_tokenizer_is_that_of_load_where_none_is_named(folder: Path, patch: str) -> None:
    parsed = parse(f"--load {folder} {patch}", UNNAMED)
    tokenizer = parsed.config.tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", str(folder))
    assert (tokenizer.patch_tokenizer_type, tokenizer.extra_vocab_size) == (
        ("Qwen2Tokenizer", 421) if patch else (None, 0)
    )
    assert parsed.notes == (f"the tokenizer is that of --load {folder}: HuggingFaceTokenizer",)


def test_a_sentence_piece_model_beside_the_weights_is_taken_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    tokenizer = parse(f"--load {tmp_path} --patch-tokenizer-type LLamaTokenizer", UNNAMED).config.tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == ("Llama2Tokenizer", f"{tmp_path}/tokenizer.model")


def test_a_tokenizer_that_is_named_stays(folder: Path) -> None:
    given = "--tokenizer-type GPT2BPETokenizer"
    assert "--vocab-file is missing" in problems_of(f"--load {folder} {given}", UNNAMED)[0]
    parsed = parse(f"--load {folder} --patch-tokenizer-type LLama3Tokenizer")
    assert parsed.config.tokenizer.tokenizer_type == "NullTokenizer"
    assert parsed.notes == (
        "--patch-tokenizer-type LLama3Tokenizer has no effect: the tokenizer is NullTokenizer, as the other flags say",
    )


def test_a_patch_tokenizer_that_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    assert problems_of("--patch-tokenizer-type Qwen2Tokenizer", UNNAMED) == (
        "--patch-tokenizer-type Qwen2Tokenizer takes the tokenizer from --load DIR; add --load DIR",
    )
    (problem,) = problems_of(f"--patch-tokenizer-type Qwen2Tokenizer --load {tmp_path}", UNNAMED)
    assert f"--load {tmp_path} has no tokenizer.json; save the fast tokenizer there" in problem
    (problem,) = problems_of("--patch-tokenizer-type QwenTokenizer", UNNAMED)
    assert problem.startswith("--patch-tokenizer-type QwenTokenizer is not supported yet; possible: LLamaTokenizer, ")


@pytest.mark.parametrize("split", ["'99,1,0'", '"99,1,0"', " 99,1,0 "])
def test_a_quotation_inside_the_split_is_taken_off(split: str) -> None:
    assert resolve_arguments([*MINIMAL, "--split", split], 1).config.data.split == "99,1,0"


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--save-interval 5", "--save-interval 5 has no effect without --save DIR"),
        ("--no-save-optim", "--no-save-optim has no effect without --save DIR"),
        ("--no-save-rng", "--no-save-rng has no effect without --save DIR"),
        (
            "--result-rejected-tracker-filename F --rerun-mode disabled",
            "--result-rejected-tracker-filename F has no effect with --rerun-mode disabled",
        ),
        ("--save checkpoints --keep-every 5", "--keep-every 5 has no effect without --keep-last N"),
        (
            "--num-query-groups 2",
            "--num-query-groups 2 has no effect without --group-query-attention: "
            "each of the 6 heads has its own key and value",
        ),
        (
            "--trust-remote-code",
            "--trust-remote-code has no effect: code that comes with a tokenizer or a model is never run",
        ),
        ("--DDP-impl torch", "--DDP-impl torch has no effect: there is one implementation of data parallelism"),
        (
            "--transformer-type megatron",
            "--transformer-type megatron has no effect: there is one implementation of each model",
        ),
    ],
)
def test_what_changes_nothing_is_said_in_one_line(flags: str, note: str) -> None:
    parsed = parse(flags)
    assert parsed.notes == (note,)
    assert parsed.config.model == parse("").config.model


def test_fields_are_idle_by_fields_that_flags_set() -> None:
    fields = {spec.name: spec for _, spec in command_line_fields()}
    conditions = [spec.options.idle for spec in fields.values() if spec.options.idle is not None]
    assert len(conditions) > 30
    for condition in conditions:
        for name in condition.names:
            assert condition.value is None or condition.value in (fields[name].options.choices or (condition.value,))


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        ("--loss-scale 4", ("--loss-scale 4.0 has no effect without --fp16",)),
        ("--fp16 --loss-scale 4", ()),
        (
            "--fp16 --loss-scale 4 --hysteresis 3",
            ("--hysteresis 3 has no effect with --loss-scale, which is constant",),
        ),
        ("--lr-wsd-decay-iters 2", ("--lr-wsd-decay-iters 2 has no effect without --lr-decay-style WSD",)),
        ("--cp-comm-type a2a", ("--cp-comm-type a2a has no effect with --context-parallel-size 1",)),
        (
            "--log-memory-to-tensorboard",
            (
                "--log-memory-to-tensorboard has no effect without --tensorboard-dir DIR, --wandb-project NAME or "
                "--mlflow-experiment NAME",
            ),
        ),
        ("--log-memory-to-tensorboard --wandb-project P", ()),
        (
            "--exit-signal-handler",
            ("--exit-signal-handler has no effect with --exit-signal SIGTERM: a checkpoint is always saved on it",),
        ),
        ("--exit-signal-handler --exit-signal SIGINT", ()),
    ],
)
def test_a_flag_without_effect_beside_others_is_said_in_one_line(flags: str, notes: tuple[str, ...]) -> None:
    assert parse(flags).notes == notes


def test_a_trial_of_checkpoints_that_are_not_saved_is_refused() -> None:
    assert problems_of("--known-to-train-after 5") == (
        "--known-to-train-after 5 has no effect without --save DIR; add it",
    )
    assert parse("--save checkpoints --known-to-train-after 5").notes == ()


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        ("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
        ("--load x --use-checkpoint-opt_param-scheduler", "--load x --use-checkpoint-opt-param-scheduler"),
        ("--use-llama2-rotary-position-embeddings", "--use-rotary-position-embeddings"),
        ("--intermediate-size 100", "--ffn-hidden-size 100"),
        ("--rotary-scaling-factor 1 --rotary-scale-factor 1.0 --moe-aux-loss-coeff 0", ""),
        ("--attention-head-type multihead", ""),
        ("--padded-vocab-size 128 --attention-head-type multihead", "--padded-vocab-size 128"),
    ],
)
def test_other_spellings_are_the_same_run(typed: str, same: str) -> None:
    assert parse(typed).config == parse(same).config
    assert parse(typed).notes == parse(same).notes


def test_multiquery_attention_shares_one_key_and_value() -> None:
    model = parse("--attention-head-type multiquery").config.model
    assert (model.num_query_groups, model.kv_projection_size) == (1, 8)
    assert parse("--attention-head-type multiquery --num-query-groups 3").config.model.num_query_groups == 3


def test_a_batch_size_schedule_counts_tokens() -> None:
    words = ["--step-batch-size-schedule", "0:4 2K:8, .01M:16", "--train-iters", "100"]
    config = resolve_arguments([*MINIMAL, *words], 2).config
    sizes = config.training.batch_sizes  # sequences of 40 tokens: from samples 50 and 250 on
    assert [sizes.global_batch_size_at(samples) for samples in (0, 49, 50, 249, 250, 10**6)] == [4, 4, 8, 8, 16, 16]
    assert config.training.global_batch_size == 16
    assert config.train_samples == sizes.samples_of_iterations(100) == 13 * 4 + 25 * 8 + 62 * 16


@pytest.mark.parametrize(
    ("schedule", "more", "problem"),
    [
        ("0:4 many:8", "", "cannot be read; give TOKENS:SIZE pairs, such as '0:16 2.4B:320'"),
        ("0:4 1" + "0" * 400 + ":8", "", "cannot be read; give TOKENS:SIZE pairs, such as '0:16 2.4B:320'"),
        (
            "1K:4 2K:8",
            "",
            "steps must begin at 0 tokens and rise by a sequence or more; they begin at samples [25, 50]",
        ),
        ("0:4 20:8", "", "they begin at samples [0, 0]"),
        ("0:0 2K:8", "", "a batch size of 0; give sizes above 0"),
        (
            "0:4 2K:7",
            "",
            "7 is not divisible by --micro-batch-size 2 x data-parallel size 1 = 2; nearest size that works: 8",
        ),
        ("0:4 2K:8", "--global-batch-size 4", "give 8 or leave it out"),
        ("0:4 2K:8", "--rampup-batch-size 2 2 8", "exclude each other; keep one"),
    ],
)
def test_a_wrong_batch_size_schedule_is_refused_with_what_works(schedule: str, more: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, "--step-batch-size-schedule", schedule, *more.split()], 1)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_a_run_begins_with_pretrained_weights_until_it_has_its_own(tmp_path: Path) -> None:
    pretrained, own = tmp_path / "pretrained", tmp_path / "own"
    for path in (pretrained, own):
        path.mkdir()
    flags = f"--pretrained-checkpoint {pretrained} --load {own}"
    assert problems_of(flags) == (f"--pretrained-checkpoint {pretrained} holds no checkpoint; give a folder that does",)
    (pretrained / "latest_checkpointed_iteration.txt").write_text("release")
    for words in (flags, f"--pretrained-checkpoint {pretrained}"):
        parsed = parse(words)
        assert (parsed.config.checkpoint.load, parsed.config.checkpoint.finetune) == (str(pretrained), True)
        assert parsed.notes == (
            f"--pretrained-checkpoint {pretrained}: the run begins with its weights, at iteration 0",
        )
    (own / "latest_checkpointed_iteration.txt").write_text("5")
    parsed = parse(flags)
    assert (parsed.config.checkpoint.load, parsed.config.checkpoint.finetune) == (str(own), False)
    assert parsed.notes == (f"--pretrained-checkpoint {pretrained} is not read: --load {own} holds a checkpoint",)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--transformer-impl inference_optimized", "possible: transformer_engine, local"),
        ("--transformer-type huggingface", "possible: megatron"),
        ("--dataset LLama-Pretrain-Raw", "possible: MMAP, LLama-Pretrain-Idxmap"),
        ("--dataset LLama-SFT-Raw", "is of conversations; add --train-mode finetune or --sft"),
        ("--data-impl raw", "possible: mmap, lazy, cached, infer"),
        ("--mid-level-dataset-surplus 0.1", "possible: 0.005"),
        ("--dist-ckpt-format zarr", "possible: torch_dist"),
        ("--cross-entropy-fusion-impl linear", "possible: native, te"),
        ("--DDP-impl FSDP", "possible: local, torch"),
        ("--rotary-scale-factor 4", "use --rotary-seq-len-interpolation-factor"),
        ("--rotary-scaling-factor 40", "has no effect without --rope-type yarn or --multi-latent-attention; add one"),
        ("--fp16-lm-cross-entropy", "leave it out: the loss is computed in float32"),
        ("--accumulate-allreduce-grads-in-fp32 --bf16 --grad-reduce-in-bf16", "exclude each other; keep one"),
    ],
)
def test_what_would_change_the_computation_is_refused_with_what_works(flags: str, problem: str) -> None:
    (found,) = problems_of(flags)
    assert found.startswith(flags.split()[0])
    assert problem in found


def test_packing_without_a_mask_says_that_attention_is_not_cut() -> None:
    no_mask = "--no-create-attention-mask-in-dataloader"
    assert parse(f"{no_mask} --reset-position-ids").notes[1:] == (
        "--reset-position-ids begins positions anew at each document, but attention goes across documents, as in "
        "Megatron-LM; add --reset-attention-mask to keep them apart, as Pai-Megatron-Patch does",
    )
    both = parse(f"{no_mask} --reset-position-ids --reset-attention-mask")
    assert both.notes[1:] == (
        f"--reset-attention-mask keeps documents apart; in Megatron-LM it would not, with {no_mask}",
    )
    assert both.config.data.reset_attention_mask
    assert len(parse(no_mask).notes) == 1
    patched = parse(f"{no_mask} --reset-position-ids --patch-tokenizer-type Qwen2Tokenizer")
    assert patched.config.data.reset_attention_mask
    assert patched.notes[-1] == (
        "--reset-position-ids keeps documents apart in attention too, as Pai-Megatron-Patch does with "
        "--no-create-attention-mask-in-dataloader: --reset-attention-mask is added"
    )
    assert not parse("--reset-position-ids --patch-tokenizer-type Qwen2Tokenizer").config.data.reset_attention_mask
    assert parse("--reset-position-ids").notes == ()


def test_a_retain_interval_keeps_the_newest_checkpoint_and_multiples() -> None:
    kept = parse("--save x --save-retain-interval 40").config.checkpoint
    same = parse("--save x --keep-last 1 --keep-every 40").config.checkpoint
    assert (kept.num_newest_kept, kept.kept_multiple) == (same.num_newest_kept, same.kept_multiple) == (1, 40)
    assert parse("--save x").config.checkpoint.num_newest_kept is None
    (problem,) = problems_of("--save x --save-retain-interval 40 --keep-last 3")
    assert "--save-retain-interval" in problem
    assert problem.endswith("exclude each other; keep one")
