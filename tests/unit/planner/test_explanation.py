"""An explanation says what the code's own plans say, in text, JSON and HTML, and imports no torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.explain import main
from megatron.cli.planner_arguments import read_planned_run
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.planner.explanation import Explanation, explain, find_changes, first_rank
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, NATIVE
from megatron.planner.memory import MEMORY_PARTS, StageState
from megatron.planner.plan import DEEPEP_AS_ALLTOALL
from megatron.planner.prediction import least_used_bytes, usable_bytes
from megatron.planner.report import to_page, to_text
from megatron.training.theoretical_memory_usage import model_size
from tests.closed_forms.step_traffic import step_traffic
from tests.harness.browser import browse, require_browser
from tests.unit.planner.planned_words import LARGE, SMALL

ROOT = Path(__file__).parents[3]
WORLD_SIZE = 12


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    parsed = read_planned_run(SMALL, WORLD_SIZE)
    return explain(parsed.config, parsed.notes, H100, NATIVE)


def test_ranks_layers_parameters_and_traffic_are_those_of_the_code(explanation: Explanation) -> None:
    report = explanation.to_json()
    config = explanation.config
    assert report["ranks"] == [dict(config.parallel_sizes.place(rank)) for rank in range(WORLD_SIZE)]
    assert report["ranks"][7] == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
    assert [stage["parameters"] for stage in report["stages"]] == list(model_size(config).shards)
    assert report["padded_vocab_size"] == 1024
    assert report["num_microbatches"] == 48 // (2 * 3)
    for stage in range(2):
        chunks = report["stages"][stage]["chunks"]
        assert [chunk["layer_numbers"] for chunk in chunks] == [
            each.layer_numbers for each in config.stage_layout.chunks(stage)
        ]
        sent = {(each["operation"], each["axes"]): each["num_bytes"] for each in report["stages"][stage]["traffic"]}
        expected = step_traffic(config, first_rank(config.parallel_sizes, stage))
        assert sent == {key: volume.num_bytes for key, volume in expected.items()}


def test_the_bubble_is_that_of_all_micro_batches_of_the_schedule(explanation: Explanation) -> None:
    # (p - 1) / (m v), of interleaved stages whose passes are alike.
    assert explanation.bubble == pytest.approx(1 / (8 * 2))
    few = dataclasses.replace(
        explanation.config, training=dataclasses.replace(explanation.config.training, global_batch_size=12 * 48)
    )
    more = explain(few, (), H100, NATIVE)
    assert more.plan.num_microbatches == 96
    assert more.timeline.num_microbatches == 8
    assert more.bubble == pytest.approx(1 / (96 * 2))


def test_the_text_has_every_part_of_memory_and_every_note(explanation: Explanation) -> None:
    noted = dataclasses.replace(explanation, notes=("--window-size 7 has no effect: said here",))
    text = to_text(noted)
    assert all(part in text for part in (*MEMORY_PARTS, "schedule interleaved", "outcome: ok"))
    assert "--window-size 7 has no effect: said here" in text
    used = explanation.prediction.used_bytes
    assert used is not None
    needed = f"{used // 2**20} of {explanation.usable // 2**20} MiB"
    assert f"the GPU with the highest memory use needs {needed}, including libraries" in text
    assert "stage 1: chunk 0: layers 3-4; chunk 1: layers 7-8 + output layer and loss" in text


class _Page(HTMLParser):
    """Collect the tags of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_by_itself_and_has_a_bar_for_each_part_of_each_stage(explanation: Explanation) -> None:
    text = to_page(explanation, (), "rank <1>")
    page = _Page()
    page.feed(text)
    assert page.open == []
    bars = [attributes for tag, attributes in page.tags if tag == "rect" and attributes.get("class") == "part"]
    assert len(bars) == 2 * len(MEMORY_PARTS)
    stage = explanation.prediction.stages[0]
    shares = [float(str(bar["width"])) for bar in bars[: len(MEMORY_PARTS)]]
    assert sum(shares) / 760 == pytest.approx(stage.total / explanation.usable, abs=1e-4)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert "rank &lt;1&gt;" in text
    assert [line for line in text.split('"') if line.startswith("http")] == ["http://www.w3.org/2000/svg"] * 2


