"""The quickstart, with an environment whose installation takes its time and installs nothing."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron.cli import preprocess_data, text_generation_cli
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import fork_training
from tests.harness.training_run import REPOSITORY, run_command

QUICKSTART = REPOSITORY / "examples" / "quickstart.sh"


def environment(folder: Path, pip: str) -> Path:
    """Make what looks like a virtual environment of this interpreter, in which pip does something else."""
    (folder / "bin").mkdir(parents=True)
    script = f'#!/bin/sh\nif [ "$2" = pip ]; then {pip}; fi\nexec {shlex.quote(sys.executable)} "$@"\n'
    (folder / "bin" / "python").write_text(script)
    (folder / "bin" / "python").chmod(0o755)
    return folder


def test_a_failed_installation_ends_it_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "echo no index is reachable >&2; exit 3")
    # The output is a pipe that is read to its end: a process left behind would hold it open.
    done = run_command(
        ["bash", QUICKSTART], env={"VENV": str(venv), "RUN": str(tmp_path / "run"), "PYTHON": sys.executable}
    )
    assert done.returncode == 3
    assert done.stdout.startswith("\n== 1/6 environment: ")
    assert "no index is reachable" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.default
def test_its_steps_with_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    counted = [" ".join(str(number + place) for place in range(27)) for number in range(100)]
    text = "".join(f'{{"text": "{line}"}}\n' for line in counted)
    (tmp_path / "text.jsonl").write_text(text)
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 127"
    words = ["--input", f"{tmp_path}/text.jsonl", "--output-prefix", f"{tmp_path}/text", "--append-eod"]
    assert preprocess_data.main([*words, *tokenizer.split(), "--workers", "1"]) == 0
    run = [*toy_args(tmp_path, data=False), "--data-path", f"{tmp_path}/text_text_document", "--train-iters", "30"]
    run += ["--tensor-model-parallel-size", "2", "--save-interval", "30", "--split", "90,5,5", "--lr", "1e-2"]
    stopped = fork_training([*run, "--exit-interval", "10"], 2).check()
    assert len(stopped.iterations()) == 10
    resumed = fork_training(run, 2).check()
    losses = resumed.losses()
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]
    assert newest(tmp_path / "checkpoints").name == "iter_0000030"
    words = ["--load", str(tmp_path / "checkpoints"), "--prompt", "5 6", "--tokens-to-generate", "4", "--greedy"]
    status, generated, _ = call_tool(monkeypatch, capsys, *words, tool=text_generation_cli)
    assert status == 0
    assert generated.splitlines()[-1].startswith("5 6 ")


@pytest.mark.long
def test_it_shows_that_it_works_and_ends_with_text(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "sleep 6; exit 0")
    values = {"VENV": str(venv), "RUN": str(tmp_path / "run"), "PYTHON": sys.executable, "ITERATIONS": "100"}
    done = run_command(["bash", QUICKSTART], env={**values, "MEGATRON_DEVICE": "cpu"}, timeout_s=600).check()
    steps = re.split(r"\n== (?=\d/6|done)", done.stdout)[1:]
    assert [step.split()[0] for step in steps] == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6", "done"]
    # Two calls of pip are twelve silent seconds.
    assert re.search(r"\n   \.\.\. 5 s, \d+ MB in ", steps[0])
    assert "iteration      100/     100" in steps[4]
    assert "Return the number of" in steps[5]
    assert "training loss: " in steps[6]
    assert str(tmp_path / "run") in steps[6]
    page = (tmp_path / "run" / "quickstart.html").read_text(encoding="utf-8")
    assert "Training loss" in page
    assert '<p class="sample"><b>Return the number of</b>' in page
