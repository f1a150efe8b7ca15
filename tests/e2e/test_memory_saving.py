"""What is kept for the backward pass, offloaded, narrowed or sharded, and where: the same figures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource
from megatron.core.sharding import Box
from tests.e2e.test_bad_input import run
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.config.command_lines import MINIMAL

LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 4 --bf16 --train-iters 4 --lr-warmup-iters 1"
    " --eval-iters 0"
)
KEPT = (
    "--recompute-granularity selective --recompute-modules core_attn layernorm mlp --cpu-offloading"
    " --cpu-offloading-num-layers 3 --tp-comm-overlap"
)


@pytest.mark.long
def test_recomputed_modules_and_offload_leave_a_run_as_it_is(tmp_path: Path) -> None:
    figures = []
    for name, more in (("plain", ""), ("kept", KEPT)):
        args = toy_args(tmp_path, LAYOUT, more, "--metrics-jsonl", tmp_path / name, save=False)
        figures.append(exact_figures(fork_training(args, 2).check().iterations()))
    assert len(figures[0]) == 4
    assert figures[0] == figures[1]


def test_offload_without_enough_memory_says_how_much_it_needs() -> None:
    huge = "--num-layers 64 --hidden-size 65536 --num-attention-heads 64 --seq-length 1048576"
    huge += " --max-position-embeddings 1048576 --cpu-offloading --cpu-offloading-num-layers 64"
    done = run([*MINIMAL, *huge.split()])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "GiB of host memory per process for the inputs of layers alone" in line
    assert line.endswith("omit --cpu-offloading")


def test_offload_of_weights_is_counted_from_the_model() -> None:
    huge = (
        "--num-layers 64 --hidden-size 65536 --num-attention-heads 64 --cpu-offloading --cpu-offloading-num-layers 64"
    )
    done = run([*MINIMAL, *huge.split(), "--cpu-offloading-weights", "--no-cpu-offloading-activations"])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "offload needs an estimated" in line
    assert "GiB of activations and weights" in line
    assert line.endswith("omit --cpu-offloading")


FOUR = "--train-iters 4 --lr-decay-iters 20 --eval-interval 1000"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
STATIC = "--optimizer hybridadam --optimizer-offload-policy static --optimizer-offload-fraction 0.6"
AUTO = "--optimizer hybridadam --optimizer-offload-policy auto --overlap-cpu-optimizer-d2h-h2d"
LOSS, NORM = 3, 4
FULL = "--optimizer-cpu-offload --use-precision-aware-optimizer --no-pin-cpu-grads"


def run_offloaded(folder: Path, nproc: int, *flags: str) -> tuple[list[tuple[object, ...]], str]:
    precision = [] if any("--fp16" in flag for flag in flags) else ["--bf16"]
    words = toy_args(folder, FOUR, *precision, *flags)
    done = fork_training([*words, "--metrics-jsonl", folder / "metrics.jsonl"], nproc).check()
    return exact_figures(done.iterations()), done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], tuple[list[tuple[object, ...]], str]]:
    """Return what runs a layout without offload, each once."""
    return functools.cache(lambda nproc, layout: run_offloaded(tmp_path_factory.mktemp("plain"), nproc, layout))


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
    found, output = run_offloaded(tmp_path / "offloaded", nproc, layout, flags)
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
    run_offloaded(tmp_path / "parts", 2, SHARDED, first, "--exit-interval 2 --async-save")
    found, _ = run_offloaded(tmp_path / "parts", 1, second)
    assert [figures[0] for figures in found] == [1, 2, 3, 4]
    assert found[:2] == expected[:2]
    for figures, wanted in zip(found[2:], expected[2:], strict=True):
        assert figures[LOSS] == pytest.approx(wanted[LOSS], rel=1e-3)
        assert figures[NORM] == pytest.approx(wanted[NORM], rel=2e-2)


@pytest.mark.parametrize("form", [pytest.param("torch_dist", marks=pytest.mark.long), "torch"])
def test_offloaded_state_is_saved_in_megatrons_formats(tmp_path: Path, form: str) -> None:
    expected, _ = run_offloaded(tmp_path / "whole", 1)
    run_offloaded(tmp_path / "parts", 1, STATIC, f"--exit-interval 2 --ckpt-format {form}")
    found, _ = run_offloaded(tmp_path / "parts", 1)
    assert found == expected


def test_narrow_state_trains_and_resumes_bitwise(tmp_path: Path, plain) -> None:
    narrow = (
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 "
        "--exp-avg-sq-dtype fp16"
    )
    wide, _ = plain(2, SHARDED)
    expected, _ = run_offloaded(tmp_path / "whole", 2, SHARDED, narrow)
    assert expected[-1][LOSS] != wide[-1][LOSS]
    assert expected[-1][LOSS] == pytest.approx(wide[-1][LOSS], rel=2e-2)
    run_offloaded(tmp_path / "parts", 2, SHARDED, narrow, "--exit-interval 2")
    found, _ = run_offloaded(tmp_path / "parts", 2, SHARDED, narrow)
    assert found == expected


WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce"
# The norm that clips is summed bucket by bucket, and these have other buckets.
SAME_BITS = "--clip-grad 0 --train-iters 6 --lr-warmup-iters 2 --eval-interval 3 --micro-batch-size 1"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint."""
    source = NativeSource(newest(folder / "checkpoints"))
    return {
        name: source.read(name, Box((0,) * len(info.global_shape), info.global_shape))
        for name, info in source.tensors.items()
        if not name.startswith("rng.")
    }


def losses(run: ForkedRun) -> list[object]:
    return [(line[0], line[1], line[3]) for line in exact_figures(run.metrics)]


@pytest.mark.parametrize("precision", [pytest.param("", marks=pytest.mark.long, id="fp32"), "--bf16"])
def test_checkpoints_go_on_with_and_without_sharded_weights(precision: str, tmp_path: Path) -> None:
    """The losses and the whole state are the same bits, wherever weights were sharded before and after a stop."""
    flags = (SAME_BITS, precision)
    gradients = "--data-parallel-sharding-strategy optim_grads"
    whole = fork_training(toy_args(tmp_path / "whole", *flags, gradients), 2).check()
    expected = state_of(tmp_path / "whole")
    for name, first, second in (("to", gradients, WEIGHTS), ("fro", WEIGHTS, gradients)):
        folder = tmp_path / name
        fork_training(toy_args(folder, *flags, first, "--exit-interval 3"), 2).check()
        resumed = fork_training(toy_args(folder, *flags, second), 2).check()
        assert losses(resumed) == losses(whole)
        found = state_of(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatrons_formats_hold_sharded_weights(form: str, tmp_path: Path) -> None:
    flags = (SAME_BITS, f"--ckpt-format {form} --tensor-model-parallel-size 2")
    whole = fork_training(toy_args(tmp_path / "whole", *flags), 2).check()
    fork_training(toy_args(tmp_path, *flags, WEIGHTS, "--exit-interval 3"), 4).check()
    resumed = fork_training(toy_args(tmp_path, *flags, "--train-iters 6"), 2).check()
    ours, theirs = losses(resumed)[-1], losses(whole)[-1]
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5)  # type: ignore[index]
