"""Folders of torchtitan's are converted, listed, compared, generated from and trained further."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.comparison import diff_checkpoints
from megatron.cli import convert, inspect_checkpoint
from megatron.cli import diff_checkpoints as diff
from tests.e2e.test_convert import run_converter
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_training
from tests.harness.titan_llama import (
    FEED_FORWARD,
    GROUPS,
    LAYERS,
    TOLD,
    TOLD_FLAGS,
    WIDTH,
    make_weights,
    reference_logits,
    save_run,
)
from tests.unit.interop.huggingface.tiny_models import save_model

VOCAB_SIZE = 128
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --ffn-hidden-size {FEED_FORWARD} --group-query-attention "
    f"--num-query-groups {GROUPS} --swiglu --normalization RMSNorm --disable-bias-linear "
    f"--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    f"--attention-dropout 0 {TOLD_FLAGS}"
)


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("titan") / "step-3", make_weights(VOCAB_SIZE))


def test_a_folder_becomes_a_native_one_and_a_model_of_hugging_faces(titan: Path, tmp_path: Path) -> None:
    lines = run_converter(titan, tmp_path / "native", "--loader torchtitan", TOLD_FLAGS)
    assert any("are equal, bit by bit" in line for line in lines)
    run_converter(titan, tmp_path / "hf", "--loader torchtitan --saver hf --test-logits", TOLD_FLAGS)
    lines = run_converter(tmp_path / "hf", tmp_path / "back", "--loader hf --rotary-base 7")
    assert "--rotary-base 7 has no effect: the checkpoint says it" in lines
    for other in ("native", "back"):
        lines = []
        assert diff_checkpoints(titan, tmp_path / other, told=TOLD, log=lines.append), lines


def test_the_commands_name_the_flags_that_are_needed(
    titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_checkpoint.main([str(titan), *TOLD_FLAGS.split()]) == 0
    printed = capsys.readouterr().out
    assert "format: torchtitan's format" in printed
    assert "num_query_groups: 2" in printed
    for main, words in (
        (inspect_checkpoint.main, [str(titan)]),
        (diff.main, [str(titan), str(titan)]),
        (convert.main, ["--loader", "torchtitan", "--load-dir", str(titan), "--save-dir", str(tmp_path / "x")]),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "whose files do not say --num-attention-heads, --rotary-base, --norm-epsilon, --max-position-embeddings; "
            "give what the model was trained with"
        ) in line
    with pytest.raises(SystemExit, match="2"):
        convert.main(["--saver", "torchtitan", "--load-dir", str(titan), "--save-dir", str(tmp_path / "x")])
    assert "--saver torchtitan: its folders are read only" in capsys.readouterr().err


def test_text_is_generated_from_a_folder(titan: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    tokens = [3, 14, 15]
    for _ in range(5):
        tokens.append(int(reference_logits(make_weights(VOCAB_SIZE), torch.tensor([tokens]))[0, -1].argmax()))
    words = ("--load", titan, *TOLD_FLAGS.split(), "--prompt", "3 14 15", "--greedy", "--tokens-to-generate", "5")
    status, out, _ = call_tool(monkeypatch, capsys, *words)
    assert (status, out.split()) == (0, [str(token) for token in tokens])
    save_model("llama_tied", tmp_path / "hf")
    words = ("--load-hf", tmp_path / "hf", "--prompt", "3", "--greedy", "--tokens-to-generate", "1")
    status, _, errors = call_tool(monkeypatch, capsys, *words, "--rotary-base", "7")
    assert status == 0
    assert "--rotary-base 7 has no effect: the checkpoint says it" in errors.splitlines()


def test_training_begins_with_its_weights_at_any_layout(titan: Path, tmp_path: Path) -> None:
    def begin(folder: Path, load: Path, *more: str, nproc: int = 1) -> list[float]:
        words = toy_args(folder, SHAPE, "--train-iters 2 --lr-warmup-iters 1 --eval-interval 1000", *more, save=False)
        run = fork_training([*words, "--load", load, "--metrics-jsonl", folder / "metrics.jsonl"], nproc).check()
        line = "is of torchtitan, whose files do not say this of the model, and it is taken as " + TOLD_FLAGS
        assert (line in run.stdout) == (load == titan)
        assert [step["iteration"] for step in run.iterations()] == [1, 2]
        return run.losses()

    run_converter(titan, tmp_path / "native", "--loader torchtitan", TOLD_FLAGS)
    expected = begin(tmp_path, tmp_path / "native")
    (tmp_path / "two").mkdir()
    found = begin(tmp_path / "two", titan, "--tensor-model-parallel-size 2", nproc=2)
    assert found == pytest.approx(expected, rel=1e-5)
    words = toy_args(tmp_path, SHAPE, "--num-attention-heads 12 --rotary-base 9", save=False)
    assert "num_query_groups: 4 -> 2" in fork_training([*words, "--load", titan]).errors[0]


def test_use_checkpoint_args_takes_the_shapes(titan: Path, tmp_path: Path) -> None:
    words = toy_args(tmp_path, f"--use-checkpoint-args --group-query-attention --num-query-groups {GROUPS}", save=False)
    for name in ("--num-layers", "--hidden-size"):
        del words[words.index(name) : words.index(name) + 2]
    words += [*TOLD_FLAGS.split(), "--load", str(titan), "--train-iters", "1", "--lr-warmup-iters", "0"]
    run = fork_training(words).check()
    assert "successfully loaded checkpoint" in run.stdout
