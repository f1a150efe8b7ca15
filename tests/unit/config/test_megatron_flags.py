"""Flags that users' and published scripts rely on mean what they say, or are refused by name.

`published_flags.json` has one record a script: ``origin`` (repository and path) and each flag with its value, which is
null where it comes from the environment or the command line. All branches of a script are in one record.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.config.run_config import command_line_fields
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.training.data_plan import dataset_config
from tests.unit.config.command_lines import MINIMAL, SHAPE, TRAINING

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
    assert parsed.notes == (f"using the tokenizer of --load {folder}: HuggingFaceTokenizer",)


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
        "--patch-tokenizer-type LLama3Tokenizer has no effect: the other flags select the tokenizer NullTokenizer",
    )


def test_a_patch_tokenizer_that_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    assert problems_of("--patch-tokenizer-type Qwen2Tokenizer", UNNAMED) == (
        "--patch-tokenizer-type Qwen2Tokenizer uses the tokenizer of --load DIR; add --load DIR",
    )
    (problem,) = problems_of(f"--patch-tokenizer-type Qwen2Tokenizer --load {tmp_path}", UNNAMED)
    assert f"--load {tmp_path} has no tokenizer.json; save the fast tokenizer there" in problem
    (problem,) = problems_of("--patch-tokenizer-type JiebaBPETokenizer", UNNAMED)
    assert problem.startswith("--patch-tokenizer-type JiebaBPETokenizer is not supported yet; possible: LLamaTokenizer")


def test_the_byte_pair_tokenizer_of_a_patch_script_is_not_that_of_its_load_folder(folder: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    given = f"--load {folder} --patch-tokenizer-type GPT2BPETokenizer"
    problems = problems_of(given, UNNAMED)
    assert [problem.split()[0] for problem in problems] == ["--vocab-file", "--merge-file"]
    parsed = parse(f"{given} --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt", UNNAMED)
    assert (parsed.config.tokenizer.tokenizer_type, parsed.notes) == ("GPT2BPETokenizer", ())


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
            "--trust-remote-code has no effect: custom code of tokenizers and models is never run",
        ),
        ("--DDP-impl torch", "--DDP-impl torch has no effect: there is only one implementation of data parallelism"),
        (
            "--transformer-type megatron",
            "--transformer-type megatron has no effect: there is only one implementation of each model",
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
                "--log-memory-to-tensorboard has no effect without --tensorboard-dir DIR, --wandb-project NAME, "
                "--mlflow-experiment NAME or --loggers NAME",
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
    assert problems_of("--checkpoint-validation-steps 5") == (
        "--checkpoint-validation-steps 5 has no effect without --save DIR; add it",
    )
    assert parse("--save checkpoints --checkpoint-validation-steps 5").notes == ()


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
        ("0:4 many:8", "", "cannot be parsed; use TOKENS:SIZE pairs, such as '0:16 2.4B:320'"),
        ("0:4 1" + "0" * 400 + ":8", "", "cannot be parsed; use TOKENS:SIZE pairs, such as '0:16 2.4B:320'"),
        (
            "1K:4 2K:8",
            "",
            "the first step must start at 0 tokens, and each next step must start at least one sequence later; the "
            "steps start at samples [25, 50]",
        ),
        ("0:4 20:8", "", "the steps start at samples [0, 0]"),
        ("0:0 2K:8", "", "a batch size is 0; use sizes above 0"),
        (
            "0:4 2K:7",
            "",
            "7 is not divisible by --micro-batch-size 2 x data-parallel size 1 = 2; nearest size that works: 8",
        ),
        ("0:4 2K:8", "--global-batch-size 4", "use 8 or omit it"),
        ("0:4 2K:8", "--rampup-batch-size 2 2 8", "exclude each other; omit one of them"),
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
    assert problems_of(flags) == (
        f"--pretrained-checkpoint {pretrained} contains no checkpoint; pass a folder that contains one",
    )
    (pretrained / "latest_checkpointed_iteration.txt").write_text("release")
    for words in (flags, f"--pretrained-checkpoint {pretrained}"):
        parsed = parse(words)
        assert (parsed.config.checkpoint.load, parsed.config.checkpoint.finetune) == (str(pretrained), True)
        assert parsed.notes == (
            f"--pretrained-checkpoint {pretrained}: the run starts from its weights, at iteration 0",
        )
    (own / "latest_checkpointed_iteration.txt").write_text("5")
    parsed = parse(flags)
    assert (parsed.config.checkpoint.load, parsed.config.checkpoint.finetune) == (str(own), False)
    assert parsed.notes == (
        f"--pretrained-checkpoint {pretrained} is not read, because --load {own} contains a checkpoint",
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--transformer-impl inference_optimized", "possible: transformer_engine, local"),
        ("--transformer-type huggingface", "possible: megatron"),
        ("--dataset LLama-Pretrain-Raw", "possible: MMAP, LLama-Pretrain-Idxmap"),
        ("--dataset LLama-SFT-Raw", "reads conversations; add --train-mode finetune or --sft"),
        ("--data-impl raw", "possible: mmap, lazy, cached, infer"),
        ("--mid-level-dataset-surplus 0.1", "possible: 0.005"),
        ("--dist-ckpt-format zarr", "possible: torch_dist"),
        ("--cross-entropy-fusion-impl liger", "possible values are native, te, linear"),
        (
            "--cross-entropy-fusion-impl linear --final-logit-softcapping 30",
            "--final-logit-softcapping 30 changes the logits, which are never all in memory; omit one of them",
        ),
        ("--DDP-impl FSDP", "possible: local, torch"),
        ("--rotary-scale-factor 4", "use --rotary-seq-len-interpolation-factor"),
        (
            "--rotary-scaling-factor 40",
            "has no effect without --rope-type yarn or --multi-latent-attention; add one of them",
        ),
        ("--fp16-lm-cross-entropy", "omit it: the loss is computed in float32"),
        ("--accumulate-allreduce-grads-in-fp32 --bf16 --grad-reduce-in-bf16", "exclude each other; omit one of them"),
    ],
)
def test_what_would_change_the_computation_is_refused_with_what_works(flags: str, problem: str) -> None:
    (found,) = problems_of(flags)
    assert found.startswith(flags.split()[0])
    assert problem in found


def test_packing_without_a_mask_says_that_attention_is_not_cut() -> None:
    no_mask = "--no-create-attention-mask-in-dataloader"
    assert parse(f"{no_mask} --reset-position-ids").notes[1:] == (
        "--reset-position-ids restarts positions at each document, but attention crosses documents, as in "
        "Megatron-LM; add --reset-attention-mask to limit attention to each document, as Pai-Megatron-Patch does",
    )
    both = parse(f"{no_mask} --reset-position-ids --reset-attention-mask")
    assert both.notes[1:] == (
        f"--reset-attention-mask limits attention to each document here; Megatron-LM would ignore it with {no_mask}",
    )
    assert both.config.data.reset_attention_mask
    assert len(parse(no_mask).notes) == 1
    patched = parse(f"{no_mask} --reset-position-ids --patch-tokenizer-type Qwen2Tokenizer")
    assert patched.config.data.reset_attention_mask
    assert patched.notes[-1] == (
        "--reset-position-ids also limits attention to each document, as Pai-Megatron-Patch does with "
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
    assert problem.endswith("exclude each other; omit one of them")


SCRIPTS = json.loads(Path(__file__).with_name("published_flags.json").read_text(encoding="utf-8"))
OF_OTHER_PROGRAMS = {
    *("--sample", "--cpuctxsw", "--trace", "--capture-range", "--capture-range-end", "--cuda-graph-trace"),  # nsys
    *("--cuda-memory-usage", "--mpi", "--container-image", "--container-mounts", "--container-workdir"),  # nsys, srun
    "--do-",  # cut off: the rest of the name comes from a variable
    "--keep-last",  # a switch of one script's own program; here it takes a number
}
QUOTED = ("--step-batch-size-schedule", "--pipeline-model-parallel-layout")


def command_line(script: dict[str, Any], null: str, without: Collection[str] = ()) -> list[str]:
    """Return the words of a record, with ``null`` for the values that it does not know, without comments."""
    words = []
    for name, *value in script["flags"]:
        if name not in OF_OTHER_PROGRAMS and name not in without:
            texts = [(null if text is None else text).partition("#")[0].strip() for text in value]
            several = [] if name in QUOTED else [word for text in texts for word in text.split()]
            words += [name, *(several or [text for text in texts if text])]
    return words


def script_of(ending: str) -> dict[str, Any]:
    (script,) = (script for script in SCRIPTS if script["origin"].endswith(ending))
    return dict(script)


def problems_of_published(argv: list[str], world_size: int = 1) -> tuple[str, ...]:
    try:
        resolve_arguments(argv, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


def test_the_flags_are_those_of_54_scripts() -> None:
    assert len({script["origin"] for script in SCRIPTS}) == len(SCRIPTS) == 54
    assert all(script["origin"].startswith(("NVIDIA/Megatron-LM: ", "alibaba/Pai-")) for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["origin"] for script in SCRIPTS])
def test_each_flag_works_or_is_answered(script: dict[str, Any]) -> None:
    for problem in problems_of_published([*MINIMAL, *command_line(script, null="1")]):
        assert "see --help" not in problem
        assert "did you mean" not in problem
        assert "possible values are" not in problem
        assert "a value is missing" not in problem
        if problem.startswith("unknown "):
            assert "; use --" in problem or "; omit it: " in problem


def test_the_script_of_175_billion_parameters_is_accepted_as_it_stands(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    words = command_line(script_of("train_gpt3_175b_distributed.sh"), str(tmp_path), without=["--data-path"])
    config = resolve_arguments([*words, *files, "--mock-data"], 1024).config
    assert config.data_parallel_size == 8
    assert config.training.batch_sizes.global_batch_size_at(0) == 16
    assert config.training.batch_sizes.global_batch_size_at(2_400_000_000 // 2048) == 320


def nvidia_problems(name: str, folder: Path) -> tuple[str, ...]:
    (folder / "tokenizer.json").write_text("{}")
    words = command_line(script_of(name), str(folder), without=["--data-path", "--tokenizer-type"])
    return problems_of_published([*words, "--mock-data", "--tokenizer-type", "HuggingFaceTokenizer"], 128)


def test_the_script_of_llama3_in_fp8_is_accepted_as_it_stands(tmp_path: Path) -> None:
    assert nvidia_problems("train_llama3_8b_h100_fp8.sh", tmp_path) == ()


def test_the_script_of_mixtral_is_accepted_as_it_stands(tmp_path: Path) -> None:
    assert nvidia_problems("train_mixtral_8x7b_distributed.sh", tmp_path) == ()


FINE_TUNED_SHAPE = [word for word in MINIMAL if word != "--mock-data"]
PACKED = (
    "--sft packs conversations: --reset-position-ids and --reset-attention-mask are on; --no-sft-packing makes each "
    "conversation a sample"
)
PER_TOKEN = "--sft: all answer tokens have the same weight, as with --calculate-per-token-loss"


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with talk.jsonl, the packed conversations ``packed`` and the text ``text``."""
    monkeypatch.chdir(tmp_path)
    Path("talk.jsonl").write_text('{"prompt": "1 ", "completion": "2"}\n')
    for prefix in ("packed", "packed_loss_mask", "text"):
        with IndexedDatasetBuilder(prefix, np.uint8 if "mask" in prefix else np.uint16) as builder:
            builder.add_document([1, 1, 1])
            builder.finalize()


