"""One model at every tensor-parallel layout: loss and all gradients in float64, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from tests.harness.closeness import assert_gradients_close
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import (
    Fragment,
    fragments,
    load_global_weights,
    make_batch,
    make_model,
    parameter_fragments,
    reassemble,
    summed_gradients,
    tensor_parallel_group,
)

TOLERANCE = 1e-9
LENGTH, BATCH = 12, 3

GPT2: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "untie_embeddings_and_output_weights": True,
}
QWEN = LLAMA | {"add_qkv_bias": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": False}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-empty-vocabulary-rank": {"vocab_size": 41, "make_vocab_size_divisible_by": 16},
    "gpt2-untied-empty-vocabulary-rank": {
        "vocab_size": 33,
        "make_vocab_size_divisible_by": 16,
        "untie_embeddings_and_output_weights": True,
        "bias_gelu_fusion": False,
    },
    "gpt2-one-group": {"num_query_groups": 1},
    "llama": LLAMA,
    "qwen-two-groups": QWEN,
    "query-key-norm": QWEN | {"qk_layernorm": True},
    "query-key-layernorm-one-group": {"qk_layernorm": True, "num_query_groups": 1, "apply_layernorm_1p": True},
    "stream-of-norms": {"apply_residual_connection_post_layernorm": True},
    "quick-geglu": LLAMA
    | {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
    "squared-relu": {"squared_relu": True, "normalization": "RMSNorm", "position_embedding_type": "none"},
    "rotary-percent": LLAMA | {"rotary_percent": 0.4, "rotary_seq_len_interpolation_factor": 2.5},
    "rotary-interleaved": LLAMA | {"rotary_interleaved": True, "rotary_percent": 0.6},
    "llama-3.1": LLAMA | {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 24},
    "unfused-attention": QWEN | {"attention_backend": "unfused"},
}
DOUBLES = ("gpt2", "gpt2-empty-vocabulary-rank", "gpt2-one-group", "llama", "qwen-two-groups", "rotary-percent")
"""Cases whose parts the others have in other mixtures, or packed."""


@dataclass(frozen=True)
class RankResult:
    loss: float
    losses: np.ndarray
    gradients: list[Fragment]


def run_step(settings: dict[str, Any], tp: Group, sequence_parallel: bool, packed: bool) -> RankResult:
    model = make_model(tp, sequence_parallel=sequence_parallel, params_dtype="float64", **settings)
    load_global_weights(model)
    tokens, labels, positions, mask = make_batch(LENGTH, BATCH, model.config.vocab_size)
    document_ids = None
    if packed:
        document_ids = (torch.arange(LENGTH) >= torch.tensor([[5], [7], [LENGTH]])).long()
        positions = torch.where(document_ids == 1, positions - torch.tensor([[5], [7], [0]]), positions)
    losses = model(tokens, positions, labels=labels, pattern=AttentionPattern(document_ids=document_ids))
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    return RankResult(loss.item(), losses.detach().numpy().copy(), fragments(summed_gradients(model, tp)))


def run_layouts(settings: dict[str, Any], packed: bool) -> dict[tuple[int, bool], RankResult]:
    """Run the same step on four ranks as TP 2 (twice, side by side) and TP 4, without and with sequence parallelism."""
    results = {}
    for tp_size in (2, 4):
        tp = tensor_parallel_group(tp_size)
        for sequence_parallel in (False, True):
            results[tp_size, sequence_parallel] = run_step(settings, tp, sequence_parallel, packed)
    return results


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("case", "packed"),
    [
        *(pytest.param(case, False, marks=[pytest.mark.long] * (case in DOUBLES)) for case in CASES),
        *(("gpt2", True), ("qwen-two-groups", True)),
    ],
)
def test_loss_and_gradients_do_not_depend_on_the_layout(case: str, packed: bool) -> None:
    expected = run_step(CASES[case], single_rank_group(), False, packed)
    ranks = run_distributed(4, run_layouts, CASES[case], packed)
    expected_gradients = reassemble([expected.gradients])
    for layout in ranks[0]:
        results = [rank[layout] for rank in ranks]
        for result in results:
            assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=0.0)
            np.testing.assert_allclose(result.losses, expected.losses, rtol=TOLERANCE)
        one_model = (result.gradients for result in results[: layout[0]])
        assert_gradients_close(reassemble(one_model, copy_tolerance=1e-12), expected_gradients, TOLERANCE)


def test_every_case_gives_a_model_of_its_own() -> None:
    losses = {
        name: run_step(settings, single_rank_group(), False, packed=False).loss
        for name, settings in CASES.items()
        if name not in ("unfused-attention", "qwen-two-groups")
    }
    assert len({round(loss, 9) for loss in losses.values()}) == len(losses), losses


def fresh_model(settings: dict[str, Any], tp: Group) -> tuple[float, list[Fragment], bool]:
    """Return a freshly initialized model's loss and weights, and whether all of its padding is zero."""
    model = make_model(tp, params_dtype="float64", **settings)
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, model.config.vocab_size)
    with torch.no_grad():
        loss = model(tokens, positions, labels=labels).mean().item()
    padding_is_zero = True
    for parameter in model.parameters():
        padding = torch.ones_like(parameter, dtype=torch.bool)
        for shard in spec_of(parameter).shards:
            padding[shard.local_box.slices] = False
        padding_is_zero &= not parameter.detach()[padding].any()
    return loss, parameter_fragments(model), padding_is_zero


