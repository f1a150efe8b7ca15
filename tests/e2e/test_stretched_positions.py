"""A model of GPT-OSS's kind, its positions stretched by YaRN, goes on from Megatron's files as if never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training

KIND = """
    --normalization RMSNorm --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1
    --activation-func-clamp-value 7 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24
    --position-embedding-type rope --rope-type yarn --rotary-base 150000 --rotary-scaling-factor 8
    --original-max-position-embeddings 9 --no-yarn-correction-range-round-to-int
"""
STEPS = "--train-iters 6 --lr-warmup-iters 2 --eval-interval 100"


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatrons_files_hold_stretched_positions(form: str, tmp_path: Path) -> None:
    flags = (KIND, STEPS, f"--ckpt-format {form} --tensor-model-parallel-size 2")
    whole = fork_training(toy_args(tmp_path / "whole", *flags), 2).check()
    fork_training(toy_args(tmp_path, *flags, "--exit-interval 3"), 2).check()
    resumed = fork_training(toy_args(tmp_path, *flags), 2).check()
    assert exact_figures(resumed.iterations())[-3:] == exact_figures(whole.iterations())[-3:]
    other = fork_training(toy_args(tmp_path, *flags, "--rotary-scaling-factor 9"), 2).check()
    assert "configuration changed since the checkpoint: model.rotary_scaling_factor: 8.0 -> 9.0" in other.stdout
