"""--tp-comm-overlap, its switches and its file: what goes in chunks, and what one line says instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE, LinearName, LinearOverlap, linear_overlap
from tests.unit.training.config.command_lines import MINIMAL

SEQUENCE_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LAYERS: tuple[LinearName, ...] = ("qkv", "proj", "fc1", "fc2", "output")


def parse(*flags: str) -> ParsedArguments:
    return resolve_arguments([*MINIMAL, *SEQUENCE_PARALLEL, "--tp-comm-overlap", *flags], 2)


def overlaps(*flags: str) -> dict[str, LinearOverlap]:
    return {name: linear_overlap(parse(*flags).config.model, name) for name in LAYERS}


def chunked(*flags: str) -> dict[str, tuple[bool, bool]]:
    return {name: (overlap.forward, overlap.backward) for name, overlap in overlaps(*flags).items()}


def test_each_switch_changes_what_its_name_says() -> None:
    column, row = dict.fromkeys(("qkv", "fc1", "output")), dict.fromkeys(("proj", "fc2"))
    assert chunked() == dict.fromkeys(column, (True, False)) | dict.fromkeys(row, (True, True))
    without_gathers = dict.fromkeys(column, (False, False)) | dict.fromkeys(row, (True, False))
    for name in ("overlap", "split"):
        assert chunked(f"--disable-tp-comm-{name}-ag") == without_gathers
        assert chunked(f"--disable-tp-comm-{name}-rs")["fc2"] == (False, True)
    assert chunked("--tp-comm-overlap-rs-dgrad")["qkv"] == (True, True)
    assert chunked("--tp-comm-overlap-impl", "whole") == dict.fromkeys(LAYERS, (False, False))
    assert overlaps("--tp-comm-overlap-impl", "symmetric-memory")["proj"].uses_symmetric_memory
    assert not overlaps("--disable-tp-comm-bulk-dgrad")["qkv"].bulk_gather
    assert not overlaps("--disable-tp-comm-bulk-wgrad")["qkv"].bulk_scatter


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (("--tensor-model-parallel-size", "1"), "--tensor-model-parallel-size 1"),
        (("--tensor-model-parallel-size", "2"), "--tensor-model-parallel-size 2 without --sequence-parallel"),
    ],
)
def test_without_sequence_parallelism_a_line_says_that_it_has_no_effect(layout: tuple[str, ...], line: str) -> None:
    parsed = resolve_arguments([*MINIMAL, *layout, "--tp-comm-overlap", "--disable-tp-comm-overlap-rs"], 2)
    assert parsed.notes == (
        f"--tp-comm-overlap has no effect with {line}: turned off",
        "--disable-tp-comm-overlap-rs has no effect without --tp-comm-overlap",
    )
    assert linear_overlap(parsed.config.model, "qkv") == WHOLE


def test_a_file_chooses_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(
        "---\nqkv_fprop:  # as a whole\n  method: bulk\n  num_sm: 4\n\nproj_fprop:\n  method: 'pipeline'\n"
        "fc1_dgrad:\n  num_splits: 4\n  method: ring_exchange\nfc2_dgrad:\n  method: bulk\nfc1_wgrad:\n  method: bulk\n"
    )
    parsed = parse("--tp-comm-overlap-cfg", str(path))
    assert parsed.notes == (
        f"--tp-comm-overlap-cfg {path}: no effect have num_sm, num_splits: there are as many chunks as ranks, and no "
        "kernels of transformer-engine's to set",
    )
    assert chunked("--tp-comm-overlap-cfg", str(path)) == {
        "qkv": (False, False),
        "proj": (True, True),
        "fc1": (True, True),
        "fc2": (True, False),
        "output": (True, False),
    }
    assert chunked("--tp-comm-overlap-cfg", str(path), "--disable-tp-comm-overlap-rs")["proj"] == (False, True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("qkv:\n  method: bulk\n", "line 1: qkv is no product; possible: qkv_fprop, qkv_dgrad, proj_fprop,"),
        ("fc1_fprop:\n  method: ring\n", "line 2: method ring of fc1_fprop; possible: ring_exchange, pipeline, bulk"),
        ("fc1_wgrad:\n  method: pipeline\n", "line 2: method pipeline of fc1_wgrad; possible: bulk"),
        ("  method: bulk\n", "line 1: 'method: bulk' is neither 'PRODUCT:' nor an indented 'SETTING: VALUE'"),
        ("fc1_fprop: {method: bulk}\n", "line 1: 'fc1_fprop: {method: bulk}' is neither"),
        ("fc1_fprop:\n  - 3\n", "line 2: '- 3' is neither"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        parse("--tp-comm-overlap-cfg", str(path))
    [problem] = caught.value.problems
    assert problem.startswith(f"--tp-comm-overlap-cfg {path}, {line}")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--tp-comm-overlap-cfg no\.yaml: the file cannot be read"):
        parse("--tp-comm-overlap-cfg", "no.yaml")
