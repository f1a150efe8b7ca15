"""`llama3_1.sh` with the flags that its users fine-tune with, on jsonl and on what preprocessing makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli import preprocess_data
from megatron.core.datasets.conversation_file import mask_prefix
from tests.e2e.script_choices.choices import Choices
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.core.datasets.conversations.small_chat import write_chat_folder, write_lines

FOUR = Choices("llama3_1", "bf16", "sel", "2", "2", "1", "1", "auto", "true")
TWO = Choices("llama3_1", "fp8", "full", "1", "1", "2", "", "static", "false")
RAW, PACKED = "LLama-SFT-Raw", "LLama-SFT-Idxmap"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a chat model's tokenizer, train.jsonl, and the data set ``packed`` of it."""
    folder = tmp_path_factory.mktemp("chat")
    topics = [chr(0x4E00 + number) for number in range(60)]
    write_chat_folder(folder / "model", characters=topics)
    lines = [{"prompt": f"{topic}?", "completion": "abcdefgh"[: 2 + n % 5]} for n, topic in enumerate(topics)]
    write_lines(folder / "train.jsonl", lines)
    words = ["--input", folder / "train.jsonl", "--output-prefix", folder / "packed", "--sft", "--workers", "1"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder / "model"]
    assert preprocess_data.main([str(word) for word in words]) == 0
    return folder


def train(chat: Path, folder: Path, choices: Choices, dataset: str) -> ForkedRun:
    (masks,) = chat.glob("packed*_loss_mask.idx")
    data = chat / "train.jsonl" if dataset == RAW else masks.with_name(masks.name.removesuffix("_loss_mask.idx"))
    assert dataset == RAW or mask_prefix(data) == str(masks.with_suffix(""))
    folder.mkdir()
    words = choices.expanded(folder, data, chat / "model")
    words += ["--train-mode", "finetune", "--dataset", dataset, "--metrics-jsonl", str(folder / "metrics.jsonl")]
    return fork_training(words, choices.world_size).check()


def figures(run: ForkedRun, name: str) -> list[float]:
    values = [line[name] for line in run.iterations()]
    assert len(values) == 2
    return values


@pytest.mark.parametrize(
    ("choices", "packs"), [(FOUR, True), pytest.param(TWO, False, marks=pytest.mark.long)], ids=["four", "two"]
)
def test_a_fine_tuning_run_of_the_script_learns_what_one_process_does(
    chat: Path, tmp_path: Path, choices: Choices, packs: bool
) -> None:
    """PACKING packs jsonl too; without it a line is a sample."""
    run = train(chat, tmp_path / "run", choices, RAW)
    assert ("--sft packs conversations" in run.stdout) is packs
    assert (f"--dataset {RAW}: each conversation is a sample" in run.stdout) is not packs
    one = train(chat, tmp_path / "one", choices.on_one_process, PACKED if packs else RAW)
    assert figures(run, "lm_loss") == pytest.approx(figures(one, "lm_loss"), rel=2e-4)
    assert figures(run, "grad_norm") == pytest.approx(figures(one, "grad_norm"), rel=1e-2)
