"""Optimizer offload and narrow optimizer state in whole runs: the same figures, and checkpoints with and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training

FOUR = "--train-iters 4 --lr-decay-iters 20 --eval-interval 1000"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
STATIC = "--optimizer hybridadam --optimizer-offload-policy static --optimizer-offload-fraction 0.6"
AUTO = "--optimizer hybridadam --optimizer-offload-policy auto --overlap-cpu-optimizer-d2h-h2d"
LOSS, NORM = 3, 4
FULL = "--optimizer-cpu-offload --use-precision-aware-optimizer --no-pin-cpu-grads"


def run(folder: Path, nproc: int, *flags: str) -> tuple[list[tuple[object, ...]], str]:
    precision = [] if any("--fp16" in flag for flag in flags) else ["--bf16"]
    words = toy_args(folder, FOUR, *precision, *flags)
    done = fork_training([*words, "--metrics-jsonl", folder / "metrics.jsonl"], nproc).check()
    return exact_figures(done.iterations()), done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], tuple[list[tuple[object, ...]], str]]:
    """Return what runs a layout without offload, each once."""
    return functools.cache(lambda nproc, layout: run(tmp_path_factory.mktemp("plain"), nproc, layout))


@pytest.mark.parametrize(
    ("nproc", "layout", "flags", "share"),
    [
        pytest.param(1, "", FULL, "100%", marks=pytest.mark.long),
        (2, SHARDED, STATIC, "60%"),
        pytest.param(2, "--pipeline-model-parallel-size 2", AUTO, "100%", marks=pytest.mark.long),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", STATIC, "60%", marks=pytest.mark.long),
        pytest.param(
            *(4, f"--context-parallel-size 2 --tensor-model-parallel-size 2 {SHARDED} --fp16", STATIC, "60%"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["alone", "sharded", "pipeline", "tensor", "context"],
)
def test_offloaded_runs_log_the_same_figures(
    tmp_path: Path, plain, nproc: int, layout: str, flags: str, share: str
) -> None:
    expected, without = plain(nproc, layout)
    found, output = run(tmp_path / "offloaded", nproc, layout, flags)
    assert len(expected) == 4
    assert found == expected
    assert "optimizer offload" not in without
    assert output.count(f"optimizer offload: {share} of the main parameters") == 1


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(STATIC, "", marks=pytest.mark.long), ("", AUTO)], ids=["without", "with"]
)
def test_a_run_goes_on_with_and_without_offload(tmp_path: Path, plain, first: str, second: str) -> None:
    """Two ranks that share the state begin, and one goes on."""
    expected, _ = plain(2, SHARDED)
    run(tmp_path / "parts", 2, SHARDED, first, "--exit-interval 2 --async-save")
    found, _ = run(tmp_path / "parts", 1, second)
    assert [figures[0] for figures in found] == [1, 2, 3, 4]
    assert found[:2] == expected[:2]
    for figures, wanted in zip(found[2:], expected[2:], strict=True):
        assert figures[LOSS] == pytest.approx(wanted[LOSS], rel=1e-3)
        assert figures[NORM] == pytest.approx(wanted[NORM], rel=2e-2)


@pytest.mark.parametrize("form", [pytest.param("torch_dist", marks=pytest.mark.long), "torch"])
def test_offloaded_state_is_saved_in_megatrons_formats(tmp_path: Path, form: str) -> None:
    expected, _ = run(tmp_path / "whole", 1)
    run(tmp_path / "parts", 1, STATIC, f"--exit-interval 2 --ckpt-format {form}")
    found, _ = run(tmp_path / "parts", 1)
    assert found == expected


def test_narrow_state_trains_and_resumes_bitwise(tmp_path: Path, plain) -> None:
    narrow = (
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 "
        "--exp-avg-sq-dtype fp16"
    )
    wide, _ = plain(2, SHARDED)
    expected, _ = run(tmp_path / "whole", 2, SHARDED, narrow)
    assert expected[-1][LOSS] != wide[-1][LOSS]
    assert expected[-1][LOSS] == pytest.approx(wide[-1][LOSS], rel=2e-2)
    run(tmp_path / "parts", 2, SHARDED, narrow, "--exit-interval 2")
    found, _ = run(tmp_path / "parts", 2, SHARDED, narrow)
    assert found == expected
