"""The first hour with a text: train on it with the defaults, generate, stop a session early, and continue."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness.training_run import REPOSITORY, CommandResult, run_command


def megatron(folder: Path, words: str) -> CommandResult:
    command = [sys.executable, "-m", "megatron.cli", *words.split()]
    return run_command(command, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)})


def test_a_run_does_not_import_the_compiler(tmp_path: Path) -> None:
    # torch imports these modules in some of its functions. They take up to a second of every process's start.
    script = """
import sys
from megatron.cli.pretrain import main
code = main(sys.argv[1:])
print("imported:", sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
sys.exit(code)
"""
    words = """
        --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
        --micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
        --vocab-size 50 --eval-iters 1 --save run
    """
    done = run_command(
        [sys.executable, "-c", script, *words.split()], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}
    ).check()
    assert "lm loss" in done.stdout
    assert "imported: []" in done.stdout


def test_a_text_trains_evaluates_generates_and_continues(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("".join(f"Rank {i} waits.\nA token follows.\n\n" for i in range(400)))
    words = """
        train --train-data input.txt --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
        --micro-batch-size 2 --train-iters 4 --lr 1e-3 --save run
    """
    first = megatron(tmp_path, f"{words} --exit-interval 2").check()
    assert first.stdout.startswith("no tokenizer is given: using ByteTokenizer, one token per byte")
    assert "input.txt: 1 text, cut into 100 documents" in first.stdout
    assert "--tokenizer-type ByteTokenizer" in first.stdout
    assert "training finished" not in first.stdout
    rest = megatron(tmp_path, "train --resume run").check()
    assert "--exit-interval 2 of the last session is not continued" in rest.stderr
    assert "no tokenizer is given" not in rest.stdout
    assert "training finished, evaluating" in rest.stdout
    assert "validation loss at iteration 4 on validation set" in rest.stdout
    done = megatron(tmp_path, "generate run --prompt Rank --tokens-to-generate 4").check()
    assert done.stdout.startswith("Rank")
    unused = megatron(tmp_path, "generate run --prompt Rank --vocab-file vocab.json")
    assert unused.returncode == 2
    assert unused.stderr.startswith("error: --vocab-file has no effect: the tokenizer is ByteTokenizer; omit it")
    # Another run in the same folder is warned before its set-up.
    lines = megatron(tmp_path, f"{words} --exit-interval 1").check().stdout.splitlines()
    warning = next(number for number, line in enumerate(lines) if line.startswith("WARNING: run has a checkpoint of"))
    assert warning < lines.index("training ...")
    assert warning < next(number for number, line in enumerate(lines) if line.startswith(" > model: "))
