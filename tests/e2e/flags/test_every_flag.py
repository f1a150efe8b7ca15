"""A flag that is accepted does something: a run of two steps with it differs from the run without it, or says why not.

A seeded part of the flags is tried by default, all of them in the long tests.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run_config import command_line_fields
from megatron.core.config_base import FieldSpec
from tests.e2e.flags.flag_trials import Trial, trials
from tests.harness.observed_run import Observation, observe

TRIALS = trials()
FIELDS = {spec.flags[0]: spec for _, spec in command_line_fields()}
SAMPLE = frozenset(random.Random(12).sample(sorted(TRIALS), 4))
LAYOUT_TOLERANCE = 1e-4
# On this machine, or by their nature, these end the run or do nothing; the line says which.
ANSWERED = {
    # A script registers what these select.
    "--callbacks": "error: --callbacks x: possible values are none; a script that registers x adds it",
    "--loggers": "error: --loggers x: possible values are none; a script that registers x adds it",
    "--optimizer-args": "error: --optimizer-args eps=1e-6: --optimizer adam has flags of its own",
    "--attention": "error: --attention gated: possible values are self_attention; a script that registers gated",
    "--loss": "error: --loss focal: possible values are cross_entropy; a script that registers focal",
    # A dispatch mode observes the run, and under it torch compiles nothing.
    "--compile": "error: --compile: torch.compile failed for TransformerLayer (",
    "--cuda-graph-impl": "error: --cuda-graph-impl local needs a CUDA device",
    "--enable-cuda-graph": "error: --cuda-graph-impl local needs a CUDA device",
    "--disable-bf16-reduced-precision-matmul": "--disable-bf16-reduced-precision-matmul has no effect on a CPU",
    "--empty-unused-memory-level": "--empty-unused-memory-level 2 has no effect on a CPU",
    "--explain": "error: --explain is not supported by this script",  # but by pretrain_gpt.py before it trains
    "--exit-on-missing-checkpoint": "contains no checkpoint",
    "--exit-signal-handler": "--exit-signal-handler has no effect with --exit-signal SIGTERM",
    "--inprocess-restart": "error: --inprocess-restart: this script does not keep its rank",
    "--log-arguments": "--log-arguments has no effect: all arguments are printed",
    "--gemm-activation-fusion": "error: --gemm-activation-fusion needs a CUDA device",
    "--local-rank": "--local-rank 1 has no effect on a CPU",
    "--nccl-communicator-config-path": "/nccl.yaml has no effect: the process groups do not use NCCL",
    "--use-nccl-ub": "--use-nccl-ub has no effect: the process groups do not use NCCL",
    "--no-gradient-accumulation-fusion": "--no-gradient-accumulation-fusion has no effect on a CPU",
    "--no-pin-cpu-grads": "--no-pin-cpu-grads has no effect on a CPU",
    "--no-pin-cpu-params": "--no-pin-cpu-params has no effect on a CPU",
    "--optimizer-cuda-graph": "error: --optimizer-cuda-graph needs a CUDA device",
    "--overlap-step-results": "--overlap-step-results has no effect on a CPU",
    "--optimizer-offload-auto-threshold": "--optimizer-offload-auto-threshold 1024 has no effect on a CPU",
    "--use-torch-optimizer-for-cpu-offload": "--use-torch-optimizer-for-cpu-offload has no effect on a CPU",
    "--max-consecutive-skipped-iterations": "1 iterations in a row had gradients that are not finite",
    "--max-spikes": "--max-spikes 0 is reached",
    # The tests go without these packages.
    "--moe-deepep-num-sms": "--moe-deepep-num-sms 24 has no effect without DeepEP",
    "--eval-tasks": "error: --eval-tasks t needs the package lm-eval",
    "--eval-tasks-include-path": "/t has no effect without --eval-tasks",
    "--eval-tasks-interval": "--eval-tasks-interval 2 has no effect without --eval-tasks",
    "--eval-tasks-limit": "--eval-tasks-limit 2 has no effect without --eval-tasks",
    "--eval-tasks-num-fewshot": "--eval-tasks-num-fewshot 2 has no effect without --eval-tasks",
    "--mlflow-experiment": "error: --mlflow-experiment e needs the package mlflow",
    "--mlflow-run-name": "--mlflow-run-name x has no effect without --mlflow-experiment",
    "--mlflow-tracking-uri": "/m has no effect without --mlflow-experiment",
    "--wandb-entity": "--wandb-entity x has no effect without --wandb-project",
    "--wandb-exp-name": "--wandb-exp-name x has no effect without --wandb-project",
    "--wandb-project": "error: --wandb-project p needs the package wandb",
    "--wandb-save-dir": "/w has no effect without --wandb-project",
    "--train-data": "error: --train-data: this script does not tokenize text",  # but pretrain_gpt.py does
    "--record-memory-history": "--record-memory-history has no effect on a CPU",
}
# Their companions are answered so, and with those they have nothing to change.
OF_ANSWERED = {
    "--cuda-graph-warmup-steps": "--cuda-graph-impl",
    "--disable-symmetric-registration": "--use-nccl-ub",
    "--inprocess-barrier-timeout": "--inprocess-restart",
    "--inprocess-empty-cuda-cache": "--inprocess-restart",
    "--inprocess-hard-timeout": "--inprocess-restart",
    "--inprocess-max-iterations": "--inprocess-restart",
    "--inprocess-monitor-thread-interval": "--inprocess-restart",
    "--loss-cuda-graph": "--cuda-graph-impl",
    "--memory-snapshot-path": "--record-memory-history",
    "--non-persistent-local-ckpt-dir": "--inprocess-restart",
    "--non-persistent-save-interval": "--inprocess-restart",
    "--replication": "--inprocess-restart",
    "--replication-jump": "--inprocess-restart",
    "--test-data": "--train-data",
    "--text-key": "--train-data",
    "--valid-data": "--train-data",
}
# Alone they ask for what is done anyway, for some of checkpoints that there are none of, or for slow saves to be told.
STATED = {
    "--add-qkv-bias",
    "--data-args-path",
    "--dist-ckpt-strictness",
    "--distributed-backend",
    "--distributed-timeout-minutes",
    "--preemption-grace-seconds",
    "--keep-last",
    "--checkpoint-validation-steps",
    "--no-load-optim",
    "--no-load-rng",
    "--no-verify-checkpoint",
    "--openai-gelu",
    "--override-opt-param-scheduler",
    "--result-rejected-tracker-filename",
    "--save-retain-interval",
    "--tokenizer-type",
    "--use-checkpoint-opt-param-scheduler",
}
COMPUTED = ("weights", "shape", "meaning", "recipe")
"""The roles of fields that decide what is computed."""


@pytest.fixture(scope="module")
def plain_runs() -> dict[Any, Observation]:
    """Return the runs without a flag that have been seen, by what they begin with."""
    return {}


def seen_of(trial: Trial, folder: Path, files: dict[str, Path], plain_runs: dict[Any, Observation]) -> Observation:
    """Return the observation of the trial's run without its flag."""
    key = dataclasses.replace(trial, flag="", value=())
    if key not in plain_runs:
        plain_runs[key] = observe(trial.plain(folder, files), folder, trial.num_processes, trial.event)
    return plain_runs[key]


