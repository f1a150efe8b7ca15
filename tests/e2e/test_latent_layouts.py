"""A run with latent attention and further tokens saved at one layout goes on at others: the same state and losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_resume_layouts import (
    Layout,
    assert_goes_on_like,
    assert_same_content,
    copy_of_iteration_10,
    pass_through,
    train,
)
from tests.e2e.toy_run import newest

MODEL = """
    --multi-latent-attention --position-embedding-type rope --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
"""
HOME = Layout(
    4,
    f"{MODEL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer",
)


@pytest.mark.long
def test_latent_attention_and_further_tokens_go_on_at_another_layout(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    home.mkdir()
    there.mkdir()
    whole = train(home, HOME, "--save-interval 10")
    copy_of_iteration_10(home / "checkpoints", there)
    one = Layout(1, MODEL)
    pass_through(one, there / "checkpoints", tmp_path / "again")
    assert_same_content(newest(tmp_path / "again"), newest(there / "checkpoints"))
    run = train(there, one)
    assert_goes_on_like(run, whole)
    assert all(line["mtp_1_loss"] > 0 for line in run.iterations())
    assert "mtp_1_loss: " in run.stdout
