"""`megatron evaluate`: the perplexity of texts, document by document, at any layout; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.cli import evaluate
from megatron.core.process_group import single_rank_group
from tests.e2e.test_text_generation import GPT2_SHAPE, byte_level_flags, call_tool, run_config, save
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
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
        ("", "there is nothing to measure; give --tasks TASK … or --text FILE …"),
        ("--tasks a --text {folder}/one.txt", "--tasks and --text are two measurements"),
        ("--text {folder}/no.txt", "cannot read --text {folder}/no.txt"),
        ("--text {folder}/saved", "cannot read --text {folder}/saved"),
        ("--text {folder}/lines.jsonl --json-key body", "--text {folder}/lines.jsonl, line 1 has no text 'body'"),
        (
            "--text {folder}/one.txt --batch-size 0 --max-length -1",
            "--batch-size 0 is not positive; --max-length -1 is",
        ),
        ("--text {folder}/one.txt --max-length 41", "--max-length 41 is greater than the 40 positions"),
        ("--text {folder}/one.txt --output {folder}/no/x", "--output {folder}/no/x is in no folder that exists"),
        (
            "--text {folder}/one.txt --limit 3 --apply-chat-template",
            "--limit has no effect without --tasks TASK …; leave it out; --apply-chat-template has no effect",
        ),
        ("--tasks a --json-key body", "--json-key has no effect without --text FILE …; leave it out"),
        (
            "--tasks a --num-fewshot -1 --log-samples",
            "--num-fewshot -1 is negative; --log-samples has nowhere to write",
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
