"""Runs of scripts that register optimizers, schedules, data sets, callbacks and loggers, and add flags."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.training import extending
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.training_run import REPOSITORY, run_command

EXAMPLES = REPOSITORY / "examples" / "extend"
FLAGS = {
    "optimizer": "--optimizer signum --optimizer-args momentum=0.95",
    "learning_rate_schedule": "--lr-decay-style hold",
    "dataset": "--dataset sums --dataloader-type cyclic",
    "callback": "--callbacks weight-norm",
    "logger": "--loggers csv",
    "extra_arguments": "--label-noise 0.3 --noise-pattern odd",
}
TENSOR_AND_PIPELINE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def args_of(folder: Path, *more: str, data: bool = True) -> list[str]:
    words = toy_args(folder, "--train-iters 4 --eval-interval 2 --lr-warmup-iters 1", *more, data=data)
    if not data:
        for flag in ("--split", "--data-cache-path"):
            place = words.index(flag)
            del words[place : place + 2]
    return words


def prepare(argv: Sequence[str], script: Path) -> None:
    """Let ``pretrain()`` return to the harness, which outlives the run."""
    sys.argv = [str(script), *argv]

    def run_program(main):  # type: ignore[no-untyped-def]
        sys.exit(main())

    extending.run_program = run_program


def run_example(argv: Sequence[str], faults: Faults) -> int:
    """Run the example that the first word names; it ends by SystemExit."""
    script = EXAMPLES / f"{argv[0]}.py"
    prepare(argv[1:], script)
    runpy.run_path(str(script), run_name="__main__")
    raise AssertionError("the script ends the program")


def run_all(argv: Sequence[str], faults: Faults) -> int:
    """Run a script with the registrations of all examples."""
    prepare(argv, EXAMPLES / "all.py")
    parts = {name: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name) for name in FLAGS}["extra_arguments"]
    extending.pretrain(
        forward_step=parts["forward_step"], extra_args=parts["add_arguments"], args_defaults={"clip_grad": 0.5}
    )


def train_example(name: str, args: Sequence[str]) -> ForkedRun:
    run = fork_training([name, *args], program=run_example)
    run.check()
    return run


@pytest.mark.parametrize("name", FLAGS)
def test_an_example_changes_the_run_that_its_flags_select(name: str, tmp_path: Path) -> None:
    data = name != "dataset"
    run = train_example(name, args_of(tmp_path, FLAGS[name], data=data))
    figures = [line for line in run.metrics if "split" not in line]
    assert [line["iteration"] for line in figures] == [1, 2, 3, 4]
    if name == "learning_rate_schedule":
        assert [line["learning_rate"] for line in figures] == pytest.approx([0.0, 3e-3, 3e-3, 2.1e-3])
    if name == "callback":
        assert all(line["weight norm"] > 0 for line in figures)
        assert "weight norm: " in run.stdout
    if name == "logger":
        rows = (tmp_path / "checkpoints" / "metrics.csv").read_text().splitlines()
        assert f"4,lm loss,{figures[-1]['lm_loss']}" in rows
        assert any(row.startswith("4,lm loss validation,") for row in rows)
    if name == "extra_arguments":
        assert "  label_noise ..................................... 0.3" in run.stdout
        assert "  lr_decay_style .................................. cosine" in run.stdout
        config = (tmp_path / "checkpoints" / "run_record" / "config.toml").read_text()
        assert '[extra]\nlabel_noise = 0.3\nnoise_pattern = "odd"' in config


@pytest.mark.default
def test_all_examples_together_resume_bitwise_with_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    flags = (*FLAGS.values(), TENSOR_AND_PIPELINE)
    whole = fork_training(args_of(tmp_path / "whole", *flags, data=False), 4, program=run_all)
    whole.check()
    stopped = args_of(tmp_path / "parts", *flags, "--exit-interval 2", data=False)
    fork_training(stopped, 4, program=run_all).check()
    resumed = fork_training(args_of(tmp_path / "parts", *flags, data=False), 4, program=run_all)
    resumed.check()
    assert exact_figures(resumed.metrics) == exact_figures(whole.metrics)
    assert_same_checkpoints(newest(tmp_path / "parts" / "checkpoints"), newest(tmp_path / "whole" / "checkpoints"))
    alone = fork_training(args_of(tmp_path / "alone", *FLAGS.values(), data=False), program=run_all)
    alone.check()
    # The sign of a gradient that is almost zero depends on the layout.
    first = [run.metrics[0] for run in (alone, whole)]
    assert first[0]["lm_loss"] == pytest.approx(first[1]["lm_loss"], rel=1e-5)
    assert [line["sample_ids_hash"] for line in alone.metrics if "split" not in line] == [
        line["sample_ids_hash"] for line in whole.metrics if "split" not in line
    ]


def test_a_checkpoint_of_a_script_names_what_another_script_lacks(tmp_path: Path) -> None:
    train_example("optimizer", args_of(tmp_path, "--optimizer signum --exit-interval 2"))
    run = fork_training([*args_of(tmp_path), "--optimizer", "signum"])
    assert run.statuses == (2,)
    assert "--optimizer signum: possible values are adam, sgd" in "".join(run.errors)
    assert "a script that registers signum adds it (--script FILE)" in "".join(run.errors)


def test_a_rule_that_is_not_elementwise_is_rejected_with_tensor_parallelism(tmp_path: Path) -> None:
    words = args_of(tmp_path, "--optimizer adafactor --tensor-model-parallel-size 2")
    run = fork_training(["optimizer", *words], 2, program=run_example)
    assert set(run.statuses) == {2}
    assert "--optimizer adafactor: Adafactor is not elementwise" in "".join(run.errors)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("optimizer", "--optimizer signum --ckpt-format torch", "cannot store the state of --optimizer signum"),
        ("learning_rate_schedule", "--lr-decay-style hold --ckpt-format torch_dist", "cannot store --lr-decay-style h"),
        ("dataset", "--dataset sums", "--data-path and --dataset sums exclude each other"),
        ("dataset", "--dataset sum", "--dataset sum: possible values are MMAP, "),
        ("optimizer", "--optimizer-args eps", "--optimizer-args: eps is not NAME=VALUE; use NAME=VALUE"),
    ],
)
def test_a_wrong_command_line_of_a_script_is_rejected_in_one_line(
    name: str, flags: str, message: str, tmp_path: Path
) -> None:
    run = fork_training([name, *args_of(tmp_path, flags)], program=run_example)
    assert run.statuses == (2,)
    assert message in "".join(run.errors)
    assert "Traceback" not in "".join(run.errors)


OWN_LOSS = """
from megatron.training import get_args, pretrain, register_loss