def parse_fine_tuning(flags: str) -> ParsedArguments:
    return resolve_arguments([*FINE_TUNED_SHAPE, *flags.split()], 1)


def data_of(parsed: ParsedArguments) -> GPTDatasetConfig:
    return dataset_config(parsed.config, NullTokenizer(99))


@pytest.mark.usefixtures("talk")
def test_conversations_are_packed_and_each_token_counts_alike() -> None:
    for flags in ("--sft", "--train-mode finetune", "--train-mode finetune --dataset LLama-SFT-Idxmap"):
        parsed = parse_fine_tuning(f"{flags} --train-data-path packed")
        assert parsed.notes == (PACKED, PER_TOKEN)
        data = data_of(parsed)
        assert data.conversations is not None
        assert (data.conversations.packs, data.conversations.longest) == (True, None)
        assert (data.reset_position_ids, data.reset_attention_mask) == (True, True)
        assert parsed.config.training.calculate_per_token_loss
    assert (
        data_of(parse_fine_tuning("--train-data-path text --train-mode pretrain --dataset MMAP")).conversations is None
    )
    averaged = parse_fine_tuning("--sft --train-data-path packed --ddp-average-in-collective")
    assert averaged.notes[2:] == (
        "--ddp-average-in-collective has no effect with --sft: sums are divided by a number of tokens",
    )
    assert not averaged.config.ddp.ddp_average_in_collective
    graphs = parse_fine_tuning(
        "--sft --no-sft-packing --train-data-path packed --cuda-graph-impl local --attention-dropout 0"
    )
    assert graphs.config.training.cuda_graph_impl == "local"


