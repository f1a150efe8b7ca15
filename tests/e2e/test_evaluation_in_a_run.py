"""Tasks asked while a model is trained: one process's scores come at every layout, and no bit of the run changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training

RUN = "--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 --cpu-matmul mkl --hidden-dropout 0.1"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
CHUNKS = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
FLOAT8 = "--bf16 --fp8-format hybrid --seq-length 32 --max-position-embeddings 32 --ffn-hidden-size 64"
ROPE = "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights"


def write_number_tasks(folder: Path) -> Path:
    """Write a task of choices and one of texts for a tokenizer of numbers; return their folder."""
    folder.mkdir(parents=True)
    rows = [{"question": f"{i} {i + 3}", "choices": ["7", "8 9", "11"], "answer": i % 3} for i in range(5)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shared = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (folder / "choice.yaml").write_text(
        f"""task: number_choice
{shared}output_type: multiple_choice
target_delimiter: " "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
    )
    (folder / "text.yaml").write_text(
        f"""task: number_text
{shared}output_type: generate_until
doc_to_target: "5"
generation_kwargs:
  until: ["9"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""
    )
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "model", "nproc"),
    [
        ("--tensor-model-parallel-size 2", ROPE, 2),
        ("--pipeline-model-parallel-size 2", "", 2),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "", 2),
        ("--expert-model-parallel-size 2", f"{EXPERTS} {ROPE}", 2),
        ("--data-parallel-sharding-strategy optim_grads_params", "", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", ROPE, 4),
        ("--context-parallel-size 2", "", 4),
        (f"{CHUNKS} --tensor-model-parallel-size 2 --sequence-parallel", f"{ROPE} --num-layers 4", 4),
        ("--data-parallel-sharding-strategy optim_grads_params --context-parallel-size 2", ROPE, 4),
        ("--expert-model-parallel-size 4 --context-parallel-size 2", f"{EXPERTS} {ROPE}", 4),
        ("", f"{ROPE} {FLOAT8}", 1),
    ],
    ids=["tp", "pp", "dp", "ep", "weights", "sp", "cp", "chunks sp", "weights cp", "ep cp", "float8"],
)
def test_scores_of_one_process_come_and_the_run_stays_bitwise_the_same(
    tmp_path: Path, layout: str, model: str, nproc: int
) -> None:
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed (the extra eval)")
    tasks = write_number_tasks(tmp_path / "tasks")
    plain = fork_training(toy_args(tmp_path / "plain", RUN, model, layout), nproc).check()
    asked = ["--eval-tasks", "number_choice", "number_text", "--eval-tasks-include-path", str(tasks)]
    asked += ["--eval-tasks-limit", "4"]
    run = fork_training([*toy_args(tmp_path / "run", RUN, model, layout), *asked], nproc).check()
    lines = [line for line in run.metrics if line.get("split") != "tasks"]
    assert exact_figures(lines) == exact_figures(plain.metrics)
    assert_same_checkpoints(*(newest(tmp_path / name / "checkpoints") for name in ("plain", "run")))
    found = [line for line in run.metrics if line.get("split") == "tasks"]
    assert [line["iteration"] for line in found] == [2, 4]
    for line in found:
        assert set(line["scores"]) == {"number_choice", "number_text"}
        assert line["scores"]["number_choice"]["acc"] * 4 in range(5)
        assert line["scores"]["number_text"].keys() == {"exact_match"}
    assert run.stdout.count(" scores at iteration ") == 4
    alone = fork_training([*toy_args(tmp_path / "one", RUN, model), *asked]).check()
    assert found == [line for line in alone.metrics if line.get("split") == "tasks"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--eval-tasks", "t", "--eval-interval", "0"), "--eval-tasks with --eval-interval 0 would ask nothing"),
        (("--eval-tasks-limit", "3"), "--eval-tasks-limit 3 has no effect without --eval-tasks TASK; add it"),
    ],
    ids=["never", "no task"],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = fork_training([*toy_args(tmp_path, RUN), *words])
    assert run.statuses == (2,)
    assert any(said in line for line in (run.stdout + run.errors[0]).splitlines() if line.startswith("error: "))