register_loss("sharpened", lambda inputs: inputs.cross_entropy() ** get_args().exponent)
if __name__ == "__main__":
    pretrain(extra_args=lambda parser: parser.add_argument("--exponent", type=float, default=1.0))
"""


def test_a_run_whose_loss_reads_its_own_flag_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOSS)
    words = args_of(tmp_path, "--loss sharpened --exponent 2.0")
    command = [sys.executable, "-m", "megatron", "train", "--script", str(script), *words]
    assert "predicted time per step" in run_command([*command, "--explain"]).check().stdout


def test_the_launcher_shows_the_help_of_a_script_and_continues_its_run(tmp_path: Path) -> None:
    script = EXAMPLES / "extra_arguments.py"
    command = [sys.executable, "-m", "megatron", "train"]
    shown = run_command([*command, "--script", str(script), "--help"])
    shown.check()
    assert "--label-noise X" in shown.stdout
    assert "Fraction of the labels that are excluded." in shown.stdout
    words = args_of(tmp_path, "--label-noise 0.3")
    run_command([*command, "--script", str(script), *words, "--exit-interval", "2"]).check()
    continued = [*command, "--resume", str(tmp_path / "checkpoints")]
    assert f"pass --script {script} too" in run_command(continued).stderr
    run_command([*continued, "--script", str(script), "--exit-interval", "4"]).check()
    assert newest(tmp_path / "checkpoints").name == "iter_0000004"
