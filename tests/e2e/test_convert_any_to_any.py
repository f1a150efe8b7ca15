"""Every checkpoint format into every other, and back to the native one: nothing that both can hold is changed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron.checkpoint.comparison import diff_checkpoints
from tests.e2e.test_convert import run_converter
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_trainings

LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer --bf16"
# 128 tokens are padded to a multiple of 96 x 2.
RUN = (
    f"{LAYOUT} --make-vocab-size-divisible-by 96 --train-iters 3 --lr-warmup-iters 1 --eval-interval 100 --num-layers 4"
)
MODELS = {
    "tied": "--kv-channels 8",
    "untied": "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --ffn-hidden-size 80",
}
DIRECTIONS = tuple(itertools.permutations(("native", "torch", "torch_dist", "hf"), 2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a run of each model at TP 2 and PP 2 with the distributed optimizer."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for run in fork_trainings([toy_args(folders[name], RUN, flags) for name, flags in MODELS.items()], 4):
        run.check()
    return {name: folder / "checkpoints" for name, folder in folders.items()}


def follow(start: Path, formats: tuple[str, ...], folder: Path) -> Path:
    """Convert ``start`` into one format after the other, and return the last result."""
    current = start
    for number, saver in enumerate(formats):
        target = folder / f"{number}-{saver}"
        run_converter(current, target, f"--loader {'hf' if 'hf' in current.name else 'megatron'} --saver {saver}")
        current = target
    return current


def assert_equal(start: Path, end: Path, *, weights_only: bool) -> None:
    lines: list[str] = []
    assert diff_checkpoints(start, end, weights_only=weights_only, log=lines.append), lines
    compared = next(line for line in lines if line.startswith("tensors: "))
    assert not compared.startswith("tensors: 0 ")


@pytest.mark.parametrize(
    ("model", "formats"),
    [
        ("tied", ("torch", "torch_dist", "native")),
        ("untied", ("torch", "torch_dist", "hf", "native")),
        pytest.param("untied", ("torch", "torch_dist", "native"), marks=pytest.mark.long),
        pytest.param("tied", ("torch", "torch_dist", "hf", "native"), marks=pytest.mark.long),
    ],
)
def test_a_cycle_through_the_formats(
    model: str, formats: tuple[str, ...], trained: dict[str, Path], tmp_path: Path
) -> None:
    end = follow(trained[model], formats, tmp_path)
    assert_equal(trained[model], end, weights_only="hf" in formats)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("origin", "target"), DIRECTIONS)
def test_every_direction_and_back(
    model: str, origin: str, target: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    formats = (origin, target, "native")[origin == "native" : 2 if target == "native" else 3]
    end = follow(trained[model], formats, tmp_path)
    assert_equal(trained[model], end, weights_only="hf" in formats)
