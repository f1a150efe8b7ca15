"""muP's coordinate check: how much updates move hidden states and logits, at widths that grow eightfold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from tests.harness.toy_model import make_batch, make_model

STATE = describe_parallel_state(0, 1)
HEAD, VOCABULARY = 8, 53


def shape(width: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": width // HEAD, "kv_channels": HEAD}
    return sizes | {"ffn_hidden_size": 2 * width, "init_method_std": 0.1}


def growth(optimizer: dict[str, Any], *, with_mup: bool) -> tuple[float, float]:
    """Return how many times more three steps move hidden states, and logits, at the large width than at the small."""
    of_widths = []
    for width in (32, 256):
        mup = {"use_mup": True, "mup_base_hidden_size": 32} if with_mup else {}
        model = make_model(single_rank_group(), **shape(width), **mup)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), STATE)
        rule = OptimizerConfig(lr=0.01, weight_decay=0.0, clip_grad=0.0, params_dtype="float32", **optimizer)
        trained = MegatronOptimizer(rule, [ddp], STATE)
        tokens, labels, positions, _ = make_batch(14, 3, VOCABULARY)
        hidden: list[torch.Tensor] = []
        model.decoder.register_forward_hook(lambda module, inputs, output, kept=hidden: kept.append(output[0].detach()))
        logits = [model(tokens, positions).detach()]
        for _ in range(3):
            ddp.zero_grad_buffer()
            ddp(tokens, positions, labels=labels).mean().backward()
            ddp.finish_grad_sync()
            trained.step()
        logits.append(model(tokens, positions).detach())
        changes = (hidden[-1] - hidden[0], (logits[1] - logits[0])[..., :VOCABULARY])
        of_widths.append([change.square().mean().sqrt().item() for change in changes])
    (narrow_hidden, narrow_logits), (wide_hidden, wide_logits) = of_widths
    return wide_hidden / narrow_hidden, wide_logits / narrow_logits


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "adam"},
        pytest.param({"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}, marks=pytest.mark.long),
        {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_scale_mode": "unit_rms_norm"},
    ],
    ids=["adam", "muon", "muon-unit-rms"],
)
def test_updates_move_activations_as_much_at_any_width(optimizer: dict[str, Any]) -> None:
    hidden, logits = growth(optimizer, with_mup=True)
    assert 0.5 < hidden < 2.0
    assert 0.5 < logits < 2.0
    _, without = growth(optimizer, with_mup=False)
    assert without > 3.0 * logits


def test_hidden_matrices_begin_smaller_and_nothing_else_does() -> None:
    base, wide = (make_model(single_rank_group(), **shape(32), use_mup=True, mup_width_mult=m) for m in (1.0, 16.0))
    for before, after in zip(base.parameters(), wide.parameters(), strict=True):
        spec = spec_of(after)
        is_hidden = before.dim() == 2 and "embeddings" not in spec.name
        assert spec.width_multiplier == (16.0 if is_hidden else 1.0)
        torch.testing.assert_close(after, before / 4.0 if is_hidden else before)


def test_the_base_width_is_the_model_without_it() -> None:
    tokens, _, positions, _ = make_batch(14, 3, VOCABULARY)
    plain = make_model(single_rank_group(), **shape(32))(tokens, positions)
    base = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": HEAD}
    assert torch.equal(make_model(single_rank_group(), **shape(32), **base)(tokens, positions), plain)
