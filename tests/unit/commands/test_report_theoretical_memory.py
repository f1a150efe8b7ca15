"""tools/report_theoretical_memory.py: Megatron's lines of the flags alone, and one line for flags that are wrong."""

from __future__ import annotations

import pytest

from megatron.cli.report_theoretical_memory import main

LLAMA_7B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --bf16
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --tokenizer-type
    NullTokenizer --vocab-size 31999 --data-path /nowhere/text_document
"""


def test_the_lines_of_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    assert main([*LLAMA_7B.split(), *layout.split(), "--world-size", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Number of parameters in transformer block in billions:  6.48",
        "Number of parameters in embedding layers in billions: 0.26",
        "Total number of parameters in billions: 6.74",
        "Number of parameters in most loaded shard in billions: 1.6847",
        "Number of parameters in other shards in billions: 1.6847",
        "Theoretical memory footprints: weight and optimizer=19279.55 MB",
    ]


def test_wrong_flags_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA_7B.split(), "--world-size", "0"]) == 2
    assert main([*LLAMA_7B.split(), "--tensor-model-parallel-size", "3", "--world-size", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first == "error: --world-size 0 is not positive; give the number of the run's ranks"
    assert "--num-attention-heads 32" in second
