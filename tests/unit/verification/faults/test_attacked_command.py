"""Faults are named by flags, and a command is attacked in folders of its own, on its own copy of the data."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from megatron.core.errors import ConfigurationError
from megatron.verification.faults import launch, spoiled_script
from megatron.verification.faults.injection import Fault, Kind, parse_fault
from megatron.verification.faults.launch import AttackedCommand
from tests.harness.training_run import run_command


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("kill", "any", Fault("kill", "any")),
        ("kill", "launcher", Fault("kill", "launcher")),
        ("stop", "007", Fault("stop", "7")),
        ("slow", "1:2.5", Fault("slow", "1", 2.5)),
        ("corrupt", "weight", Fault("corrupt", "weight")),
    ],
)
def test_flags_name_faults(kind: Kind, text: str, expected: Fault) -> None:
    assert parse_fault(kind, text) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("kill", "-1"),
        ("kill", "some"),
        ("kill", "²"),
        ("kill", "9" * 5000),
        ("stop", "launcher"),
        ("partition", "all"),
        ("corrupt", "disk"),
        ("slow", "1"),
        ("slow", "1:"),
        ("slow", "1:1"),
        ("slow", "1:nan"),
        ("slow", "1:inf"),
        ("slow", "any:1e9"),
    ],
)
def test_what_names_no_fault_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--{kind} "):
        parse_fault(kind, text)


def test_the_seed_draws_the_rank() -> None:
    drawn = {Fault("kill", "any").rank([0, 1, 2], random.Random(seed)) for seed in range(30)}
    assert drawn == {0, 1, 2}
    assert Fault("kill", "2").rank([0, 1, 2], random.Random(1)) == 2
    assert Fault("kill", "all").rank([0, 1, 2], random.Random(1)) is None


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--kill 2: there is no rank 2 in this run; use one of: 0, 1"):
        Fault("kill", "2").rank([0, 1], random.Random(1))


@pytest.mark.parametrize("kind", ["stop", "partition"])
def test_a_rank_alone_is_neither_stopped_nor_cut_off(kind: Kind) -> None:
    with pytest.raises(
        ConfigurationError, match=("no other rank waits for the only rank of this run; use two or more ranks")
    ):
        Fault(kind, "any").rank([0], random.Random(1))


def test_statuses_are_those_of_the_command() -> None:
    assert Fault("kill", "1").statuses(has_launcher=True) == (1,)
    assert -9 in Fault("kill", "launcher").statuses(has_launcher=True)
    assert -9 in Fault("kill", "0").statuses(has_launcher=False)
    assert Fault("corrupt", "sample").statuses(has_launcher=False) == (2,)
    assert Fault("corrupt", "sample").statuses(has_launcher=True) == (1,)
    assert Fault("slow", "1", 2.0).statuses(has_launcher=True) == ()


def test_what_is_written_goes_to_the_folder(tmp_path: Path) -> None:
    words = AttackedCommand(("train", "--save", "mine")).in_folder(tmp_path)
    save, metrics = str(tmp_path / "checkpoints"), str(tmp_path / "metrics.jsonl")
    assert words == ["train", "--save", "mine", "--save", save, "--load", save, "--metrics-jsonl", metrics]


def test_data_is_copied_and_weights_of_a_blend_stay(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.bin").write_bytes(name.encode())
        (tmp_path / f"{name}.idx").write_bytes(b"index of " + name.encode())
    words = ("train", "--data-path", "0.3", str(tmp_path / "one"), "0.7", str(tmp_path / "other"), "--seed", "1")
    command, files = AttackedCommand(words).with_own_data(tmp_path / "copy")
    assert [path.read_bytes() for path in files] == [b"one", b"other"]
    copies = [str(path.with_suffix("")) for path in files]
    assert command.words == ("train", "--data-path", "0.3", copies[0], "0.7", copies[1], "--seed", "1")
    assert files[1].with_suffix(".idx").read_bytes() == b"index of other"


def test_data_too_large_to_copy_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "MOST_DATA_BYTES", 2)
    (tmp_path / "one.bin").write_bytes(b"one")
    with pytest.raises(ConfigurationError, match=r"works on a copy, and .*one.bin has 3 bytes, more than 2"):
        AttackedCommand(("train", "--data-path", str(tmp_path / "one"))).with_own_data(tmp_path / "copy")


SCRIPT = f"""
import os, signal, sys
import torch
assert sys.argv[1:] == ["--flag"], sys.argv
layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
inputs = torch.ones(1, 3, requires_grad=True)
for number in ({int(spoiled_script.GRADIENT_SIGNAL)}, {int(spoiled_script.WEIGHT_SIGNAL)}):
    os.kill(os.getpid(), number)
    with torch.no_grad():
        assert layer(inputs).isfinite().all()
    for _ in range(2):
        inputs.grad = None
        layer(inputs).sum().backward()
        weight, gradient = layer[0].weight.isfinite().all(), inputs.grad.isfinite().all()
        print("weight" if weight else "-", "gradient" if gradient else "-")
"""


@pytest.mark.full
def test_a_gradient_is_spoiled_once_and_a_weight_for_good(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = AttackedCommand((sys.executable, str(script), "--flag")).spoilable()
    result = run_command(command.words).check()
    assert result.stdout.split("\n")[:4] == ["weight -", "weight gradient", "- -", "- -"]
