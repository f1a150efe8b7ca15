"""Clipping by kind: what each kind's gradients are multiplied by, and the update."""

from __future__ import annotations

import pytest
import torch

from megatron.core.optimizer.clip_grads import ALL_KINDS, KINDS, grad_multipliers, kind_of
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding import ParamSpec, full_pieces, spec_of
from tests.unit.core.distributed.toy_model import ToyModel, autograd_gradients
from tests.unit.core.optimizer.test_optimizer import build, train_step


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embedding.word_embeddings.weight", (5, 3), "embeddings"),
        ("output_layer.weight", (5, 3), "embeddings"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 3), "matrices"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", (2, 4, 3), "matrices"),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (2, 4), "vectors"),
        ("decoder.final_layernorm.weight", (3,), "vectors"),
    ],
)
def test_kinds(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(ParamSpec(name, shape, full_pieces(shape))) == kind


def test_kinds_are_clipped_first_and_then_all_together() -> None:
    config = OptimizerConfig(clip_grad=1.0, clip_grad_matrices=0.6, clip_grad_vectors=0.5)
    sums = torch.tensor([9.0, 4.0, 0.04], dtype=torch.float64) * 64.0
    found = grad_multipliers(sums.sum().sqrt(), sums, 8.0, config)
    # Norms of 3, 2 and 0.2: the first is shortened to 0.6, the third is not, the second has no limit.
    left = (0.6**2 + 2.0**2 + 0.2**2) ** 0.5
    expected = [0.2 / left / 8, 1.0 / left / 8, 1.0 / left / 8]
    assert [found[kind].item() for kind in KINDS] == pytest.approx(expected, rel=2e-6)
    assert found[ALL_KINDS].item() == pytest.approx(1.0 / left / 8, rel=2e-6)
    plain = grad_multipliers(sums.sum().sqrt(), sums[:0], 8.0, OptimizerConfig(clip_grad=1.0))
    assert plain[ALL_KINDS].item() == pytest.approx(1.0 / 13.04**0.5 / 8, rel=2e-6)


def test_an_update_has_the_gradients_that_are_left() -> None:
    gradients = autograd_gradients([0])
    ddp, optimizer = build(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, clip_grad_vectors=0.1)
    before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    outcome = train_step(ddp, optimizer, 0)
    of_vectors = [g for name, g in gradients.items() if kind_of(spec_of(getattr(ToyModel(), name))) == "vectors"]
    norm = torch.cat(of_vectors).norm().item()
    assert norm > 0.1
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert outcome.grad_norm == pytest.approx(whole)
    for name, parameter in ddp.module.named_parameters():
        factor = 0.1 / norm if kind_of(spec_of(parameter)) == "vectors" else 1.0
        expected = before[name] - 0.01 * factor * gradients[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-9)