def test_epochs_are_counted_against_token_files(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
        for _ in range(10):
            builder.add_document(np.arange(320, dtype=np.uint16))
        builder.finalize()
    words = [word for word in SMALL if word != "--mock-data"]
    parsed = read_planned_run([*words, "--data-path", str(prefix), "--split", "9,1,0"], WORLD_SIZE)
    (need,) = explain(parsed.config, parsed.notes, H100, NATIVE).data.data_sets
    assert (need.tokens, need.samples, need.samples_wanted) == (2880, 89, 20 * 48)
    assert need.epochs == 11  # 960 samples of 32 tokens and one more, in epochs of 2880


def test_the_training_script_explains_too() -> None:
    command = [sys.executable, "pretrain_gpt.py", *SMALL, "--explain", "--world-size", "12"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "12 ranks of h100-80gb" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--world-size", "0"], "--world-size 0 is not between 1 and"),
        (["--world-size", "12", "--gpu", "h1"], "--gpu h1: there are no built-in figures"),
        (["--world-size", "12", "--gpu", "none.json"], "--gpu none.json cannot be read"),
        (["--world-size", "12", "--implementation", "x"], "--implementation x is not known"),
        (["--world-size", "12", "--html", "/nowhere/x.html"], "--html /nowhere/x.html cannot be written"),
        (["--world-size", "13"], "world size 13 is not divisible by tensor(2) x pipeline(2)"),
        (["--world-size", "12", "--hidden-sise", "8"], "--hidden-sise"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.full
def test_a_layout_that_does_not_fit_gets_three_changes_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, "--world-size", "32", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)["changes"]
    assert main([*LARGE, "--world-size", "32"]) == 0
    text = capsys.readouterr().out
    assert "outcome: oom: stage 0 needs" in text
    changes = text.split("changes that would make it fit")[1].splitlines()[1:]
    assert [line.strip()[:2] for line in changes] == ["1.", "2.", "3."]
    assert all("ms per step" in line and "MiB left" in line for line in changes)
    assert [f"{each['flags']}: {each['cost']}" for each in named] == [line.strip()[3:] for line in changes[:3]]


def test_changes_whose_state_alone_does_not_fit_are_rejected_without_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejected = Counter[bool]()

    def counted(states: Sequence[StageState]) -> int:
        least = least_used_bytes(states)
        rejected[least > usable_bytes(H100)] += 1
        return least

    monkeypatch.setattr("megatron.planner.explanation.least_used_bytes", counted)
    found = find_changes(LARGE, 32, read_planned_run, H100, MEGATRON_TE)
    assert rejected[True] > 20
    assert len(found) == 3
    # Predictions of all of them find the same changes.
    monkeypatch.setattr("megatron.planner.explanation.least_used_bytes", lambda states: 0)
    assert find_changes(LARGE, 32, read_planned_run, H100, MEGATRON_TE) == found


def test_a_refused_layout_gets_changes_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--world-size", "13"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("would run with") for line in lines) == 3


@pytest.mark.full
def test_flags_with_an_equals_sign_are_offered_for_removal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--world-size", "12", "--fp8-format=hybrid", "--hidden-size", "72"]) == 2
    assert "would run with 1. (no --fp8-format)" in capsys.readouterr().err


def test_nothing_is_proposed_for_what_no_change_mends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, "--num-attention-heads", "60", "--world-size", "32"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--num-attention-heads 60 is not divisible by --num-query-groups 8" in line


def test_a_browser_shows_every_bar_and_pass_and_asks_no_network(tmp_path: Path) -> None:
    require_browser()
    page = tmp_path / "page.html"
    assert main([*SMALL, "--world-size", "12", "--html", str(page)]) == 0
    seen = json.loads(browse("browser_page.py", str(page))[-1])
    assert seen["outcome"] == "ok"
    assert seen["parts"] == 2 * len(MEMORY_PARTS)
    assert max(seen["widths"]) > 0
    # Two stages, two chunks, eight micro-batches, forward and backward.
    assert seen["passes"] == 2 * 2 * 8 * 2
    assert not seen["overflow"]
    assert seen["requests"] == 0


def test_deepep_is_predicted_as_alltoall() -> None:
    experts = (
        "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type"
    )
    found, known = (
        explain(parsed.config, parsed.notes, H100, NATIVE)
        for parsed in (read_planned_run([*SMALL, *experts.split(), kind], WORLD_SIZE) for kind in ("flex", "alltoall"))
    )
    assert found.prediction == known.prediction
    assert found.to_json()["stages"] == known.to_json()["stages"]
    assert [note for note in found.notes if note not in known.notes] == [DEEPEP_AS_ALLTOALL]
