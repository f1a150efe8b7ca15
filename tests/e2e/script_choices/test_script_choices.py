"""Every combination of choices in two users' scripts trains as one process does, or is refused.

Each log parses with expressions written for Megatron's lines. A seeded part is tried by default,
more in the long tests.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.native import NativeSource
from megatron.cli import preprocess_data
from megatron.config.arguments import resolve_arguments
from megatron.core.datasets.conversation_file import mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError
from tests.e2e.megatron_lines import parse
from tests.e2e.toy_run import newest
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.core.datasets.small_chat import write_chat_folder, write_lines

SCRIPTS = Path(__file__).with_name("user_scripts")
SMALL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --seq-length 64
    --max-position-embeddings 64 --train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 0 --global-batch-size 4 --lr 1e-3
    --eval-iters 0 --num-workers 0 --initial-loss-scale 4096 --split 100,0,0 --cpu-gemm-backend mkl
"""
"""Given at the end of every script: two iterations of a small model."""
_VALUES = {
    "script": ("llama3_1", "qwen2_5"),
    "PR": ("fp16", "bf16", "fp8"),
    "AC": ("none", "sel", "full", "offload"),
    "TP": ("1", "2"),
    "PP": ("1", "2"),
    "CP": ("1", "2"),
    "VP": ("", "1"),
    "OPTIMIZER_OFFLOAD": ("false", "static", "auto"),
    "PACKING": ("false", "true"),
}
_OF_PRECISION = ("--fp16", "--apply-query-key-layer-scaling", "--bf16")


@dataclasses.dataclass(frozen=True)
class Choices:
    """Hold one script and one value of each of its choices."""

    script: str
    PR: str
    AC: str
    TP: str
    PP: str
    CP: str
    VP: str
    OPTIMIZER_OFFLOAD: str
    PACKING: str

    def __str__(self) -> str:
        """Return the values that are not empty, for the name of a test."""
        return "-".join(f"{name}{value}" for name, value in dataclasses.asdict(self).items() if value)

    @property
    def world_size(self) -> int:
        """Return the number of processes of one copy of the model."""
        return int(self.TP) * int(self.PP) * int(self.CP)

    @property
    def on_one_process(self) -> Choices:
        """Return the choices that compute the same on one process, without what saves memory."""
        return dataclasses.replace(self, TP="1", PP="1", CP="1", VP="", AC="none", OPTIMIZER_OFFLOAD="false")

    def expanded(self, folder: Path, data: Path, load: Path) -> list[str]:
        """Return the arguments of ``pretrain_gpt.py`` that the script comes to, with a small model at the end."""
        choices = {name: value for name, value in dataclasses.asdict(self).items() if name != "script"}
        environment = choices | {
            "LAUNCHER": "printf %s\\n",  # one word a line
            "OUTPUT": str(folder),
            "DATA_PATH": str(data),
            "LOAD": str(load),
            "MODEL_SIZE": {"llama3_1": "8B", "qwen2_5": "14B"}[self.script],
        }
        command = ["bash", str(SCRIPTS / f"{self.script}.sh"), *SMALL.split()]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        entry, *words = done.stdout.splitlines()
        assert entry == "pretrain_gpt.py"
        return words


def all_choices() -> list[Choices]:
    """Return every combination."""
    return [Choices(*values) for values in itertools.product(*_VALUES.values())]


def in_float32(words: list[str]) -> list[str]:
    """Return a command line without the flags of its precision."""
    return [word for word in words if word not in _OF_PRECISION]


# Losses of two iterations and gradient norms, against one process: what other orders of sums explain. Measured over
# layouts, losses differ by 2.4e-5 (fp8), 3.3e-6 (bf16), 1.2e-6 (fp16) at most, and norms by 1.4e-3, 4.2e-4 and 1e-4.
# These scripts draw small weights, which count for little in a first loss: the norms are the sharper of the two.
TOLERANCES = {"float32": 1e-5, "fp16": 1e-4, "bf16": 1e-4, "fp8": 2e-4}
NORM_TOLERANCES = {"float32": 1e-4, "fp16": 5e-3, "bf16": 5e-3, "fp8": 1e-2}
NOT_MEANINGFUL = "--num-layers-per-virtual-pipeline-stage 1 divides a pipeline, but --pipeline-model-parallel-size is 1"
END = 256  # the tokenizer's end of text


DRAWN = random.Random(7).sample(all_choices(), 260)
FULL, LONG = DRAWN[:8], DRAWN[8:]
Train = Callable[[Choices, bool], ForkedRun]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return documents of unequal length over the vocabulary of bytes."""
    prefix = tmp_path_factory.mktemp("data") / "text_document"
    chance = np.random.default_rng(3)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in chance.integers(5, 40, size=120):
            builder.add_document(np.append(chance.integers(0, 60, size=length), END).astype(np.uint16))
        builder.finalize()
    return prefix


@pytest.fixture(scope="module")
def train(data: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return what runs a combination, or it in float32; no combination is run twice."""

    @functools.cache
    def run(choices: Choices, is_float32: bool) -> ForkedRun:
        folder = tmp_path_factory.mktemp("run")
        words = choices.expanded(folder, data, tokenizer_folder)
        words += ["--data-cache-path", str(data.parent / "cache"), "--metrics-jsonl", str(folder / "metrics.jsonl")]
        trained = fork_training(in_float32(words) if is_float32 else words, choices.world_size).check()
        assert "iteration" in parse(trained.stdout)
        return trained

    return run


