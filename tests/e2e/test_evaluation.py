"""`megatron evaluate`, tasks asked during training, and lm-eval's requests to the server."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.cli import evaluate
from megatron.core.inference.inference_request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.process_group import single_rank_group
from tests.e2e.test_text_generation import GPT2_SHAPE, byte_level_flags, call_tool, run_config, save
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.openai_server import NAME, served
from tests.unit.core.inference.small_models import build, whole_logits

TEXTS = ("hello, wörld", "", "a text that is longer than the forty positions that the model has learned", "hell")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with learned positions, and texts: three lines of one file and another file."""
    folder = tmp_path_factory.mktemp("evaluated")
    save(folder / "saved", f"{GPT2_SHAPE} {byte_level_flags(folder)}")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS[:3]))
    (folder / "one.txt").write_text(TEXTS[3])
    return folder


def expected_loss(folder: Path, text: str, max_length: int) -> tuple[float, int]:
    """Return the sum of a text's losses and how many tokens it has, from the model as it was made."""
    config, tokenizer = run_config(f"{GPT2_SHAPE} {byte_level_flags(folder)}")
    assert tokenizer.eod_id is not None
    model = build(config.model, single_rank_group(), seed=77)
    ids = [tokenizer.eod_id, *tokenizer.tokenize(text)]
    total = 0.0
    for start in range(0, len(ids) - 1, max_length):
        window = torch.tensor(ids[start : start + max_length + 1])
        logits = whole_logits(model, window[None, :-1])[:, 0, : tokenizer.vocab_size].double()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total, len(ids) - 1


@pytest.mark.parametrize("max_length", [40, 13])
def test_perplexities_are_those_of_each_document_alone(folder: Path, max_length: int, tmp_path, monkeypatch, capsys):
    words = ("--load", folder / "saved", "--text", folder / "lines.jsonl", folder / "one.txt", "--batch-size", "3")
    out = tmp_path / "found.jsonl"
    status, text, error = call_tool(
        monkeypatch, capsys, *words, "--output", out, "--max-length", str(max_length), tool=evaluate
    )
    assert (status, error) == (0, "")
    lines, found = text.splitlines(), [json.loads(line) for line in out.read_text().splitlines()]
    expected = [expected_loss(folder, each, max_length) for each in TEXTS]
    names = [*(f"{folder}/lines.jsonl:{number}" for number in (1, 3, 5)), str(folder / "one.txt"), "4 documents"]
    assert [each["document"] for each in found] == names
    for (loss, count), each, line in zip(expected, found, lines, strict=False):
        assert each["tokens"] == count
        assert each["log_likelihood"] == pytest.approx(-loss, rel=1e-5)
        assert each["perplexity"] == pytest.approx(math.exp(loss / max(count, 1)), rel=1e-5)
        assert f"| tokens: {count} | perplexity: {each['perplexity']:.4f} |" in line
    total, count = (sum(values) for values in zip(*expected, strict=True))
    num_bytes = sum(len(each.encode()) for each in TEXTS)
    assert found[-1]["bits_per_byte"] == pytest.approx(total / math.log(2.0) / num_bytes, rel=1e-5)
    assert lines[-1].startswith(f"4 documents | tokens: {count} | loss: ")
    assert numbers(lines[-1])[2:3] == pytest.approx([total / count], rel=1e-5)
    assert len(lines) == 5


def numbers(line: str) -> list[float]:
    """Return the numbers of a printed line."""
    return [float(word) for word in line.split() if word.replace(".", "").isdigit()]


def _evaluate(argv: Sequence[str], faults: Faults) -> int:
    return evaluate.main(list(argv))