@pytest.mark.usefixtures("talk")
def test_one_conversation_a_sample() -> None:
    raw = "--train-data-path talk.jsonl --calculate-per-token-loss --train-mode finetune --dataset JSON-SFT"
    for flags in (f"{raw} --max-padding-length 3", "--sft --no-sft-packing --train-data-path talk.jsonl"):
        data = data_of(parse_fine_tuning(flags))
        assert data.conversations is not None
        assert not data.conversations.packs
        assert (data.reset_position_ids, data.reset_attention_mask) == (False, False)
    assert parse_fine_tuning(raw).notes == (
        "--dataset JSON-SFT: each conversation is a sample; --reset-position-ids packs them",
    )
    assert parse_fine_tuning(f"{raw} --reset-position-ids").notes == (PACKED,)
    assert parse_fine_tuning(f"{raw} --max-padding-length 999").notes[1:] == (
        "--max-padding-length 999 has no effect: --seq-length 40 truncates conversations first",
    )
    shorter = data_of(parse_fine_tuning(f"{raw} --max-padding-length 3")).conversations
    assert shorter is not None
    assert shorter.longest == 3


@pytest.mark.usefixtures("talk")
def test_which_template() -> None:
    template = {
        "": None,
        "--chat-template plain": "plain",
        "--sft-tokenizer-prompt-format identity": "identity",
        "--sft-tokenizer-prompt-format default": None,
    }
    for flags, chosen in template.items():
        data = data_of(parse_fine_tuning(f"--sft --train-data-path talk.jsonl {flags}"))
        assert data.conversations is not None
        assert data.conversations.chat_template == chosen
    assert parse_fine_tuning("--train-data-path text --chat-template plain --max-padding-length 8").notes == (
        "--chat-template plain has no effect without --sft",
        "--max-padding-length 8 has no effect without --sft",
    )