def refusals(choices: Choices, data: Path, tokenizer_folder: Path, folder: Path) -> tuple[str, ...]:
    try:
        resolve_arguments(choices.expanded(folder, data, tokenizer_folder), choices.world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


def assert_same(run: ForkedRun, one_process: ForkedRun, precision: str) -> None:
    ours, theirs = run.iterations(), one_process.iterations()
    assert len(ours) == len(theirs) == 2
    for name, tolerance in (("lm_loss", TOLERANCES[precision]), ("grad_norm", NORM_TOLERANCES[precision])):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=tolerance), name
    assert [line["sample_ids_hash"] for line in ours] == [line["sample_ids_hash"] for line in theirs]


@pytest.mark.parametrize(
    "choices", [*FULL, *(pytest.param(choices, marks=pytest.mark.long) for choices in LONG)], ids=str
)
def test_a_combination_trains_as_one_process_does_or_is_refused(
    choices: Choices, data: Path, tokenizer_folder: Path, train: Train, tmp_path: Path
) -> None:
    problems = refusals(choices, data, tokenizer_folder, tmp_path)
    meant = [problem for problem in problems if problem.startswith(NOT_MEANINGFUL)]
    assert len(meant) == int(choices.VP != "" and choices.PP == "1"), problems
    assert all(problem.endswith("omit it, or use --pipeline-model-parallel-size 2 or more") for problem in meant)
    assert [problem for problem in problems if problem not in meant] == []
    if meant:
        return
    assert_same(train(choices, False), train(choices.on_one_process, False), choices.PR)
    if choices.PR == "bf16":
        assert_same(train(choices, True), train(choices.on_one_process, True), "float32")


@pytest.mark.parametrize("script", ["llama3_1", "qwen2_5"])
def test_load_must_name_a_folder_with_a_tokenizer(script: str, data: Path, tmp_path: Path) -> None:
    choices = next(each for each in DRAWN if each.script == script and not each.VP)
    (problem,) = refusals(choices, data, tmp_path, tmp_path / "output")
    assert f"--load {tmp_path} has no tokenizer.json; save the fast tokenizer there" in problem


def test_packing_cuts_attention_between_documents(train: Train) -> None:
    packed = Choices("llama3_1", "bf16", "none", "1", "1", "1", "", "false", "true")
    plain = Choices("llama3_1", "bf16", "none", "1", "1", "1", "", "false", "false")
    assert "--reset-attention-mask is added" in train(packed, True).stdout
    assert train(packed, True).losses() != train(plain, True).losses()
    assert torch.isfinite(torch.tensor(train(packed, True).losses())).all()


def test_load_of_a_model_folder_begins_with_its_weights(data: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    choices = Choices("llama3_1", "bf16", "none", "1", "1", "1", "", "false", "false")

    def begin(name: str, load: Path, *more: str | Path) -> ForkedRun:
        words = in_float32(choices.expanded(tmp_path / name, data, load))
        return fork_training([*words, "--data-cache-path", tmp_path / "cache", *more]).check()

    random_start = "will not load any checkpoints and will start from random"
    assert random_start in begin("first", tokenizer_folder).stdout
    source = NativeSource(newest(tmp_path / "first" / "checkpoint"))
    write_hugging_face(source, tmp_path / "model")
    source.close()
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, tmp_path / "model")
    with_weights = begin("second", tmp_path / "model")
    native = begin("third", tmp_path / "first" / "checkpoint", "--finetune", "--tokenizer-model", tokenizer_folder)
    assert [line["iteration"] for line in with_weights.iterations()] == [1, 2]
    assert with_weights.losses() == pytest.approx(native.losses(), rel=TOLERANCES["float32"])
    assert random_start not in with_weights.stdout


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


def fine_tune(chat: Path, folder: Path, choices: Choices, dataset: str) -> ForkedRun:
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
    run = fine_tune(chat, tmp_path / "run", choices, RAW)
    assert ("--sft packs conversations" in run.stdout) is packs
    assert (f"--dataset {RAW}: each conversation is a sample" in run.stdout) is not packs
    one = fine_tune(chat, tmp_path / "one", choices.on_one_process, PACKED if packs else RAW)
    assert figures(run, "lm_loss") == pytest.approx(figures(one, "lm_loss"), rel=2e-4)
    assert figures(run, "grad_norm") == pytest.approx(figures(one, "grad_norm"), rel=1e-2)
