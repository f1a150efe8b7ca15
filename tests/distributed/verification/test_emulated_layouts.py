"""Layouts on emulated CUDA devices: values of the CPU, streams checked, and reports that fail a cell."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import verify_parallelism
from megatron.verification.cells import DROPOUT, IN_PARTS, MODULES, Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout, make_expert_cell, make_latent_cell, make_prediction_cell
from megatron.verification.random_cells import fuzz
from megatron.verification.training_cells import FUSED_LORA, MUON, fully_sharded, with_optimizer_on_host
from tests.distributed.verification import planted_faults
from tests.distributed.verification.small_cells import small
from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.cell_server import EmulatedVerifier

TOOL = Path(__file__).resolve().parents[3] / "tools" / "verify_parallelism.py"


@pytest.fixture(scope="module")
def emulator() -> None:
    """Build the emulator, or skip where it cannot be: on a CUDA build of torch, or without a compiler."""
    try:
        built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def verifier(emulator: None) -> Iterator[EmulatedVerifier]:
    with EmulatedVerifier() as emulated:
        yield emulated


SP = Layout(tp=2, sequence_parallel=True)
DEFAULT = tuple(
    map(
        small,
        (
            make_cell("gpt2", SP),
            make_cell("gpt2", Layout(tp=2, recompute=IN_PARTS)),
            make_cell("gpt2", Layout(pp=2)),
            make_cell("gpt2", Layout(pp=2, schedule="zero-bubble")),
            make_cell("gpt2", Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True)),
            make_cell("gpt2", Layout(dp=2, overlap=True)),
            make_cell("gpt2", Layout(dp=2, sharding="optim", overlap=True)),
            make_cell("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True)),
            make_cell("gpt2", fully_sharded(Layout(dp=2), overlap=True)),
            with_optimizer_on_host(make_cell("gpt2", Layout(dp=2, sharding="optim"))),
            make_cell("gpt2", Layout(cp=2)),
            make_cell("gpt2", Layout(cp=2, cp_comm_type="all_gather")),
            make_cell("gpt2", Layout(cp=2, cp_comm_type="a2a")),
            make_cell("gpt2", Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2))),
            make_cell("gpt2", Layout(dp=2, recompute=MODULES, offloaded_layers=2), "packed", extra=DROPOUT),
            make_expert_cell("mixtral", ExpertLayout(dp=2, ep=2)),
            make_prediction_cell("llama-mtp", Layout(pp=2)),
            make_cell("gpt2", Layout(tp=2), extra=MUON),
            make_cell("gpt2", Layout(dp=2), "uneven", extra=FUSED_LORA),
            make_latent_cell("latent", Layout(tp=2)),
            make_latent_cell("sparse", SP),
        ),
    )
)
"""Cells that the default tests run: each parallelism, sharding, schedule and kind of recompute or offload."""

_EVERY_PAIR, _EVERY_LARGER = 2, 24
_USUAL = ("tp1", "pp1", "cp1", "dp1")
_DIMENSIONS = ("tp", "pp", "cp", "dp", "ep")


def spread_cells(cells: list[Cell]) -> list[Cell]:
    """Return half of the cells of up to two ranks and some of the larger ones, by their place in the matrix."""
    pairs = [cell for cell in cells if cell.world_size <= 2]
    larger = [cell for cell in cells if cell.world_size > 2]
    return [*pairs[::_EVERY_PAIR], *larger[::_EVERY_LARGER]]


def choices_of(cell: Cell) -> set[str]:
    """Return the cell's model, data, choices of its layout and flags, as its name says."""
    return {word for word in cell.name.split() if not re.fullmatch(r"-?[0-9.]+", word)}


def combinations_of(cell: Cell) -> set[frozenset[str]]:
    """Return which choices the cell combines, as its name says.

    These are its flags, every two choices of its layout, and the model with the data and with each dimension of
    parallelism.
    """
    model, data, *words = cell.name.split()
    num_choices = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    chosen = [word for word in words[:num_choices] if word not in _USUAL]
    flags = [word for word in words[num_choices:] if word.startswith("--")]
    # tp2sp and tp4 are of one dimension.
    dimensions = [name for name in _DIMENSIONS if any(re.match(rf"{name}\d", word) for word in chosen)]
    pairs = [*itertools.combinations([data, *chosen], 2), *((model, other) for other in (data, *dimensions))]
    return {*map(frozenset, pairs), *(frozenset([choice]) for choice in (*chosen, *flags))}


