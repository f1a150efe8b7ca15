"""What a machine's measurement writes is what the planner reads, and other files are refused in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.cli import calibrate
from megatron.cli.doctor import benchmarks
from megatron.cli.explain import main as explain
from megatron.core.errors import ConfigurationError
from megatron.planner.gpu import H100, gpu_to_json, read_gpu
from tests.unit.advice.planned_words import SMALL


def test_a_measured_machine_is_planned_with_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = benchmarks.Sizes(products=((64, 32, 48), (96, 64, 32)), attention_length=64, copied_bytes=1 << 16)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(benchmarks, "ON_CPU", small)
    file = tmp_path / "machine.json"
    assert calibrate.main(["--output", str(file)]) == 0
    gpu = read_gpu(file)
    assert gpu.name == "measured, a CPU"
    assert 0 < gpu.product_share <= 1
    assert gpu.float8_flops == 0
    assert gpu.link_bandwidth == H100.link_bandwidth
    assert "TFLOP/s of bfloat16 products: 64x32x48" in capsys.readouterr().out
    assert explain([*SMALL, "--world-size", "12", "--gpu", str(file)]) == 0
    assert "12 ranks of measured, a CPU" in capsys.readouterr().out


def test_figures_read_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "h100.json"
    file.write_text(json.dumps(gpu_to_json(H100)))
    assert read_gpu(file) == dataclasses.replace(H100)


def test_files_of_earlier_versions_have_one_share_for_all_matmuls(tmp_path: Path) -> None:
    file, values = tmp_path / "h100.json", gpu_to_json(H100)
    del values["float8_share"]
    file.write_text(json.dumps(values))
    assert read_gpu(file).float8_share == H100.product_share


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"half_flops": 0}, "half_flops 0, where a number above 0"),
        ({"memory_bandwidth": 1e999}, "memory_bandwidth inf"),
        ({"product_share": True}, "product_share True"),
        ({"float8_share": 0}, "float8_share 0 beside float8_flops"),
        ({"memory_bytes": "80"}, "memory_bytes '80'"),
        ({"capability": [9]}, "capability"),
        ({"flash": {"64": {}}}, "forward None"),
        ({"cudnn": 3}, "no cudnn rates for heads of 64"),
        ({"sources": None}, "no list of sources"),
    ],
)
def test_a_file_of_other_figures_is_refused(change: dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(gpu_to_json(H100) | change))
    with pytest.raises(ConfigurationError, match=r"tools/calibrate\.py") as error:
        read_gpu(file)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 5000, "\x00"])
def test_a_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"holds no (JSON|object)"):
        read_gpu(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--output", "machine.txt"], "ends in .json"),
        (["--output", "/nowhere/machine.json"], "cannot be written"),
        (["--output", "machine.json", "--like", "v100"], "--gpu v100: no figures are known"),
    ],
)
def test_wrong_words_are_answered_before_anything_is_measured(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main(words) == 2
    assert told in capsys.readouterr().err