@pytest.mark.usefixtures("talk")
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--sft --train-data-path text", "--train-data-path text: text has no loss masks"),
        ("--sft --mock-data", "--sft needs conversations, but --mock-data has none; use --data-path instead"),
        ("--train-mode finetune --mock-data", "--train-mode finetune needs conversations, but --mock-data has none"),
        ("--fim-rate 0.1 --mock-data", "--fim-rate needs text, but --mock-data has none; use --data-path"),
        (
            "--sft --fim-rate 0.1 --data-path packed --split 1",
            "--sft and --fim-rate exclude each other; omit one of them",
        ),
        ("--fim-rate 1.5 --data-path text --split 1", "--fim-rate 1.5: a value from 0 to 1 is expected"),
        (
            "--sft --dataset LLama-SFT-Raw --train-data-path packed",
            "--train-data-path packed is not a file, which does not match --dataset LLama-SFT-Raw; use MMAP or",
        ),
        (
            "--sft --dataset MMAP --train-data-path talk.jsonl",
            "--train-data-path talk.jsonl is a file, which does not match --dataset MMAP; use LLama-SFT-Raw or",
        ),
        (
            "--sft --train-data-path packed --cuda-graph-impl local --attention-dropout 0",
            "--cuda-graph-impl local: --sft packs different conversations in each micro-batch; omit one of them",
        ),
        (
            "--sft --ddp-average-in-collective --calculate-per-token-loss --train-data-path packed",
            "--ddp-average-in-collective and --calculate-per-token-loss exclude each other; omit one of them",
        ),
        (
            "--sft --train-data-path packed --sft-tokenizer-prompt-format nemotron-nano-v2",
            "--sft-tokenizer-prompt-format nemotron-nano-v2 is not supported yet; possible: default, identity",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_fine_tuning(flags)
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.usefixtures("talk")
def test_the_tokens_of_fill_in_the_middle_are_looked_up() -> None:
    tokens = "--fim-prefix-token 5 --fim-middle-token 6 --fim-suffix-token 7 --fim-pad-token 8 --fim-split-sample 9"
    data = data_of(
        parse_fine_tuning(f"--train-data-path text --fim-data {tokens} --fim-fragment-rate 0.2 --fim-no-prefix 1")
    )
    fim = data.fill_in_the_middle
    assert fim is not None
    assert (fim.rate, fim.spm_rate, fim.fragment_rate, fim.kept_beginning) == (0.5, 0.5, 0.2, "1")
    ids = (fim.prefix_id, fim.middle_id, fim.suffix_id, fim.pad_id, fim.split_id, fim.document_end_id)
    assert ids == (5, 6, 7, 8, 9, 99)
    parsed = parse_fine_tuning("--train-data-path text --fim-rate 0.1 --fim-eod-token 3 --fim-middle-token 6")
    with pytest.raises(ConfigurationError) as caught:
        data_of(parsed)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--fim-prefix-token <fim_prefix>",
        "--fim-suffix-token <fim_suffix>",
    ]