def covering_cells(cells: list[Cell], covered: Iterable[Cell], features_of: Callable[[Cell], set[Any]]) -> list[Cell]:
    """Return some of the cells, in their order: together they have each feature that ``covered`` leaves out."""
    combined = {cell.name: features_of(cell) for cell in cells}
    missing = set[Any]().union(*combined.values()).difference(*map(features_of, covered))
    chosen = set()
    while missing:
        best = max(combined, key=lambda name: len(combined[name] & missing))
        missing -= combined[best]
        chosen.add(best)
    return [cell for cell in cells if cell.name in chosen]


MATRIX = verify_parallelism.choose_cells(verify_parallelism.parse_arguments([]))
_DEFAULT_NAMES = {cell.name for cell in DEFAULT}
_OTHERS = [small(cell) for cell in spread_cells(MATRIX) if cell.name not in _DEFAULT_NAMES]
FULL = covering_cells(_OTHERS, DEFAULT, choices_of)
"""Cells that have every model and every choice which half of the matrix has."""
FURTHER = covering_cells(_OTHERS, (*DEFAULT, *FULL), combinations_of)
"""Cells that have every combination of two choices which half of the matrix has."""


@pytest.mark.default(len(DEFAULT))
@pytest.mark.parametrize(
    "cell",
    [*DEFAULT, *FULL, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_layout_on_emulated_devices_computes_what_a_cpu_process_computes(
    verifier: EmulatedVerifier, cell: Cell
) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
def test_the_whole_matrix_on_emulated_devices(verifier: EmulatedVerifier) -> None:
    reports = [verifier.check(cell) for cell in MATRIX]
    assert not [report.describe() for report in reports if report.outcome != "passed"]


@pytest.mark.long
def test_random_configurations_on_emulated_devices_match_or_are_rejected(verifier: EmulatedVerifier) -> None:
    reports = [verifier.check(cell) for cell in fuzz(1, 100)]
    assert not [report.describe() for report in reports if report.outcome == "failed"]
    assert sum(report.outcome == "passed" for report in reports) > 75


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_programs_on_emulated_devices(emulator: None, dtype: str) -> None:
    with EmulatedVerifier(dtype, triton=True) as emulated:
        reports = [emulated.check(cell) for cell in DEFAULT]
    assert not [report.describe() for report in reports if report.outcome != "passed"]


@pytest.mark.full
def test_a_race_fails_a_cell_though_its_exception_was_caught(verifier: EmulatedVerifier) -> None:
    cell = small(make_cell("gpt2", Layout(dp=2)))
    report = verifier.check(cell, planted_faults.races_on_rank_1)
    assert report.outcome == "failed"
    assert report.reasons[0] == "rank 1 raised:"
    assert report.reasons[1].startswith("race: aten::mul on stream ")
    # The report belongs to one cell: the next one passes.
    assert verifier.check(cell).outcome == "passed"


def run_tool(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *flags], capture_output=True, text=True, check=False, env=env)


@pytest.mark.full
def test_the_command_runs_cells_on_emulated_devices(emulator: None) -> None:
    # In float32 some processors round so that a token near a tie of its router changes its expert in a later step.
    result = run_tool(
        "--emulate-cuda", "a100", "--dtype", "float64", "--emulated-triton", "absent", "--filter", "first1"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "passed  llama plain tp1 pp2 first1 cp1 dp1 | loss" in result.stdout
    assert "9 passed, 0 failed, 0 rejected at parse time, float64" in result.stdout


@pytest.mark.full
def test_the_command_ends_in_a_line_where_the_emulator_cannot_be_built(tmp_path: Path) -> None:
    without_compiler = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    without_compiler.pop("CXX", None)
    result = run_tool("--emulate-cuda", "--filter", "first1", env=without_compiler)
    expected = "error: --emulate-cuda: no C++ compiler was found: install g++, or set CXX\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


@pytest.mark.full
def test_the_command_names_the_gpu_types() -> None:
    result = run_tool("--emulate-cuda", "v100", "--filter", "first1")
    expected = "error: --emulate-cuda: 'v100' is no emulated GPU type; a100, h100, h200, b200, b300 are\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_the_command_needs_a_checkout_for_emulated_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_parallelism, "EMULATED_PROGRAM", tmp_path / "absent.py")
    assert verify_parallelism.main(["--emulate-cuda", "--filter", "first1"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --emulate-cuda needs the emulator of the repository")
    assert line.count("\n") == 1


def test_emulated_devices_have_no_part_in_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        verify_parallelism.main(["--emulate-cuda", "--communication"])
    assert "--communication starts no ranks" in capsys.readouterr().err
