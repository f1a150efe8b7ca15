"""Flags that plan adds to its launch command because its own prediction is faster with them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from megatron.cli.plan import main
from megatron.cli.planner_arguments import read_planned_run
from megatron.config.config_sources import preset_words
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, NATIVE
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict, usable_bytes
from megatron.planner.recommendation import Recommendation, recommend

RUN = "--seq-length 1024 --global-batch-size 64 --train-iters 5 --lr 1e-4 --bf16 --mock-data"
GRAPHS = ("--cuda-graph-impl", "local")
REDUCE, GATHER = ("--overlap-grad-reduce",), ("--overlap-param-gather",)


def words_of(flags: str) -> list[str]:
    return [*preset_words("gpt2-345m"), *RUN.split(), *flags.split()]


def seconds(words: list[str], world_size: int) -> float:
    time = predict(Plan.of(read_planned_run(words, world_size).config), NATIVE, H100).time
    assert time is not None
    return time.total


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--micro-batch-size 1 --attention-dropout 0", 1, [GRAPHS]),
        # Graphs do not support dropout in fused attention.
        ("--micro-batch-size 1", 1, []),
        ("--micro-batch-size 1 --attention-dropout 0 --cuda-graph-impl none", 1, []),
        # The device is busy all the time.
        ("--micro-batch-size 8 --seq-length 8192 --max-position-embeddings 8192 --attention-dropout 0 "
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1, []),
        ("--micro-batch-size 4 --attention-dropout 0", 8, [REDUCE, GRAPHS]),
        ("--micro-batch-size 4 --use-distributed-optimizer", 8, [REDUCE, GATHER]),
        ("--micro-batch-size 4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 8, []),
    ],
)  # fmt: skip
def test_flags_that_shorten_the_predicted_step(flags: str, world_size: int, expected: list[tuple[str, ...]]) -> None:
    words = words_of(flags)
    assert seconds(words, world_size) > 0
    found = recommend(words, world_size, read_planned_run, H100, NATIVE)
    assert [each.flags for each in found] == expected
    for each in found:
        assert each.before == pytest.approx(seconds(words, world_size))
        words += each.flags
        assert each.after == pytest.approx(seconds(words, world_size))
        assert each.after < each.before


def test_other_programs_and_full_gpus_get_no_graphs() -> None:
    words = words_of("--micro-batch-size 1 --attention-dropout 0")
    assert recommend(words, 1, read_planned_run, H100, MEGATRON_TE) == ()
    prediction = predict(Plan.of(read_planned_run(words, 1).config), NATIVE, H100)
    assert prediction.used_bytes is not None
    activations = max(stage.activations for stage in prediction.stages)
    needed = prediction.used_bytes + activations + H100.memory_bytes - usable_bytes(H100)
    for memory, expected in ((needed, 1), (needed - 1, 0)):
        gpu = dataclasses.replace(H100, memory_bytes=memory)
        assert len(recommend(words, 1, read_planned_run, gpu, NATIVE)) == expected


def test_plan_prints_recommended_flags_in_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "--model-preset gpt2-345m --gpus 1 --precision bf16 --seq-length 256 --global-batch-size 1 --train-iters 5"
    assert main([*plan.split(), "--attention-dropout", "0", "--json", str(tmp_path / "plan.json")]) == 0
    *_, command, line = capsys.readouterr().out.splitlines()
    assert tuple(shlex.split(command)[-2:]) == GRAPHS
    written = json.loads((tmp_path / "plan.json").read_text())
    (recommended,) = written["recommended"]
    best = written["ranked"][0]["ms_per_step"]
    assert recommended == {"flags": list(GRAPHS), "ms_before": pytest.approx(best), "ms_after": recommended["ms_after"]}
    assert line == Recommendation(GRAPHS, best / 1e3, recommended["ms_after"] / 1e3).describe()
    assert line.startswith("--cuda-graph-impl local is recommended: ")