def losses(seen: Observation) -> list[float]:
    return [line["lm_loss"] for line in seen.figures if line.get("split") != "samples"]


def has_said(seen: Observation, flag: str) -> bool:
    """Tell whether a line says that the flag has no effect."""
    return any(line.startswith(flag) and " has no effect" in line for line in seen.lines)


@pytest.mark.parametrize(
    "flag", [pytest.param(flag, marks=() if flag in SAMPLE else pytest.mark.long) for flag in TRIALS]
)
def test_a_flag_changes_a_run(
    flag: str, files: dict[str, Path], plain_runs: dict[Any, Observation], tmp_path: Path
) -> None:
    trial, spec = TRIALS[flag], FIELDS[flag]
    before = seen_of(trial, tmp_path / "plain", files, plain_runs)
    after = observe(trial.changed(tmp_path / "changed", files), tmp_path / "changed", trial.num_processes, trial.event)
    if flag in ANSWERED or flag in OF_ANSWERED:
        answer = ANSWERED[OF_ANSWERED.get(flag, flag)]
        assert any(answer in line for line in after.lines), after.lines
        return
    changes = after.changes(before)
    assert after.status == 0, after.lines
    assert changes, f"{trial} changes nothing that is seen, and no line says so"
    assert not has_said(after, flag), after.lines
    if before.status == 0:
        assert_true_to_role(spec, before, after)


def assert_true_to_role(spec: FieldSpec, before: Observation, after: Observation) -> None:
    """Assert that a flag changes the losses (or which weights are saved) if it says so, and only then."""
    if spec.options.role in COMPUTED:
        assert (losses(after), after.files) != (losses(before), before.files), "it is said to decide what is computed"
    elif spec.options.role == "layout":
        assert losses(after) == pytest.approx(losses(before), rel=LAYOUT_TOLERANCE)
    elif spec.owner == "LoggingConfig" and len(after.figures) == len(before.figures):
        assert losses(after) == losses(before)


@pytest.mark.long
@pytest.mark.parametrize("flag", TRIALS)
def test_a_flag_alone_is_never_silent(
    flag: str, files: dict[str, Path], plain_runs: dict[Any, Observation], tmp_path: Path
) -> None:
    trial = Trial(flag, TRIALS[flag].value, event=TRIALS[flag].event)
    before = seen_of(trial, tmp_path / "plain", files, plain_runs)
    after = observe(trial.changed(tmp_path / "changed", files), tmp_path / "changed", 1, trial.event)
    is_refused = any(line.startswith("error: ") for line in after.lines)
    assert after.changes(before) or flag in STATED or is_refused, f"{flag} changes nothing, and no line says so"


def test_two_runs_of_one_command_line_look_the_same(tmp_path: Path) -> None:
    trial = Trial("", num_processes=2)
    first, second = (
        observe(trial.plain(tmp_path / name, {}), tmp_path / name, trial.num_processes) for name in ("first", "second")
    )
    assert first.status == 0
    assert second.changes(first) == set()
