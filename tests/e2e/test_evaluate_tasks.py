"""Scores of lm-evaluation-harness through this project are those through transformers on the exported folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import evaluate
from tests.e2e.test_convert import run_converter
from tests.e2e.test_text_generation import GPT2_SHAPE, LLAMA_SHAPE, byte_level_flags, call_tool, save
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.local_tasks import NAMES, write_tasks
from tests.unit.core.datasets.small_chat import write_chat_folder

pytestmark = pytest.mark.long
pytest.importorskip("lm_eval", reason="the package lm-eval is not installed (the extra eval)")
pytest.importorskip("accelerate", reason="lm-eval asks for accelerate where it runs models of transformers itself")


def begin_with_a_token(folder: Path) -> str:
    """Write a tokenizer that puts a token in front of each text, as Llama's does; return its flags."""
    write_chat_folder(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (token,) = [each["id"] for each in content["added_tokens"] if each["content"] == "<|system|>"]
    begin = {"SpecialToken": {"id": "<|system|>", "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text[0]],
        "pair": [begin, *text],
        "special_tokens": {"<|system|>": {"id": "<|system|>", "ids": [token], "tokens": ["<|system|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<|system|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def checkpoint(request, tmp_path_factory) -> Path:
    """A native checkpoint of random weights; the one of Llama's kind has a token in front of each text."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        save(folder / "native", f"{GPT2_SHAPE} {byte_level_flags(folder)}")
    else:
        save(folder / "native", f"{LLAMA_SHAPE} {begin_with_a_token(folder / 'tokenizer')}")
    return folder / "native"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "local")


def by_transformers(folder: Path, tasks: Path, **options: Any) -> dict[str, Any]:
    """Return what the harness finds with transformers and the files that were exported."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=5)
    found = simple_evaluate(
        model,
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    assert found is not None
    return dict(found)


def answers(results: dict[str, Any], name: str) -> list[Any]:
    """Return the answers to a task's questions in their order."""
    samples = sorted(results["samples"][name], key=lambda sample: int(sample["doc_id"]))
    return [sample["filtered_resps"] for sample in samples]


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ((), {}),
        (("--num-fewshot", "2", "--limit", "7"), {"num_fewshot": 2, "limit": 7}),
        (("--apply-chat-template",), {"apply_chat_template": True}),
    ],
    ids=["plain", "examples", "conversations"],
)
def test_scores_are_those_of_transformers(
    more: Sequence[str], options: dict[str, Any], checkpoint: Path, tasks: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    if more == ("--apply-chat-template",) and "gpt2" in checkpoint.parent.name:
        assert (
            "no chat template"
            in call_tool(
                monkeypatch,
                capsys,
                "--load",
                checkpoint,
                "--tasks",
                *NAMES,
                "--include-path",
                tasks,
                *more,
                tool=evaluate,
            )[2]
        )
        return
    run_converter(checkpoint, tmp_path / "hf", "--saver hf")
    words = ("--load", checkpoint, "--tasks", *NAMES, "--include-path", tasks, "--batch-size", "5", *more)
    out = tmp_path / "results.json"
    status, table, error = call_tool(monkeypatch, capsys, *words, "--output", out, "--log-samples", tool=evaluate)
    assert (status, error) == (0, "")
    assert all(f"|{name}" in table.replace(" ", "") for name in NAMES)
    found, expected = json.loads(out.read_text()), by_transformers(tmp_path / "hf", tasks, **options)
    for name, metrics in (("local_choice", ("acc,none", "acc_norm,none")), ("local_text", ("exact_match,none",))):
        for metric in metrics:
            assert found["results"][name][metric] == expected["results"][name][metric], metric
    assert answers(found, "local_text") == answers(expected, "local_text")
    for ours, theirs in zip(answers(found, "local_choice"), answers(expected, "local_choice"), strict=True):
        for (value, is_greedy), (other, is_theirs) in zip(ours, theirs, strict=True):
            assert value == pytest.approx(float(other), rel=2e-6)
            assert is_greedy == (str(is_theirs) == "True")
    rolled = found["results"]["local_rolling"]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert rolled[metric] == pytest.approx(expected["results"]["local_rolling"][metric], rel=2e-6)


def _evaluate(argv: Sequence[str], faults: Faults) -> int:
    return evaluate.main(list(argv))


@pytest.mark.parametrize(
    ("processes", "layout"),
    [(2, "--tensor-model-parallel-size 2"), (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")],
)
def test_several_processes_find_the_same(
    processes: int, layout: str, checkpoint: Path, tasks: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    words = ["--load", checkpoint, "--tasks", ",".join(NAMES), "--include-path", tasks, "--log-samples", "--output"]
    assert call_tool(monkeypatch, capsys, *words, tmp_path / "one.json", tool=evaluate)[0] == 0
    argv = [*map(str, words), str(tmp_path / "several.json"), *layout.split()]
    run = fork_training(argv, processes, program=_evaluate).check()
    assert [bool(output) for output in run.outputs] == [True] + [False] * (processes - 1)
    one, several = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "several.json"))
    for name in NAMES[::2]:
        assert {key: value for key, value in one["results"][name].items() if "stderr" not in key} == {
            key: value for key, value in several["results"][name].items() if "stderr" not in key
        }
    assert answers(one, "local_text") == answers(several, "local_text")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--tasks local_choices",
            "--tasks local_choices is neither a known task nor a file; did you mean local_cho",
        ),
        ("--tasks broken", "--tasks broken: "),
        ("--tasks empty", "--tasks empty: "),
        (
            "--tasks local_text --max-length 6",
            "generates 7 tokens (max_gen_toks), but the model's context has 6 tokens",
        ),
        ("--tasks local_choice --max-length 2", "tokens at once, but the model's context has 2 tokens"),
        ("--tasks wrong_field", "the tasks wrong_field cannot be run: "),
    ],
)
def test_tasks_that_cannot_be_run_are_one_line(
    words: str, message: str, checkpoint: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    tasks = write_tasks(tmp_path / "local")
    choice = (tasks / "choice.yaml").read_text()
    (tasks / "broken.yaml").write_text(choice.replace("local_choice", "broken").replace("questions.jsonl", "no.jsonl"))
    (tasks / "empty.yaml").write_text(
        choice.replace("local_choice", "empty").replace("test_split: test", "test_split: x")
    )
    (tasks / "wrong.yaml").write_text(
        choice.replace("local_choice", "wrong_field").replace(
            "{{question}}", "{{question.no.such if answer == 2 else question}}"
        )
    )
    status, out, error = call_tool(
        monkeypatch, capsys, "--load", checkpoint, "--include-path", tasks, *words.split(), tool=evaluate
    )
    assert (status, out) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
