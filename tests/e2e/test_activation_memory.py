"""What is kept for the backward pass, and where, changes no bit of a run's losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_bad_input import run
from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training
from tests.unit.training.config.command_lines import MINIMAL

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
    assert "GiB of host memory for each process, for the inputs of layers alone" in line
    assert line.endswith("leave --cpu-offloading out")


def test_offload_of_weights_is_counted_from_the_model() -> None:
    huge = (
        "--num-layers 64 --hidden-size 65536 --num-attention-heads 64 --cpu-offloading --cpu-offloading-num-layers 64"
    )
    done = run([*MINIMAL, *huge.split(), "--cpu-offloading-weights", "--no-cpu-offloading-activations"])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "offload is estimated to need" in line
    assert "GiB of activations and weights" in line
    assert line.endswith("leave --cpu-offloading out")
