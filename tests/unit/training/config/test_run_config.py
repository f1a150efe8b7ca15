"""Tests of the values that follow from several parts of a run's configuration."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.resolution import resolve
from megatron.config.run_config import RunConfig, read_data_list, read_per_split_lists
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL


def config_of(text: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments([*MINIMAL, *text.split()], world_size).config


def test_batch_and_positions_have_defaults_from_elsewhere() -> None:
    config = config_of("", world_size=3)
    assert config.data_parallel_size == 3
    assert config.training.global_batch_size == 6
    assert config.model.max_position_embeddings == 40
    assert config.data.split == "969, 30, 1"


def test_warmup_as_a_share_of_the_decay_is_not_rounded() -> None:
    config = config_of("--lr-decay-iters 9 --lr-warmup-fraction 0.05 --global-batch-size 6")
    assert config.schedule_lengths.lr_warmup_steps == pytest.approx(2.7)


def test_precision_reaches_the_optimizer() -> None:
    config = config_of("--bf16")
    assert config.optimizer.params_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "world_size", "shards", "shards_gradients"),
    [
        ("--use-distributed-optimizer", 2, True, False),
        ("--data-parallel-sharding-strategy optim", 2, True, False),
        ("--data-parallel-sharding-strategy optim_grads --overlap-param-gather", 2, True, True),
        ("--data-parallel-sharding-strategy optim_grads_params", 2, True, True),
        ("--overlap-grad-reduce", 2, False, False),
    ],
)
def test_sharding_strategies_and_the_distributed_optimizer_agree(
    text: str, world_size: int, shards: bool, shards_gradients: bool
) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], world_size)
    assert resolved.notes == ()
    config = resolved.config
    assert (config.ddp.shards_optimizer, config.ddp.shards_gradients) == (shards, shards_gradients)
    assert config.ddp.use_distributed_optimizer == shards
    assert config.ddp.overlap_param_gather == ("overlap-param-gather" in text)


@pytest.mark.parametrize(
    "text", ["--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads --overlap-param-gather"]
)
def test_sharding_over_one_rank_says_that_it_has_no_effect(text: str) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], 1)
    (note,) = resolved.notes
    assert note.endswith("have no effect with one data-parallel rank: turned off")
    assert not resolved.config.ddp.shards_optimizer
    assert not resolved.config.ddp.overlap_param_gather
    resolved = resolve_arguments([*MINIMAL, *text.split(), "--tensor-model-parallel-size", "2"], 2)
    assert len(resolved.notes) == 1


def test_gathering_while_computing_needs_the_distributed_optimizer() -> None:
    resolved = resolve_arguments([*MINIMAL, "--overlap-param-gather"], 2)
    assert resolved.notes == ("--overlap-param-gather has no effect without --use-distributed-optimizer: turned off",)
    assert not resolved.config.ddp.overlap_param_gather


def test_weight_decay_is_constant_unless_said_otherwise() -> None:
    config = config_of("--weight-decay 0.3")
    assert (config.scheduler.start_weight_decay, config.scheduler.end_weight_decay) == (0.3, 0.3)


def test_schedule_lengths_in_iterations() -> None:
    lengths = config_of("--global-batch-size 8 --lr-warmup-iters 3").schedule_lengths
    assert (lengths.lr_warmup_steps, lengths.lr_decay_steps, lengths.weight_decay_steps) == (24, 80, 80)
    assert lengths.wsd_decay_steps is None
    other = config_of("--global-batch-size 8 --lr-decay-iters 320 --lr-warmup-fraction .05").schedule_lengths
    assert (other.lr_warmup_steps, other.lr_decay_steps, other.weight_decay_steps) == (128, 2560, 80)


def test_schedule_lengths_in_samples() -> None:
    config = config_of(
        "--train-iters 0 --train-samples 1000 --global-batch-size 8 --lr-warmup-samples 50 "
        "--lr-decay-style WSD --lr-wsd-decay-samples 120"
    )
    lengths = config.schedule_lengths
    assert (lengths.lr_warmup_steps, lengths.lr_decay_steps, lengths.wsd_decay_steps) == (50, 1000, 120)
    assert config.train_iters == 125
    assert config.train_samples == 1000


def test_ramp_up_counts_in_the_length_of_a_run() -> None:
    ramp = "--global-batch-size 16 --rampup-batch-size 4 4 60"
    assert config_of(f"{ramp} --train-iters 11").train_samples == 84
    assert config_of(f"{ramp} --train-iters 0 --train-samples 84").train_iters == 11


def test_resolving_twice_changes_nothing() -> None:
    config = config_of("--bf16 --sequence-parallel")
    again = resolve(config)
    assert again.config == config
    assert again.notes == ()


def test_metrics_file_stands_beside_the_checkpoints() -> None:
    assert config_of("").metrics_jsonl is None
    assert config_of("--save runs/a").metrics_jsonl == "runs/a/metrics.jsonl"
    assert config_of("--save runs/a --metrics-jsonl m.jsonl").metrics_jsonl == "m.jsonl"


def test_json_round_trip() -> None:
    config = config_of(
        "--swiglu --group-query-attention --num-query-groups 2 --rampup-batch-size 2 2 8 --global-batch-size 4 --bf16",
        world_size=1,
    )
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_of_an_earlier_release_reads_back_without_its_retired_field() -> None:
    values = config_of("").to_dict()
    values["optimizer"]["use_distributed_optimizer"] = True
    assert RunConfig.from_dict(values) == config_of("")
    values["optimizer"]["use_distributed_optimiser"] = True
    with pytest.raises(ConfigurationError, match="unknown field use_distributed_optimiser"):
        RunConfig.from_dict(values)


def test_list_files(tmp_path: Path) -> None:
    words = tmp_path / "list"
    words.write_text("0.5 a\n0.5 b\n")
    assert read_data_list(str(words), "--data-args-path") == ("0.5", "a", "0.5", "b")
    words.write_text(" \n")
    with pytest.raises(ConfigurationError, match="empty"):
        read_data_list(str(words), "--data-args-path")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_data_list(str(tmp_path / "none"), "--data-args-path")
    lists = tmp_path / "lists.json"
    lists.write_text('{"train": ["0.5", "a", 0.5, "b"], "valid": ["c"], "test": null}')
    assert read_per_split_lists(str(lists), "--x") == {
        "train": ("0.5", "a", "0.5", "b"),
        "valid": ("c",),
        "test": (),
    }
    for text in ("[1]", '{"training": []}', '{"train": "a"}', "{"):
        lists.write_text(text)
        with pytest.raises(ConfigurationError):
            read_per_split_lists(str(lists), "--x")


def test_a_flag_beside_what_it_needs_is_not_said_to_have_no_effect() -> None:
    """The values and companions are those of the end-to-end tests, which show that each flag has an effect."""
    folder = Path(__file__).parents[3] / "e2e" / "flags"
    with open(folder / "flag_values.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    checked = 0
    for row in rows:
        words = [row["flag"], *row["value"].split(), *row["companions"].split()]
        if row["without"] or not row["companions"] or any("{" in word for word in words):  # "{": a file
            continue
        try:
            resolved = resolve_arguments([*MINIMAL, *words], int(row["processes"]))
        except ConfigurationError:  # made for the sizes of the end-to-end tests
            continue
        assert not [note for note in resolved.notes if note.startswith(f"{row['flag']} ") and "no effect" in note]
        checked += 1
    assert checked > 100
