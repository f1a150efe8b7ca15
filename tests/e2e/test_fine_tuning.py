"""Fine-tuning from jsonl to answers: learned, generated, the same at every layout, resumed; and what is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.cli import inspect_batch
from megatron.core.datasets.conversation_file import mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import exact_figures
from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.training_run import REPOSITORY, run_command, run_training
from tests.unit.core.datasets.small_chat import write_chat_folder, write_lines

MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 96 --position-embedding-type rope
    --normalization RMSNorm --swiglu --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1
    --tokenizer-type HuggingFaceTokenizer --distributed-backend gloo --log-interval 20 --eval-iters 0
"""
LEARN = "--lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 8 --micro-batch-size 10 --global-batch-size 10"
SHORT = "--lr 1e-3 --lr-decay-style constant --micro-batch-size 2 --global-batch-size 8 --train-iters 4"
TOPICS = [chr(0x4E00 + number) for number in range(100)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of a chat model, and a hundred questions with answers that nothing tells."""
    folder = tmp_path_factory.mktemp("chat")
    write_chat_folder(folder / "model", characters=TOPICS)
    draw = random.Random(0)
    answers = {topic: "".join(draw.choices("abcdefgh", k=draw.randint(2, 4))) for topic in TOPICS}
    (folder / "answers.json").write_text(json.dumps(answers))
    lines = [{"prompt": f"{topic}?", "completion": answer} for topic, answer in answers.items()]
    write_lines(folder / "train.jsonl", lines)
    return folder


def flags(chat: Path, *more: str | Path, data: str | Path = "train.jsonl") -> list[str]:
    words = [*MODEL.split(), "--tokenizer-model", str(chat / "model"), "--train-data-path", str(chat / data)]
    for item in more:
        words += [str(item)] if isinstance(item, Path) else item.split()
    return words


def test_a_hundred_answers_are_learned_and_given(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fork_training(flags(chat, "--sft", LEARN, "--train-iters 60 --save", tmp_path / "checkpoints")).check()
    assert run.losses()[-1] < 0.1
    assert f" > tokenizing {chat}/train.jsonl with chat_template of {chat}/model/tokenizer_config.json" in run.stdout
    assert "100 conversations in 9 samples, 9" in run.stdout
    answers = json.loads((chat / "answers.json").read_text())
    prompts = [f"<|user|>{topic}?<|assistant|>" for topic in answers]
    (tmp_path / "prompts").write_text("\n".join(prompts), encoding="utf-8")
    words = ["--load", tmp_path / "checkpoints", "--prompt-file", tmp_path / "prompts", "--greedy"]
    status, out, error = call_tool(monkeypatch, capsys, *words, "--tokens-to-generate", "8")
    assert (status, error) == (0, "")
    given = [line for line in out.splitlines() if line.startswith("<|user|>")]
    assert given == [prompt + answer for prompt, answer in zip(prompts, answers.values())]


@pytest.fixture(scope="module")
def one_process(chat: Path) -> ForkedRun:
    return fork_training(flags(chat, "--sft", SHORT, "--metrics-jsonl", chat / "one.jsonl")).check()


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        pytest.param("--pipeline-model-parallel-size 2", 2, marks=pytest.mark.long),
        pytest.param("--context-parallel-size 2", 2, marks=pytest.mark.long),
        ("--context-parallel-size 2 --cp-comm-type a2a --micro-batch-size 1", 4),
        ("--use-distributed-optimizer", 2),
    ],
)
def test_every_layout_learns_the_same(
    chat: Path, one_process: ForkedRun, tmp_path: Path, layout: str, nproc: int
) -> None:
    run = fork_training(flags(chat, "--sft", SHORT, layout, "--metrics-jsonl", tmp_path / "metrics.jsonl"), nproc)
    run.check()
    np.testing.assert_allclose(run.losses(), one_process.losses(), rtol=2e-5)
    norms = [[line["grad_norm"] for line in each.iterations()] for each in (run, one_process)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    hashes = [[line["sample_ids_hash"] for line in each.iterations()] for each in (run, one_process)]
    assert hashes[0] == hashes[1]


def test_a_packed_data_set_is_learned_as_its_jsonl_and_a_run_resumes(
    chat: Path,
    one_process: ForkedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--sft", "--input", chat / "train.jsonl", "--output-prefix", chat / "talk", "--workers", "2"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", chat / "model"]
    tool = REPOSITORY / "tools" / "preprocess_data.py"
    done = run_command([sys.executable, tool, *words]).check()
    assert done.stdout.endswith(
        f"Wrote {chat}/talk_sft_document_loss_mask.bin and .idx\nWrote {chat}/talk_sft_document.bin and .idx\n"
    )
    folder = tmp_path / "checkpoints"
    packed = flags(chat, "--sft", SHORT, data="talk_sft_document")
    whole = fork_training([*packed, "--save", str(folder), "--save-interval", "2"]).check()
    assert whole.losses() == one_process.losses()
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    rest = fork_training([*packed, "--load", str(folder), "--metrics-jsonl", str(tmp_path / "rest.jsonl")]).check()
    assert exact_figures(rest.iterations()) == exact_figures(whole.iterations())[2:]
    # The samples of a step are shown by conversation.
    status, out, _ = call_tool(
        monkeypatch, capsys, "--load", folder, "--step", "1", "--ckpt-step", "4", tool=inspect_batch
    )
    assert status == 0
    assert "(equal to the metrics file's)" in out
    assert out.count("<|assistant|>") == out.count("  document ") > 8
    answers = json.loads((chat / "answers.json").read_text())
    masks = IndexedDataset(mask_prefix(chat / "talk_sft_document"))
    counts = [int(masks[number].sum()) for number in range(len(masks))]
    assert counts == [len(answer) + 1 for answer in answers.values()]
    for suffix in (".bin", ".idx"):
        (path,) = (chat / "cache" / "GPTDataset_indices").glob(f"train-{'[0-9a-f]' * 16}{suffix}")
        assert path.read_bytes() == (chat / f"talk_sft_document{suffix}").read_bytes()
        (path,) = path.parent.glob(f"train-*_loss_mask{suffix}")
        assert path.read_bytes() == Path(mask_prefix(chat / "talk_sft_document") + suffix).read_bytes()


@pytest.mark.default
def test_a_micro_batch_without_an_answer_counts_nothing(chat: Path, tmp_path: Path) -> None:
    """Prompts that fill a sample leave no answer: their losses and gradients are zeros, not NaN."""
    long = [{"prompt": "x" * 200, "completion": "y"}] * 16
    write_lines(tmp_path / "long.jsonl", long)
    metrics = ["--metrics-jsonl", str(tmp_path / "long")]
    run = fork_training([*flags(chat, "--sft", SHORT, data=tmp_path / "long.jsonl"), *metrics]).check()
    assert "16 conversations are longer than 97 tokens and are truncated" in run.stdout
    assert [(line["lm_loss"], line["grad_norm"]) for line in run.iterations()] == [(0.0, 0.0)] * 4
    mixed = write_lines(tmp_path / "mixed.jsonl", [*long[:8], *({"prompt": "a", "completion": "b"} for _ in range(8))])
    words = ["--train-mode", "finetune", "--dataset", "JSON-SFT", "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    run = fork_training([*flags(chat, SHORT, data=mixed), *words]).check()
    assert "--dataset JSON-SFT: each conversation is a sample" in run.stdout
    assert all(loss > 0 for loss in run.losses())


@pytest.mark.parametrize(
    ("line", "template", "problem"),
    [
        ('{"prompt": "a"}', None, "bad.jsonl:2: not a conversation: the keys are prompt; use messages"),
        (
            '{"prompt": "a", "completion": "b"}',
            "\n{{ 1 / messages[2].n }}",
            "bad.jsonl:1: {folder}/template.jinja, line 2: UndefinedError",
        ),
        ('{"prompt": "a", "completion": "b"}', "{% if %}", "template.jinja, line 1: "),
    ],
)
def test_a_wrong_line_or_template_ends_with_status_2(
    chat: Path, tmp_path: Path, line: str, template: str | None, problem: str
) -> None:
    write_lines(tmp_path / "bad.jsonl", ['{"prompt": "a", "completion": "b"}', line])
    more = []
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        more = ["--chat-template", str(tmp_path / "template.jinja")]
    done = run_training([*flags(chat, "--sft", SHORT, data=tmp_path / "bad.jsonl"), *more])
    assert done.returncode == 2
    assert problem.replace("{folder}", str(tmp_path)) in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
