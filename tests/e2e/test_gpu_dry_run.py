"""tools/gpu_dry_run.py as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.cli.simulate import main, ranks_to_run
from megatron.core.parallel_config import ParallelSizes
from megatron.planner.simulation.fake_cuda import find_compiler

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "9"),
    *("--lr", "1e-4", "--bf16"),
)
NOT_THERE = ("--data-path", "/nowhere/text_document", "--vocab-file", "/nowhere/v.json", "--merge-file", "/nowhere/m")


@pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")
def test_a_stage_of_a_pipeline_is_reported_in_text_json_and_a_picture(tmp_path: Path) -> None:
    layout = ("--world-size", "4", "--rank", "3", "--pipeline-model-parallel-size", "2", "--gpu", "a100-80gb")
    outputs = ("--json", str(tmp_path / "run.json"), "--memory-plot", str(tmp_path / "run.svg"))
    command = [sys.executable, "tools/gpu_dry_run.py", *FLAGS, *NOT_THERE, *layout, *outputs]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(estimate of a dry run, not a measurement)" in done.stdout
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["gpu"], report["rank"], report["pipeline_rank"], report["layers"]) == ("a100-80gb", 3, 1, 2)
    assert report["assumptions"]
    assert report["sources"]
    assert report["kernels"] >= report["operations"] > 100
    assert report["bytes"] > 0
    assert report["flops"] > 0
    assert {"phase", "where", "what"} == set(report["waits"][0])
    assert 0 < report["peak_bytes"] == sum(report["peak_holders"].values())
    assert 0 < report["mfu"] < 1
    assert (
        report["rank_ms"]
        > report["kernel_ms"]
        == pytest.approx(sum(phase["ms"] for phase in report["by_phase"].values()))
    )
    # The rank that is asked for is of the last stage, which computes the logits too.
    assert [(each["rank"], each["pipeline_rank"]) for each in report["stages"]] == [(3, 1), (0, 0)]
    assert report["predicted_ms"] == max(each["ms"] for each in report["stages"])
    assert f"the time of rank {report['slowest_rank']}, the slowest of stage 1 (rank 3) " in done.stdout
    # Two micro-batches: their gradients go to the stage before; the optimizer's and the report's sums follow.
    sent = [(each["operation"], each["axes"], each["bytes"]) for each in report["collectives"]]
    assert sent.count(("send", ["pp"], 2 * 32 * 64)) == 2
    assert ("all_reduce", ["pp", "dp", "cp", "tp"], 4 * 8) in sent
    picture = ElementTree.parse(tmp_path / "run.svg").getroot()
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polygon"))) == len(report["peak_holders"])


@pytest.mark.parametrize(
    ("sizes", "asked", "ranks"),
    [
        ({"dp": 8}, None, [0]),
        ({"dp": 8}, 2, [2]),
        ({"pp": 2, "tp": 2, "dp": 2}, None, [0, 4]),
        ({"pp": 2, "tp": 2, "dp": 2}, 3, [3, 4]),
        ({"pp": 2, "tp": 2, "dp": 2}, 6, [6, 0]),
        ({"pp": 4, "dp": 2}, 3, [3, 0, 6]),
    ],
)
def test_a_rank_of_the_first_and_one_of_the_last_stage_are_run(
    sizes: dict[str, int], asked: int | None, ranks: list[int]
) -> None:
    assert ranks_to_run(ParallelSizes(**sizes), asked) == ranks


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (("--rank", "2"), "error: --rank 2 is not in 0..0; change it or --world-size"),
        (("--world-size", "0"), "error: --world-size 0 is not between 1 and 131072; "),
        (("--json", "/nowhere/a.json"), "error: --json /nowhere/a.json cannot be written: its folder does not exist; "),
        (("--json", "/"), "error: --json / cannot be written: it is a folder; "),
        (("--json", "a" * 300), f"error: --json {'a' * 300} cannot be written: File name too long; "),
        (("--gpu", "v100"), "error: --gpu v100: there are no built-in figures for this GPU; possible values: "),
        (("--memory-plot", "a.png"), "error: --memory-plot a.png: the plot is an SVG file; use a name that ends in"),
        (("--hidden-sise", "3"), "error: unknown flag --hidden-sise"),
        (
            ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere"),
            "error: the vocabulary size is not known",
        ),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], answer: str
) -> None:
    assert main([*FLAGS, *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(answer)
