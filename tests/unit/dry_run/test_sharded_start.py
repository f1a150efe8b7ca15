"""Sharded weights on a pretended GPU: what a run holds before its first step, and in it."""

from __future__ import annotations

import pytest

from tests.harness.dry_runs import DryRunCase, run_dry_runs

NUM_LAYERS, HIDDEN, FFN, VOCABULARY, NUM_RANKS = 6, 2048, 5632, 32000, 32
FLAGS = f"""
    --num-layers {NUM_LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 16 --swiglu
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size {NUM_RANKS} --bf16
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --lr 1e-4 --train-iters 5 --mock-data
"""
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
"""Bytes of a layer's weights, norms left out."""
EMBEDDING = 2 * VOCABULARY * HIDDEN
WHOLE = NUM_LAYERS * LAYER + 2 * EMBEDDING


@pytest.mark.long
def test_a_gpu_never_holds_the_whole_model() -> None:
    sharded = ("--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce")
    cases = {"sharded": sharded, "copies": ("--use-distributed-optimizer",)}
    results = run_dry_runs([DryRunCase(name, (*FLAGS.split(), *more), NUM_RANKS) for name, more in cases.items()])
    assert [results[name].error for name in cases] == ["", ""]
    ours, copies = (results[name].report for name in cases)
    # Weights of 16 bits, and gradients, main weights and two moments of 32.
    kept = 9 * WHOLE / NUM_RANKS
    assert copies["start_peak_bytes"] > 3 * WHOLE
    assert kept <= ours["start_peak_bytes"] <= 1.02 * kept + max(EMBEDDING, LAYER)
    # In a step: two layers and what is beside the layers.
    of_weights = ours["peak_holders"]["weights"]
    assert of_weights <= 1.02 * WHOLE / NUM_RANKS + 2 * LAYER + 2 * EMBEDDING < copies["peak_holders"]["weights"]