def fresh_models(settings: dict[str, Any]) -> dict[int, tuple[float, list[Fragment], bool]]:
    return {tp_size: fresh_model(settings, tensor_parallel_group(tp_size)) for tp_size in (2, 4)}


@pytest.mark.default(1)
@pytest.mark.parametrize("case", ["gpt2-untied-empty-vocabulary-rank", "llama", "query-key-norm"])
def test_initial_weights_are_bitwise_equal_at_any_layout(case: str) -> None:
    settings = CASES[case] | {"init_method_std": 0.3}
    expected_loss, whole, _ = fresh_model(settings, single_rank_group())
    expected = reassemble([whole])
    ranks = run_distributed(4, fresh_models, settings)
    for tp_size in (2, 4):
        results = [rank[tp_size] for rank in ranks]
        for loss, _, padding_is_zero in results:
            assert loss == pytest.approx(expected_loss, rel=1e-12, abs=0.0)
            assert padding_is_zero
        weights = reassemble(shards for _, shards, _ in results[:tp_size])
        assert set(weights) == set(expected)
        for name, weight in weights.items():
            assert np.array_equal(weight, expected[name]), name


def logits_of_step(settings: dict[str, Any]) -> np.ndarray:
    tp = tensor_parallel_group()
    model = make_model(tp, params_dtype="float64", **settings)
    tokens, _, positions, _ = make_batch(LENGTH, BATCH, model.config.vocab_size)
    with torch.no_grad():
        return model(tokens, positions).numpy().copy()


def test_logits_are_cut_along_the_vocabulary() -> None:
    settings = CASES["gpt2-empty-vocabulary-rank"]
    expected = logits_of_step(settings)
    parts = run_distributed(4, logits_of_step, settings)
    assert [part.shape for part in parts] == [(LENGTH, BATCH, 16)] * 4
    joined = np.concatenate(parts, axis=-1)
    np.testing.assert_allclose(joined[..., :41], expected[..., :41], rtol=1e-9, atol=1e-12)
    assert not joined[..., 41:].any()


def test_padding_rows_get_no_gradient() -> None:
    model = make_model(single_rank_group(), vocab_size=53, make_vocab_size_divisible_by=16, params_dtype="float64")
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    model(tokens, positions, labels=labels).sum().backward()
    gradient = model.output_weight.grad
    assert gradient is not None
    assert gradient.shape[0] == 64
    assert not gradient[53:].any()
    assert gradient[:53].any(dim=1).all()
