"""A model that is no GPT trains through ``pretrain`` as it is, and at any layout as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.device import Device
from megatron.training.initialize import make_runtime
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.run_cell import resolve_cell
from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.masked_model import provide_model, run

FIGURES = ("lm_loss", "output square", "output size")
LAYOUTS = {
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2-dp2": (4, "--context-parallel-size 2 --recompute-activations"),
    "cp2-pp2-dp2": (8, "--context-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-activations"),
}


def train(folder: Path, nproc: int, flags: str) -> ForkedRun:
    path = folder / f"{nproc}.jsonl"
    words = f"--train-iters 6 --eval-iters 2 --log-interval 3 --metrics-jsonl {path} {flags}".split()
    return fork_training([*BASE_FLAGS, *words], nproc, program=run).check()


def figures(run: ForkedRun) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in run.iterations()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ForkedRun:
    """Return the training of one process."""
    return train(tmp_path_factory.mktemp("alone"), 1, "")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-pp2", "cp2-dp2", pytest.param("cp2-pp2-dp2", marks=pytest.mark.long)])
def test_losses_are_those_of_one_process(layout: str, alone: ForkedRun, tmp_path: Path) -> None:
    assert len(alone.iterations()) == 6
    assert figures(alone)[-1][0] < figures(alone)[0][0]
    assert " | output square: " in alone.stdout
    run = train(tmp_path, *LAYOUTS[layout])
    for ours, expected in zip(figures(run), figures(alone), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    ours, expected = ([line["lm_loss"] for line in r.evaluations("validation")] for r in (run, alone))
    assert expected
    assert ours == pytest.approx(expected, rel=1e-5)


def test_an_early_position_sees_a_late_one() -> None:
    config = resolve_cell(BASE_FLAGS, 1, "float64")
    runtime = make_runtime(config, Device("cpu"))
    model = provide_model(config, runtime, config.stage_layout.contents(0)).eval()
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, -1] += 1
    positions, labels = tokens, tokens
    first, second = (model(some, positions, labels, None)[0][0, 0] for some in (tokens, changed))
    assert first != second
