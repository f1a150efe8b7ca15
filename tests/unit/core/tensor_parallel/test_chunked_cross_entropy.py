"""Output layer and cross-entropy in chunks of tokens against the separate ones, in float64 and in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tensor_parallel import loss_chunks
from megatron.core.tensor_parallel.chunked_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.loss_chunks import chunk_rows
from megatron.core.tensor_parallel.mappings import InputRegion
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

TIED = {"num_layers": 1}
UNTIED = {"num_layers": 1, "untie_embeddings_and_output_weights": True, "use_mup": True, "mup_output_mult": 3.0}


def use_small_chunks() -> None:
    loss_chunks._CHUNK_ELEMENTS, loss_chunks._ROW_MULTIPLE = 100, 2


def test_chunks_are_equal_except_for_the_last() -> None:
    assert chunk_rows(8192, 64128) == 4096
    assert chunk_rows(8193, 64128) == 4224
    assert chunk_rows(100, 64128) == 128
    assert chunk_rows(1, 1 << 40) == 128


@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_losses_and_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, needs_x: bool, needs_weight: bool, has_main_grad: bool
) -> None:
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 60)
    monkeypatch.setattr(loss_chunks, "_ROW_MULTIPLE", 2)
    torch.manual_seed(3)
    x = torch.randn(7, 2, 5, dtype=torch.float64, requires_grad=needs_x)
    weight = torch.nn.Parameter(torch.randn(12, 5, dtype=torch.float64), requires_grad=needs_weight)
    labels = torch.randint(0, 10, (7, 2))
    row_grads, normalizer_grads = torch.randn(2, 7, 2, dtype=torch.float64)
    logits = (x @ weight.t())[..., :10]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(7, 2)
    ((expected * row_grads).sum() + (logits.logsumexp(-1) * normalizer_grads).sum()).backward()
    grads = [x.grad, weight.grad]
    x.grad = weight.grad = None
    completed: list[int] = []
    main_grad = MainGrad(torch.full_like(weight, 7.0), 1, on_complete=lambda: completed.append(1))
    if has_main_grad:
        attach_main_grad(weight, main_grad)
    losses, normalizers = linear_cross_entropy(x, weight, labels, 10, InputRegion.REPLICATED, single_rank_group())
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(normalizers, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)
    ((losses * row_grads).sum() + (normalizers * normalizer_grads).sum()).backward()
    in_main_grad = has_main_grad and needs_weight
    assert completed == [1] * in_main_grad
    for actual, exact in zip((x.grad, main_grad.tensor if in_main_grad else weight.grad), grads, strict=True):
        assert (actual is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


def figures(tp: Group, **settings: Any) -> list[torch.Tensor]:
    """Return the losses, the auxiliary losses and the gradients of a model on this rank."""
    model = make_model(tp, params_dtype="float64", sequence_parallel=tp.size > 1, z_loss_coeff=0.1, **settings)
    load_global_weights(model)
    tokens, labels, position_ids = make_batch(14, 2, 53)[:3]
    auxiliary: list[Any] = []
    mask = torch.ones_like(labels, dtype=torch.float64)
    losses = model(tokens, position_ids, labels=labels, loss_mask=mask, losses=auxiliary)
    (losses.sum() + sum(each.loss_sum for each in auxiliary)).backward()
    return [losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(**settings: Any) -> None:
    use_small_chunks()
    tp = tensor_parallel_group()
    expected, actual = (figures(tp, cross_entropy_fusion_impl=impl, **settings) for impl in ("native", "linear"))
    assert len(expected) == len(actual) > 5
    for mine, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [TIED, UNTIED, UNTIED | {"mtp_num_layers": 1}], ids=["tied", "untied", "mtp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_equals_the_model_with_all_logits(world_size: int, settings: dict[str, Any]) -> None:
    run_distributed(world_size, compare, **settings)