def test_four_processes_print_the_same_once(folder: Path, monkeypatch, capsys) -> None:
    words = ["--load", str(folder / "saved"), "--text", str(folder / "lines.jsonl")]
    _, alone, _ = call_tool(monkeypatch, capsys, *words, tool=evaluate)
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    run = fork_training([*words, *layout], 4, program=_evaluate).check()
    assert run.outputs[1:] == ("", "", "")
    for line, expected in zip(run.outputs[0].splitlines(), alone.splitlines(), strict=True):
        assert numbers(line) == pytest.approx(numbers(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "there is nothing to evaluate; pass --tasks TASK … or --text FILE …"),
        ("--tasks a --text {folder}/one.txt", "--tasks and --text exclude each other"),
        ("--text {folder}/no.txt", "cannot read --text {folder}/no.txt"),
        ("--text {folder}/saved", "cannot read --text {folder}/saved"),
        ("--text {folder}/lines.jsonl --json-key body", "--text {folder}/lines.jsonl, line 1 has no string 'body'"),
        (
            "--text {folder}/one.txt --batch-size 0 --max-length -1",
            "--batch-size 0 is not positive; --max-length -1 is",
        ),
        ("--text {folder}/one.txt --max-length 41", "--max-length 41 is greater than the model's 40 learned positions"),
        ("--text {folder}/one.txt --output {folder}/no/x", "--output {folder}/no/x is in a folder that does not exist"),
        (
            "--text {folder}/one.txt --limit 3 --apply-chat-template",
            "--limit has no effect without --tasks TASK …; omit it; --apply-chat-template has no effect",
        ),
        ("--tasks a --json-key body", "--json-key has no effect without --text FILE …; omit it"),
        (
            "--tasks a --num-fewshot -1 --log-samples",
            "--num-fewshot -1 is negative; --log-samples needs an output file",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(folder: Path, words: str, message: str, monkeypatch, capsys) -> None:
    given = [word.format(folder=folder) for word in words.split()]
    status, _, error = call_tool(monkeypatch, capsys, "--load", folder / "saved", *given, tool=evaluate)
    assert status == 2
    assert error.startswith("error: ")
    assert message.format(folder=folder) in error
    assert error.count("\n") == 1


def test_tasks_without_their_package_are_one_line(folder: Path, monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else find(name, *more)
    )
    status, out, error = call_tool(
        monkeypatch, capsys, "--load", folder / "saved", "--tasks", "arc_easy", tool=evaluate
    )
    assert (status, out) == (2, "")
    assert "--tasks needs the package lm-eval, which is not installed; install it with: pip install lm-eval" in error
    assert error.count("\n") == 1


RUN = "--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 --cpu-gemm-backend mkl --hidden-dropout 0.1"
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
        (("--eval-tasks", "t", "--eval-interval", "0"), "--eval-tasks with --eval-interval 0 would never run"),
        (("--eval-tasks-limit", "3"), "--eval-tasks-limit 3 has no effect without --eval-tasks TASK; add it"),
    ],
    ids=["never", "no task"],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = fork_training([*toy_args(tmp_path, RUN), *words])
    assert run.statuses == (2,)
    assert any(said in line for line in (run.stdout + run.errors[0]).splitlines() if line.startswith("error: "))


pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

PAIRS = [("two and two", " is four"), ("a", "b c"), ("the end of a longer text is", " near"), ("x", "yz")]


@pytest.mark.long
def test_lm_eval_scores_and_continues_texts_through_the_server(tmp_path) -> None:
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = tmp_path / "tokenizer"
    with served(folder) as server:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )
        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=NAME,
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            num_concurrent=3,
            batch_size=2,
            max_length=400,
        )
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
        scores = model.loglikelihood(asked, disable_tqdm=True)
        for (context, rest), (score, is_greedy) in zip(PAIRS, scores, strict=True):
            ids, prompt = server.tokenizer.tokenize(context + rest), server.tokenizer.tokenize(context)
            request = GenerationRequest(prompts=(tuple(ids),), max_new_tokens=0, log_probabilities=True)
            (known,) = server.engine.generate(request)
            assert known.log_probabilities is not None
            assert score == pytest.approx(sum(known.log_probabilities[len(prompt) - 1 :]))
            likeliest = GenerationRequest(
                prompts=(tuple(prompt),), max_new_tokens=len(ids) - len(prompt), sampling=SamplingConfig(greedy=True)
            )
            assert is_greedy == (server.engine.generate(likeliest)[0].tokens == ids[len(prompt) :])
        until = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
        texts = model.generate_until(
            [Instance("generate_until", {}, (context, until), n) for n, (context, _) in enumerate(PAIRS)],
            disable_tqdm=True,
        )
        eod = server.tokenizer.eod_id
        assert eod is not None
        greedy = GenerationRequest(
            prompts=tuple(tuple(server.tokenizer.tokenize(context)) for context, _ in PAIRS),
            max_new_tokens=12,
            sampling=SamplingConfig(greedy=True),
            stop=StopRule(end_tokens=frozenset((eod,))),
        )
        assert texts == [server.tokenizer.detokenize(each.tokens) for each in server.engine.generate(greedy)]
