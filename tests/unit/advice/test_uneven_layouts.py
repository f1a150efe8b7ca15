"""Uneven splits and zero-bubble schedules are searched beside the others, and their flags parse to what was planned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli.plan import main
from megatron.cli.planner_arguments import read_planned_run
from megatron.planner.choice import Choice
from megatron.planner.plan import Plan
from megatron.planner.search import balanced_splits, output_layers

MODEL = (
    *("--num-layers", "10", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256"),
    *("--global-batch-size", "12", "--lr", "1e-4", "--train-iters", "9", "--mock-data"),
)
CHOICE = Choice(
    tp=1,
    pp=4,
    cp=1,
    chunks=1,
    counts_ends=False,
    micro_batch_size=1,
    recompute="none",
    sharding="no_shard",
    precision="bf16",
)


@pytest.mark.parametrize(
    ("split", "chunks", "flags", "told"),
    [
        ((3, 3, 3, 1), 1, ("--decoder-last-pipeline-num-layers", "1"), "3x3 1"),
        ((1, 3, 3, 3), 1, ("--decoder-first-pipeline-num-layers", "1"), "1 3x3"),
        ((2, 3, 3, 2), 1, ("--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "2"), ""),
        ((2, 3, 4, 1), 1, ("--pipeline-model-parallel-layout", "Et*2|t*3|t*4|t*1L"), "2 3 4 1"),
        ((1, 1, 1, 1, 2, 2, 1, 1), 2, ("--pipeline-model-parallel-layout", "Et*1|t*1|t*1|t*1|t*2|t*2|t*1|t*1L"), ""),
    ],
)
def test_flags_of_a_split_parse_to_its_stages(
    split: tuple[int, ...], chunks: int, flags: Sequence[str], told: str
) -> None:
    choice = dataclasses.replace(CHOICE, split=split, chunks=chunks)
    words = choice.words((*MODEL, "--bf16"))
    assert " ".join(flags) in " ".join(words)
    assert told in choice.describe_split()
    parsed = Plan.of(read_planned_run(words, 4).config)
    applied = Plan.of(choice.apply(read_planned_run((*MODEL, "--micro-batch-size", "1", "--bf16"), 4).config))
    assert parsed.stage_layout == applied.stage_layout
    assert [len(stage.layer_numbers) for stage in parsed.stage_layout.stages] == list(split)


def test_the_last_stage_has_fewer_layers_where_its_output_layer_is_large() -> None:
    model = read_planned_run((*MODEL, "--micro-batch-size", "1"), 1).config.model
    assert 4 < output_layers(model) < 5
    one, *two = balanced_splits(model, 4, 0)
    # The slowest rank has three layers, not 2.5 and the output layer.
    assert one == (3, 3, 3, 1)
    assert two == []
    assert list(balanced_splits(dataclasses.replace(model, num_layers=1), 4, 0)) == []
    small = dataclasses.replace(model, num_layers=12, vocab_size=100)
    assert list(balanced_splits(small, 4, 3)) == []


def test_uneven_and_zero_bubble_layouts_are_ranked_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*MODEL, "--gpus", "4", "--precision", "bf16", "--json", str(tmp_path / "all.json"), "--top", "100")
    # With dropout, attention around a ring runs in blocks, of which each micro-batch size has a trace of its own.
    assert main([*words, "--attention-dropout", "0", "--hidden-dropout", "0"]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "schedule" in head
    assert head.endswith("layers")
    ranked = json.loads((tmp_path / "all.json").read_text())["ranked"]
    assert len(rows) == len(ranked)
    kinds = {(each["pp"], each["pipeline_schedule"], bool(each["split"])) for each in ranked}
    assert {(4, "1f1b", True), (4, "zero-bubble", True), (2, "1f1b", False), (2, "interleaved", False)} <= kinds
    row = next(row for row, each in zip(rows, ranked) if each["split"] and each["schedule"] == "zero-bubble")
    assert "zero-bubble" in row
    # With as much before them, a schedule that fills its bubble is faster.
    uneven = [each for each in ranked if each["pp"] == 4 and each["split"] and each["micro_batch_size"] == 1]
    fastest = min(uneven, key=lambda each: each["ms_per_step"])
    assert fastest["pipeline_schedule"] == "zero-bubble"


def test_megatron_is_not_offered_a_zero_bubble_schedule_and_searched_flags_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*MODEL, "--gpus", "4", "--precision", "bf16", "--implementation", "megatron-te", "--top", "500")
    assert main([*words, "--pipeline-schedule", "1f1b", "--bf16"]) == 0
    printed = capsys.readouterr().out
    assert "zero-bubble" not in printed
    assert "\nsearched, and not taken as given: --pipeline-schedule, --bf16\n" in printed
