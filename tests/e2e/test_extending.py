"""The scripts of examples/extend train, resume bitwise, and give the same model at TP 2 and PP 2."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.training import import_script
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.training_run import REPOSITORY, run_command

EXAMPLES = REPOSITORY / "examples" / "extend"
SHORT = """
    --train-iters 4 --lr-decay-style constant --lr-warmup-iters 0 --eval-iters 0 --hidden-dropout 0
    --attention-dropout 0
"""
ALL = "--activation-func mish_glu --normalization dynamic_tanh --attention gated --loss label_smoothing"
EXPERTS = """
    --num-experts 4 --activation-func mish --recompute-granularity selective --recompute-modules moe_act
    --normalization dynamic_tanh --qk-layernorm
"""
RECOMPUTE = """
    --loss focal --z-loss-coeff 0.01 --attention gated --group-query-attention --num-query-groups 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
TP_2_PP_2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"


def run_with_examples(argv: Sequence[str], faults: Faults) -> int:
    """Train with what the examples of the model register."""
    for name in ("activation", "attention", "loss", "norm"):
        import_script(str(EXAMPLES / f"{name}.py"))
    return run_with_faults(argv, faults)


def train(folder: Path, *more: str, nproc: int = 1) -> ForkedRun:
    words = toy_args(folder, SHORT, *more, "--save-interval 2")
    return fork_training(words, nproc, program=run_with_examples)


def registers_and_ends(script: Path, argv: Sequence[str]) -> list[list[str]]:
    """Run a script as the program, and return the command lines with which it calls `pretrain`."""
    called: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *argv])
        patch.setattr("megatron.training.pretrain", lambda: called.append(sys.argv[1:]))
        patch.setattr("megatron.core.registry._REGISTERED", {})
        patch.setattr("megatron.core.registry._SCRIPTS", [])
        runpy.run_path(str(script), run_name="__main__")
    return called


@pytest.mark.parametrize(("nproc", "layout"), [(1, ""), (4, TP_2_PP_2)], ids=["one", "tp2-pp2"])
def test_registered_parts_resume_bitwise(tmp_path: Path, nproc: int, layout: str) -> None:
    whole = train(tmp_path / "whole", ALL, layout, nproc=nproc).check()
    first = train(tmp_path / "parts", ALL, layout, "--exit-interval 2", nproc=nproc).check()
    second = train(tmp_path / "parts", ALL, layout, nproc=nproc).check()
    assert len(first.iterations()) == 2
    assert exact_figures(second.iterations()) == exact_figures(whole.iterations())
    assert_same_checkpoints(newest(tmp_path / "whole/checkpoints"), newest(tmp_path / "parts/checkpoints"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(ALL, id="all", marks=pytest.mark.long),
        pytest.param(EXPERTS, id="experts"),
        pytest.param(RECOMPUTE, id="recompute", marks=pytest.mark.long),
    ],
)
def test_registered_parts_are_the_same_at_any_layout(tmp_path: Path, flags: str) -> None:
    one, four = (train(tmp_path / str(n), flags, layout, nproc=n) for n, layout in ((1, ""), (4, TP_2_PP_2)))
    assert one.check().losses() == pytest.approx(four.check().losses(), rel=2e-6)
    assert [line["grad_norm"] for line in one.iterations()] == pytest.approx(
        [line["grad_norm"] for line in four.iterations()], rel=1e-4
    )


@pytest.mark.parametrize("name", ["activation", "attention", "loss", "norm"])
def test_an_example_starts_training(name: str) -> None:
    assert registers_and_ends(EXAMPLES / f"{name}.py", ["--lr", "1"]) == [["--lr", "1"]]


def test_a_checkpoint_needs_the_registration(tmp_path: Path) -> None:
    train(tmp_path, "--attention gated --normalization dynamic_tanh --train-iters 2").check()
    run = fork_training([*toy_args(tmp_path, SHORT), "--use-checkpoint-args"])
    assert run.statuses == (2,)
    assert run.errors[0].splitlines() == [
        f"error: {kind} {name} is not registered; pass the script that registers it with --script FILE, or run that "
        "script instead of pretrain_gpt.py"
        for kind, name in (("attention", "gated"), ("normalization", "dynamic_tanh"))
    ]


def test_megatron_train_runs_a_script(tmp_path: Path) -> None:
    script, megatron = EXAMPLES / "attention.py", [sys.executable, "-m", "megatron"]
    words = [*toy_args(tmp_path, SHORT, "--train-iters 2 --tensor-model-parallel-size 2"), "--attention", "gated"]
    run_command([*megatron, "train", "--script", script, "--nproc", "2", *words]).check()
    assert newest(tmp_path / "checkpoints").name == "iter_0000002"
    continued = run_command([*megatron, "train", "--resume", tmp_path / "checkpoints"])
    assert continued.returncode == 2
    assert continued.stderr == (
        f"error: --resume {tmp_path / 'checkpoints'}: the run used the script {script}; pass --script {script} too\n"
    )
    shown = run_command([*megatron, "train", "--script", script, "--help-all"]).check().stdout
    assert "--nproc N" in shown
    assert "--attention {self_attention,gated}" in shown
    generate = [*megatron, "generate", "--load", tmp_path / "checkpoints", "--prompt", "1 2", "--max-tokens", "2"]
    assert len(run_command([*generate, "--script", script]).check().stdout.split()) == 4


def test_a_script_that_does_not_train_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "only.py"
    script.write_text("from megatron.training import register_loss\nregister_loss('mean', len)\n")
    found = run_command([sys.executable, "-m", "megatron", "train", "--nproc", "2", "--script", script])
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1] == (
        f'error: --script {script} ends without training; call pretrain() under if __name__ == "__main__":'
    )
