"""The Python API on several ranks: the same losses, texts and checkpoints as in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron import GPT
from tests.harness.distributed import run_distributed

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"use_distributed_optimizer": True},
]


def use_model(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Take every step of a model's life, and return what can be compared."""
    os.environ["MEGATRON_DEVICE"] = "cpu"
    tokens = np.random.default_rng(0).integers(0, 50, (30, 40))
    model = GPT.build(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=16,
        hidden_dropout=0.1,
        tokenizer_type="NullTokenizer",
        vocab_size=50,
        **layout,
    )
    results: dict[str, Any] = {"greedy": model.generate([1, 2, 3], 4, temperature=0)}
    results["fit"] = model.fit(tokens, 3, lr=1e-2, global_batch_size=4, train_iters=6, data_cache_path=folder).losses
    results["evaluate"] = model.evaluate(tokens)
    results["loss"] = float(model.loss(tokens[:2, :17]))
    results["logits"] = model.logits([[1, 2, 3], [4, 5, 6]]).tolist()
    model.save(f"{folder}/run")
    model.to_hf(f"{folder}/hf")
    results["more"] = model.fit(steps=2).losses
    loaded = GPT.load(f"{folder}/run", **layout)
    assert loaded.fit(tokens, 2, data_cache_path=folder).losses == results["more"]
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one process."""
    results: dict[str, Any] = run_distributed(1, use_model, str(tmp_path_factory.mktemp("alone")), {})[0]
    return results


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "pp", "dp"])
def test_every_rank_has_the_results_of_one_process(
    layout: dict[str, Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    first, second = run_distributed(2, use_model, str(tmp_path), layout, timeout_s=90.0)
    assert first == second
    assert first["greedy"] == alone["greedy"]
    for name in ("fit", "evaluate", "loss", "logits", "more"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(alone[name]), rtol=2e-5, atol=2e-5)
    # The Hugging Face folder has no tokenizer.
    exported = GPT.load(tmp_path / "hf", tokenizer_type="NullTokenizer", vocab_size=50)
    assert torch.equal(exported.logits([1, 2, 3]), GPT.load(tmp_path / "run").logits([1, 2, 3]))
