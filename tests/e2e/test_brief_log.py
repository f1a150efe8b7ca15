"""The log of `megatron train`: what a newcomer sees fits one screen, and Megatron's lines are there on request."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.megatron_lines import parse
from tests.e2e.toy_run import toy_args
from tests.harness.training_run import REPOSITORY, CommandResult, run_command


def without_interval(words: list[str]) -> list[str]:
    place = words.index("--log-interval")
    return words[:place] + words[place + 2 :]


def train(folder: Path, *more: str) -> CommandResult:
    words = [sys.executable, "-m", "megatron", "train", *without_interval(toy_args(folder, *more))]
    return run_command(words, env={"MEGATRON_DEVICE": "cpu"}, cwd=REPOSITORY).check()


def test_the_first_output_fits_one_screen(tmp_path: Path) -> None:
    done = train(tmp_path)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(" ... ")]
    shown = [line.replace(str(tmp_path), "DIR") for line in lines]
    assert len(shown) <= 40
    assert [line for line in shown if len(line) > 120] == []
    text = "\n".join(shown)
    assert "--num-layers 2 --hidden-size 32" in text
    assert " > CPU threads per process: 1 (OMP_NUM_THREADS)" in text
    assert " > DIR/checkpoints has no checkpoint yet: the run starts from random weights" in shown
    iterations = [int(number) for number in re.findall(r"^ iteration +(\d+)/20 \| lm loss: \d", text, re.M)]
    assert iterations[-1] == 20
    assert 10 <= len(iterations) <= 20
    block = (tmp_path / "checkpoints" / "run_record" / "arguments.txt").read_text().splitlines()
    assert set(parse("\n".join(block))) == {"arguments", "argument", "end of arguments"}
    assert len(block) > 300


@pytest.mark.long
def test_all_of_megatrons_lines_can_be_asked_for(tmp_path: Path) -> None:
    names = parse(train(tmp_path, "--log-megatron-lines").stdout)
    assert {"world", "arguments", "seeds", "targets", "iteration", "memory", "save time", "after"} <= set(names)
    # The interval is chosen here too.
    assert 10 <= names.count("iteration") <= 20
