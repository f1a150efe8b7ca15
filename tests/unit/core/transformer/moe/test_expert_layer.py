"""A layer of experts computes what a loop over tokens computes, and routes as a plain twin in float64."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import MainGrad, attach_main_grad, main_grad_of
from megatron.core.models.fp8_layers import compute_in_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops import gemm
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples
from megatron.core.ops.fp8_groups import QuantizedGroups
from megatron.core.ops.gemm import RowCounts, RowEnds
from megatron.core.ops.token_rows import RowOrder
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import MoEConfig, moe_layers
from megatron.core.transformer.moe import fp8_experts, grouped_experts
from megatron.core.transformer.moe.expert_dispatch import run_in_order
from megatron.core.transformer.moe.expert_layer import ExpertLayer, loads_of
from megatron.core.transformer.moe.load_balancing import LoadReport
from megatron.core.transformer.moe.routing import (
    TokenRows,
    choose_experts,
    expert_capacity,
    kept_choices,
    sinkhorn,
    sinkhorn_experts,
)
from tests.harness.toy_model import load_global_weights, make_model

NUM_TOKENS, NUM_EXPERTS = 37, 12
KINDS = [
    {},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_topk": 5},
    {"moe_router_topk": 8, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    {"moe_router_topk": 3, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    {"moe_router_topk": 4, "moe_router_num_groups": 6, "moe_router_group_topk": 2},
    {
        "moe_router_topk": 5,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 3,
        "moe_router_group_score_topk": 2,
    },
    {
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
    },
    {"moe_router_topk": 3, "moe_router_enable_expert_bias": True},
    {"moe_router_topk": 3, "moe_router_enable_expert_bias": True, "moe_router_pre_softmax": True},
    {"moe_router_topk": 1, "moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 2.5},
    {
        "moe_router_topk": 4,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
    },
]


def plain_twin(logits: np.ndarray, bias: np.ndarray | None, config: MoEConfig) -> tuple[list[int], list[float]]:
    """Return the experts of one token, the best first, and their weights."""
    exponentials = [math.exp(value) for value in logits]
    if config.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    elif config.moe_router_score_function == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(value))) for value in logits]
    else:
        scores = [value / sum(exponentials) for value in exponentials]
    is_late_softmax = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
    if is_late_softmax and bias is None:
        scores = list(map(float, logits))
    ranked = scores if bias is None else [score + float(move) for score, move in zip(scores, bias)]
    allowed = list(range(len(logits)))
    if config.moe_router_num_groups is not None and config.moe_router_group_topk is not None:
        size = len(logits) // config.moe_router_num_groups
        groups = [allowed[start : start + size] for start in range(0, len(logits), size)]
        num_best = config.moe_router_group_score_topk or config.moe_router_topk // config.moe_router_group_topk
        worth = {i: sum(sorted((ranked[e] for e in g), reverse=True)[:num_best]) for i, g in enumerate(groups)}
        best = sorted(worth, key=lambda i: -worth[i])[: config.moe_router_group_topk]
        allowed = [expert for group in best for expert in groups[group]]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: config.moe_router_topk]
    weights = [scores[expert] for expert in chosen]
    if is_late_softmax:
        weights = [exponentials[expert] for expert in chosen]
    is_softmax = config.moe_router_score_function == "softmax"
    if is_late_softmax or (not is_softmax and config.moe_router_topk > 1):
        weights = [weight / sum(weights) for weight in weights]
    return chosen, [weight * (config.moe_router_topk_scaling_factor or 1.0) for weight in weights]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "default")
def test_experts_and_weights_are_those_of_a_plain_twin(kind: dict[str, object]) -> None:
    config = MoEConfig(num_experts=NUM_EXPERTS, **kind)  # type: ignore[arg-type]
    generator = np.random.default_rng(7)
    logits = generator.normal(size=(NUM_TOKENS, NUM_EXPERTS))
    bias = generator.normal(size=NUM_EXPERTS) * 0.1 if config.moe_router_enable_expert_bias else None
    indices, weights = choose_experts(
        torch.from_numpy(logits), config, None if bias is None else torch.from_numpy(bias)
    )
    for token in range(NUM_TOKENS):
        chosen, expected = plain_twin(logits[token], bias, config)
        assert indices[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-12)


def test_sqrtsoftplus_routes_as_transformers_and_has_the_gradient_of_its_weights() -> None:
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="has no DeepSeek-V4")
    kind = v4.DeepseekV4Config(
        hidden_size=9, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, routed_scaling_factor=2.5
    )
    assert kind.scoring_func == "sqrtsoftplus"
    theirs = v4.DeepseekV4TopKRouter(kind).double()
    generator = torch.Generator().manual_seed(3)
    bias = 0.3 * torch.randn(NUM_EXPERTS, generator=generator, dtype=torch.float64)
    theirs.e_score_correction_bias.copy_(bias)
    torch.nn.init.normal_(theirs.weight, generator=generator)
    x = torch.randn(NUM_TOKENS, 9, generator=generator, dtype=torch.float64)
    logits, expected, chosen = theirs(x)
    config = MoEConfig(
        num_experts=NUM_EXPERTS,
        moe_router_topk=3,
        moe_router_score_function="sqrtsoftplus",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
    )
    logits = logits.detach().requires_grad_()
    indices, weights = choose_experts(logits, config, bias)
    assert torch.equal(indices.sort(dim=1).values, chosen.sort(dim=1).values)
    torch.testing.assert_close(
        *(torch.zeros_like(logits).scatter(1, *each) for each in ((indices, weights), (chosen, expected))),
        rtol=1e-13,
        atol=0,
    )
    assert torch.autograd.gradcheck(lambda given: choose_experts(given, config, bias)[1], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sqrtsoftplus_has_finite_gradients_where_softplus_underflows(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-1000.0, -90.0, 0.0, 1000.0]], dtype=dtype, requires_grad=True)
    config = MoEConfig(num_experts=4, moe_router_topk=4, moe_router_score_function="sqrtsoftplus")
    _, weights = choose_experts(logits, config)
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient.isfinite().all()
    assert gradient[0, 2] < 0 < gradient[0, 3]
    assert gradient[0, 0] == 0


@pytest.mark.parametrize("eps", [0.0, 0.01, 0.4])
def test_sparsemixer_weights_and_their_gradients_are_those_of_transformers_in_evaluation(eps: float) -> None:
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe", reason="transformers is not installed")
    config = MoEConfig(num_experts=NUM_EXPERTS, moe_router_score_function="sparsemixer", moe_router_sparsemixer_eps=eps)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    logits[0] -= 9.0  # The best may be negative.
    logits.requires_grad_()
    heaviness = torch.randn(NUM_TOKENS, 2, generator=generator, dtype=torch.float64)
    results = []
    for indices, weights in (
        choose_experts(logits, config),
        phimoe.sparsemixer(logits, jitter_eps=eps, training=False)[::-1],
    ):
        results.append((indices, weights, *torch.autograd.grad((weights * heaviness).sum(), logits)))
    (indices, weights, grad), expected = results
    assert torch.equal(indices, expected[0])
    torch.testing.assert_close((weights, grad), expected[1:], rtol=1e-13, atol=1e-15)
    assert (weights < 1).any() == (eps > 0)
    assert torch.autograd.gradcheck(lambda x: choose_experts(x, config)[1], logits)


def balanced_twin(logits: np.ndarray) -> np.ndarray:
    """Scale rows and columns in turn, a sum at a time, far beyond convergence."""
    values = [[math.exp(value) for value in row] for row in logits.tolist()]
    for _ in range(400):
        values = [[value / sum(row) / len(values) for value in row] for row in values]
        sums = [sum(row[expert] for row in values) for expert in range(len(values[0]))]
        values = [[value / total / len(sums) for value, total in zip(row, sums, strict=True)] for row in values]
    return np.array(values)


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_sinkhorn_gives_tokens_and_experts_equal_sums_as_a_slow_twin(spread: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = spread * torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    logits += torch.linspace(0, 3 * spread, NUM_EXPERTS, dtype=torch.float64)
    found = sinkhorn(logits)
    np.testing.assert_allclose(found.numpy(), balanced_twin(logits.numpy()), rtol=3e-4)
    np.testing.assert_allclose(found.sum(dim=1).numpy() * NUM_TOKENS, 1.0, rtol=1e-4)
    np.testing.assert_allclose(found.sum(dim=0).numpy() * NUM_EXPERTS, 1.0, rtol=1e-4)
    with_others = torch.cat((logits[:20], 9 * torch.randn(3, NUM_EXPERTS, dtype=torch.float64), logits[20:]))
    is_counted = torch.ones(NUM_TOKENS + 3, dtype=torch.bool)
    is_counted[20:23] = False
    again = sinkhorn(with_others, is_counted=is_counted)
    torch.testing.assert_close(again[is_counted], found, rtol=1e-10, atol=0.0)
    assert not again[20:23].any()
    assert sinkhorn(logits[:0]).shape == (0, NUM_EXPERTS)


@pytest.mark.parametrize("topk", [1, 3])
def test_sinkhorn_routing_balances_in_training_and_weighs_with_plain_scores(topk: int) -> None:
    model, layer = make_layer(moe_router_topk=topk, moe_router_load_balancing_type=("sinkhorn",))
    router, rows = layer.router, TokenRows(20, 18, 2, 0)
    x = torch.randn(20, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    logits = F.linear(x[:18], router.weight, router.bias).detach().requires_grad_()
    scores = logits.sigmoid() if topk == 1 else logits.softmax(dim=-1)
    for is_training in (True, False):
        router.train(is_training)
        found = router(x, rows)
        ranked = balanced_twin(logits.detach().numpy()) if is_training else scores.detach().numpy()
        chosen = np.argsort(-ranked, axis=1)[:, :topk]
        np.testing.assert_array_equal(np.sort(found.indices[:18].numpy()), np.sort(chosen))
        torch.testing.assert_close(found.weights[:18], scores.gather(1, found.indices[:18]))
        assert found.indices[18:].eq(router.num_experts).all()
        if is_training:
            assert found.losses == ()
            gradients = []
            for weights, inputs in ((found.weights[:18], x), (scores.gather(1, found.indices[:18]), logits)):
                (gradient,) = torch.autograd.grad(weights.sin().sum(), inputs, retain_graph=True)
                gradients.append(gradient)
            torch.testing.assert_close(gradients[0][:18], gradients[1] @ router.weight.detach())


def test_sinkhorn_needs_no_value_on_the_host() -> None:
    """The planner and the simulation run it on tensors without values."""
    with FakeTensorMode():
        logits = torch.empty(NUM_TOKENS, NUM_EXPERTS)
        indices, weights = sinkhorn_experts(logits, 2, sinkhorn(logits, is_counted=torch.ones(NUM_TOKENS) > 0))
    assert indices.shape == weights.shape == (NUM_TOKENS, 2)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_full_expert_keeps_the_heaviest_or_the_first_tokens(policy: str) -> None:
    config = MoEConfig(num_experts=NUM_EXPERTS, moe_router_topk=2, moe_expert_capacity_factor=0.75)
    generator = torch.Generator().manual_seed(3)
    indices, weights = choose_experts(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator).double(), config)
    capacity = expert_capacity(NUM_TOKENS, config)
    assert capacity == math.ceil(NUM_TOKENS * 2 / NUM_EXPERTS * 0.75)
    # The rows are those of tokens in another order.
    positions = torch.randperm(NUM_TOKENS, generator=generator)
    is_kept = kept_choices(indices, weights, positions, NUM_EXPERTS, capacity, policy)
    for expert in range(NUM_EXPERTS):
        choices = (indices == expert).nonzero().tolist()
        if policy == "probs":
            choices.sort(key=lambda choice: -weights[choice[0], choice[1]].item())
        else:
            choices.sort(key=lambda choice: positions[choice[0]].item())
        assert all(bool(is_kept[token, place]) == (rank < capacity) for rank, (token, place) in enumerate(choices))
    assert 0 < (~is_kept).sum() < is_kept.numel()


def test_capacity_is_at_most_all_tokens() -> None:
    assert expert_capacity(5, MoEConfig(num_experts=2, moe_expert_capacity_factor=9.0)) == 5
    assert expert_capacity(5, MoEConfig(num_experts=2)) is None


def test_layers_with_experts_are_every_nth_or_those_of_a_list() -> None:
    assert moe_layers(MoEConfig(), 3) == (False, False, False)
    assert moe_layers(MoEConfig(num_experts=2), 3) == (True, True, True)
    assert moe_layers(MoEConfig(num_experts=2, moe_layer_freq="2"), 5) == (True, False, True, False, True)
    assert moe_layers(MoEConfig(num_experts=2, moe_layer_freq="([0]+[1]*2)"), 3) == (False, True, True)
    with pytest.raises(ValueError, match="use a list of 4"):
        moe_layers(MoEConfig(num_experts=2, moe_layer_freq="[0,1]"), 4)
    with pytest.raises(ValueError, match="greater than 0"):
        moe_layers(MoEConfig(num_experts=2, moe_layer_freq="0"), 4)


SETTINGS: dict[str, Any] = {
    "num_experts": 6,
    "moe_ffn_hidden_size": 18,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 22,
    "moe_shared_expert_gate": True,
    "params_dtype": "float64",
}


def make_layer(**settings: Any) -> tuple[GPTModel, ExpertLayer]:
    model = make_model(single_rank_group(), **(SETTINGS | settings))
    load_global_weights(model)
    layer = next(module for module in model.modules() if isinstance(module, ExpertLayer))
    return model, layer


def by_token(layer: ExpertLayer, x: torch.Tensor) -> torch.Tensor:
    """Return what each token's experts make of it, one after the other."""
    flat = x.reshape(-1, x.shape[-1])
    logits = F.linear(flat, layer.router.weight, layer.router.bias)
    down, up = layer.fc1_latent_proj, layer.fc2_latent_proj
    flat = flat if down is None else F.linear(flat, down.weight, down.bias)
    weights, indices = logits.topk(layer.config.moe.moe_router_topk)
    weights = weights.softmax(dim=-1)
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    rows = []
    for token in range(len(flat)):
        total = torch.zeros_like(flat[token])
        for weight, expert in zip(weights[token], indices[token].tolist()):
            inner = F.linear(flat[token], fc1.weight[expert], None if fc1.bias is None else fc1.bias[expert])
            output = F.linear(
                layer.experts.activation(inner), fc2.weight[expert], None if fc2.bias is None else fc2.bias[expert]
            )
            total = total + weight * output
        rows.append(total)
    assert layer.shared_experts is not None
    routed = torch.stack(rows)
    routed = routed if up is None else F.linear(routed, up.weight, up.bias)
    return routed.view_as(x) + layer.shared_experts(x).hidden


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"swiglu": True, "add_bias_linear": False, "moe_shared_expert_overlap": True},
        {"moe_latent_size": 10},
        {"moe_latent_size": 34, "swiglu": True, "add_bias_linear": False, "moe_shared_expert_overlap": True},
    ],
)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(settings: dict[str, Any], dispatcher: str) -> None:
    _, layer = make_layer(moe_token_dispatcher_type=dispatcher, **settings)
    x = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    wanted = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    inputs = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    ours, theirs = layer(x).hidden, by_token(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad((ours * wanted).sum(), inputs), torch.autograd.grad((theirs * wanted).sum(), inputs)
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)


def test_experts_are_chosen_at_random_in_training_alone_and_logits_have_the_gradient_of_what_was_drawn() -> None:
    _, layer = make_layer(moe_router_force_load_balancing=True)
    x = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(layer.eval()(x).hidden, by_token(layer, x), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigurationError, match="--moe-router-force-load-balancing"):
        layer.train()(x)
    keys = DropoutKeys(DropoutSamples.at(1, 2, 0, 3, "cpu"), torch.arange(7), slice(None), range(4))
    layer.router.keys, layer.router.layer_number = keys, 3
    routing = layer.router(x.flatten(0, 1), TokenRows(21, 21, 3, 0))
    drawn = keys.of_router(3, 6, slice(None)).double().requires_grad_()
    values, indices = drawn.topk(2)
    assert torch.equal(routing.indices, indices)
    assert torch.equal(routing.weights, values.softmax(dim=-1))
    wanted = torch.randn(21, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    (of_logits,) = torch.autograd.grad((values.softmax(dim=-1) * wanted).sum(), drawn)
    (found,) = torch.autograd.grad((routing.weights * wanted).sum(), layer.router.weight)
    torch.testing.assert_close(found, of_logits.t() @ x.flatten(0, 1), rtol=1e-12, atol=1e-14)
    assert float(found.abs().max()) > 1e-3


def test_padding_to_capacity_changes_no_number() -> None:
    x = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    capacity = {"moe_expert_capacity_factor": 0.6, "moe_token_dispatcher_type": "alltoall"}
    plain, padded = (
        make_layer(moe_pad_expert_input_to_capacity=pads, **capacity)[1](x).hidden for pads in (False, True)
    )
    torch.testing.assert_close(plain, padded, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_products_in_one_launch_are_told_once_where_groups_end(
    monkeypatch: pytest.MonkeyPatch, dispatcher: str
) -> None:
    """Six products of a layer, both passes together: their groups' ends are made once, of numbers on the device."""
    shape = {"moe_ffn_hidden_size": 16, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8}
    settings = {**shape, "params_dtype": "bfloat16", "bf16": True, "add_bias_linear": False}
    _, layer = make_layer(moe_token_dispatcher_type=dispatcher, **settings)
    x = torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    inputs = [x, *layer.experts.parameters()]
    told: list[tuple[RowCounts, torch.Tensor]] = []
    ends = RowCounts.ends

    def ends_told(counts: RowCounts, device: torch.device) -> torch.Tensor:
        assert counts.on_device is not None
        told.append((counts, ends(counts, device)))
        return told[-1][1]

    monkeypatch.setattr(RowCounts, "ends", ends_told)
    results = []
    for is_one_launch in (False, True):
        monkeypatch.setattr(gemm, "_is_one_launch", lambda *operands, answer=is_one_launch: answer)
        output = layer(x).hidden
        results.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    assert len(told) == 6
    assert all(made is told[0][1] for _, made in told)
    assert told[0][1].tolist() == list(accumulate(told[0][0]))
    for looped, launched in zip(*results):
        torch.testing.assert_close(launched, looped, rtol=2**-6, atol=2**-6 * float(looped.detach().abs().max()))


@pytest.mark.parametrize("factor", [None, 0.6])
def test_row_ends_on_the_device_give_the_numbers_of_counts_that_the_host_reads(
    monkeypatch: pytest.MonkeyPatch, factor: float | None
) -> None:
    """With a capacity choices are dropped, and an expert has no tokens; its part of the main gradient stays."""
    shape = {"moe_ffn_hidden_size": 16, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8}
    settings = {**shape, "params_dtype": "bfloat16", "bf16": True, "add_bias_linear": False}
    x = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = torch.cat((x, x)).requires_grad_()
    monkeypatch.setattr(gemm, "_is_one_launch", lambda *operands: True)
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or tolist(self))
    results = []
    for on_device in (False, True):
        monkeypatch.setattr(grouped_experts, "has_grouped_kernel", lambda *_, answer=on_device: answer)
        _, layer = make_layer(moe_expert_capacity_factor=factor, **settings)
        weights = [layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight]
        for weight in weights:
            attach_main_grad(weight, MainGrad(torch.full(weight.shape, 0.5)))
        of_passes = []
        reads.clear()
        for _ in range(2):
            output = layer(x).hidden
            (grad,) = torch.autograd.grad(output.float().square().sum(), x, retain_graph=True)
            output.float().square().sum().backward()
            of_passes += [output, grad]
        assert len(reads) == (0 if on_device else 2)
        main_grads = [main_grad_of(weight) for weight in weights]
        results.append([*of_passes, *(each.tensor for each in main_grads if each is not None)])
    assert len(results[0]) == 6
    for read, known in zip(*results):
        assert known.isfinite().all()
        assert torch.equal(known, read)


def multiply_groups(rows: QuantizedGroups, weights: QuantizedGroups, ends: RowEnds, *, transpose: bool) -> torch.Tensor:
    """Compute `grouped_scaled_product`, which only a GPU does, in float32; rows after the last group are NaN."""
    assert rows.data is not None
    assert rows.scale is not None
    if transpose:
        assert weights.turned is not None
        assert weights.turned_scale is not None
        values = weights.turned.float().view(len(weights.turned), len(ends), -1).permute(1, 0, 2)
        values = values * weights.turned_scale.unsqueeze(-1)
    else:
        assert weights.data is not None
        assert weights.scale is not None
        values = (weights.data.float() * weights.scale[:, None]).view(len(ends), -1, weights.data.shape[1])
    result = torch.full((len(rows.data), values.shape[1]), torch.nan).bfloat16()
    left = rows.data.float() * rows.scale[:, None]
    for start, end, value in zip([0, *ends.ends.tolist()], ends.ends.tolist(), values):
        result[start:end] = (left[start:end] @ value.t()).bfloat16()
    return result


def gradients_of_groups(grad: QuantizedGroups, x: QuantizedGroups, ends: RowEnds) -> torch.Tensor:
    """Compute `unfinished_scaled_gradient`, which only a GPU does, in float32; groups without rows are NaN."""
    assert grad.turned is not None
    assert grad.turned_scale is not None
    assert x.turned is not None
    assert x.turned_scale is not None
    found, stops = [], ends.ends.tolist()
    for number, (start, end) in enumerate(zip([0, *stops], stops)):
        left = grad.turned[:, start:end].float() * grad.turned_scale[number][:, None]
        right = x.turned[:, start:end].float() * x.turned_scale[number][:, None]
        found.append(left @ right.t() if end > start else torch.full((len(left), len(right)), torch.nan))
    return torch.stack(found).bfloat16()


@pytest.mark.parametrize("kind", ["all choices", "dropped choices", "permuted rows"])
def test_float8_experts_at_once_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Tokens are quantized in the order of the rows; expert 3 has no rows if they are permuted."""
    monkeypatch.setattr(fp8_experts, "grouped_scaled_product", multiply_groups)
    monkeypatch.setattr(fp8_experts, "unfinished_scaled_gradient", gradients_of_groups)
    settings = {
        "moe_ffn_hidden_size": 32,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "params_dtype": "bfloat16",
        "bf16": True,
        "add_bias_linear": False,
        "fp8_format": "e4m3",
        "fp8_recipe": "rowwise",
        "moe_expert_capacity_factor": 0.6 if kind == "dropped choices" else None,
    }
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(19, 2, 32, generator=generator).bfloat16()
    grad = torch.randn(19, 2, 32, generator=generator).bfloat16()
    by_expert = torch.randperm(38, generator=generator)
    order = RowOrder(by_expert, by_expert.argsort().unsqueeze(1))
    results = []
    for at_once in (False, True):
        monkeypatch.setattr(grouped_experts, "has_scaled_groups", lambda *_, answer=at_once: answer)
        model, layer = make_layer(**settings)
        compute_in_float8([model], model.config, "cpu")
        given = x.clone().requires_grad_()
        if kind == "permuted rows":
            output = layer.experts(given.flatten(0, 1), [7, 1, 16, 0, 4, 10], order).view(x.shape)
        else:
            output = layer(given).hidden
        output.backward(grad)
        weights = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
        results.append([output.detach(), given.grad, *(weight.grad for weight in weights)])
    for one_by_one, found in zip(*results, strict=True):
        assert one_by_one.any()
        torch.testing.assert_close(found, one_by_one, rtol=2**-6, atol=2**-7 * float(one_by_one.abs().max()))


def test_weight_gradients_that_are_deferred_are_the_same() -> None:
    _, layer = make_layer(add_bias_linear=False)
    weights = [layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight]
    rows = torch.randn(9, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    found = []
    for late in (None, []):
        for weight in weights:
            attach_main_grad(weight, MainGrad(torch.zeros_like(weight)))
        layer.experts(rows, [2, 0, 3, 1, 0, 3], late=late).square().sum().backward()
        main_grads = [each for each in map(main_grad_of, weights) if each is not None]
        if late is not None:
            assert len(late) == 2
            assert all(each.is_empty for each in main_grads)
            for add in late:
                add()
        found.append([each.tensor for each in main_grads])
    for at_once, deferred in zip(*found):
        assert at_once.any()
        assert torch.equal(at_once, deferred)
    # Nothing runs after the experts if their input needs no gradient.
    late = []
    layer.experts(rows.detach(), [2, 0, 3, 1, 0, 3], late=late).square().sum().backward()
    assert late == []


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    _, layer = make_layer()
    x = torch.randn(1, 1, 28, dtype=torch.float64, requires_grad=True)
    layer(x).hidden.sum().backward()
    gradient = layer.experts.linear_fc1.weight.grad
    assert gradient is not None
    assert (gradient.flatten(1).abs().sum(dim=1) > 0).sum() == 2


def test_recomputed_passes_are_not_counted_and_evaluation_is_not_either() -> None:
    model, layer = make_layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    loads = loads_of([model], model.config, describe_parallel_state(0, 1))
    assert loads is not None
    x = torch.randn(7, 3, 28, dtype=torch.float64, requires_grad=True)
    recompute(layer, x).hidden.sum().backward()
    with torch.no_grad():
        layer(x)
    totals = loads.collect(torch.device("cpu"))
    assert totals[0].sum() == 7 * 3 * 2
    report = loads.report(totals[:1])
    assert sum(report.shares[0]) == pytest.approx(6.0)
    bias = layer.router.expert_bias
    assert bias is not None
    before, given = bias.detach().clone(), totals[0, :-1]
    loads.move_biases(totals)
    assert torch.equal(bias.detach(), before + (given.mean() - given).sign() * 1e-3)
    loads.begin_step()
    assert loads.collect(torch.device("cpu")).sum() == 0


def test_a_report_numbers_layers_from_one_and_experts_from_zero() -> None:
    report = LoadReport((0, 2), ((0.5, 1.5), (0.75, 1.25)), 0.1)
    assert report.by_layer() == {"1": [0.5, 1.5], "3": [0.75, 1.25]}
    assert report.scalars() == {
        "expert-load/layer-1/expert-0": 0.5,
        "expert-load/layer-1/expert-1": 1.5,
        "expert-load/layer-3/expert-0": 0.75,
        "expert-load/layer-3/expert-1": 1.25,
    }
    assert report.numbers() == {"expert_load_max": 1.5, "expert_load_min": 0.5, "dropped_tokens": 0.1}
    assert LoadReport((), (), 0.0).numbers() == {"expert_load_max": 0.0, "expert_load_min": 0.0, "dropped_tokens": 0.0}


def test_a_report_is_of_shares_of_the_even_load() -> None:
    """Of 40 choices 10 were dropped; an expert's share is 1 where all of its layer have as many."""
    model = make_model(single_rank_group(), **(SETTINGS | {"num_experts": 4}))
    loads = loads_of([model], model.config, describe_parallel_state(0, 1))
    assert loads is not None
    totals = torch.tensor([[2.0, 6.0, 4.0, 8.0, 0.0], [0.0, 0.0, 10.0, 0.0, 10.0]], dtype=torch.float64)
    report = loads.report(totals)
    assert report.shares == ((0.4, 1.2, 0.8, 1.6), (0.0, 0.0, 4.0, 0.0))
    assert report.dropped == 0.25
    nothing = loads.report(torch.zeros(2, 5, dtype=torch.float64))
    assert (nothing.shares, nothing.dropped) == (((0.0,) * 4,) * 2, 0.0)


def test_a_dense_model_has_no_loads() -> None:
    model = make_model(single_rank_group())
    assert loads_of([model], model.config, describe_parallel_state(0, 1)) is None
    assert model.auxiliary_loss_names == ()


def test_a_routers_bias_begins_as_its_weight_does() -> None:
    model = make_model(single_rank_group(), **(SETTINGS | {"num_experts": 400, "init_method_std": 0.5}))
    router = next(module for module in model.modules() if isinstance(module, ExpertLayer)).router
    assert router.bias is not None
    assert router.bias.std().item() == pytest.approx(0.5, rel=0.15)
    assert router.weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_weights_keep_the_type_of_the_router_until_outputs_are_summed(dispatcher: str, dtype: str) -> None:
    """In bfloat16, with experts that give back what they are given: the weighted sum is rounded once."""
    settings = {"params_dtype": "bfloat16", "bf16": True, "moe_router_topk": 3, "moe_router_pre_softmax": True}
    _, layer = make_layer(moe_token_dispatcher_type=dispatcher, moe_router_dtype=dtype, **settings)
    x = torch.randn(50, 28, generator=torch.Generator().manual_seed(5)).bfloat16()
    routing = layer.router(x, TokenRows(50, 50, 5, 0))
    logits = F.linear(x.double(), layer.router.weight.double(), layer.router.bias.double())
    values = logits.softmax(dim=-1).gather(1, routing.indices).detach().requires_grad_()
    torch.testing.assert_close(routing.weights.double(), values, rtol=1e-6, atol=0)
    weights = routing.weights.detach().requires_grad_()
    wanted = torch.randn(50, 28, generator=torch.Generator().manual_seed(6)).bfloat16()
    rows = x.clone().requires_grad_()
    chosen = dataclasses.replace(routing, weights=weights)

    def experts(
        x: torch.Tensor, counts: Any, order: RowOrder | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return run_in_order(lambda given: given * 1.25, x, order, weights)

    output = layer.dispatch(rows, chosen, experts, lambda: None)
    exact = x.double().requires_grad_()
    expected = values.sum(dim=1, keepdim=True) * (exact * 1.25).bfloat16().double()
    # Rounded once, but for ties that float32 moves.
    assert (output != expected.bfloat16()).double().mean() < 0.01
    found_of_weights, found_of_rows = torch.autograd.grad(output, (weights, rows), wanted)
    of_weights = torch.autograd.grad(expected, values, wanted.double())[0]
    # Sums of 28 products, of which some cancel.
    torch.testing.assert_close(found_of_weights.double(), of_weights, rtol=1e-5, atol=1e-5)
    of_rows = values.sum(dim=1, keepdim=True) * wanted.double() * 1.25
    torch.testing.assert_close(found_of_rows.double(), of_rows, rtol=2**-6, atol=2**-8)


def test_without_a_type_of_its_own_the_router_gives_weights_of_the_type_of_hidden_states() -> None:
    _, layer = make_layer(params_dtype="bfloat16", bf16=True)
    routing = layer.router(torch.ones(6, 28, dtype=torch.bfloat16), TokenRows(6, 6, 2, 0))
    assert routing.weights.dtype == torch.bfloat16


ALL_LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.1,),
    "moe_z_loss_coeff": 0.01,
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_rows_with_padding_are_routed_and_counted_as_each_row_alone(dispatcher: str) -> None:
    """Rows of 7, 4 and no tokens: outputs, losses, the router's gradient and the tally are the rows' own."""
    _, layer = make_layer(moe_token_dispatcher_type=dispatcher, **ALL_LOSSES)
    lengths = (7, 4, 0)
    x = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    padding_mask = torch.arange(7) >= torch.tensor(lengths).unsqueeze(1)
    layer.router.tally.begin_step()
    output, losses = layer(x, padding_mask)
    found = {loss.name: loss for loss in losses}
    counts = layer.router.tally.counts
    layer.router.tally.begin_step()
    expected = {name: torch.zeros((), dtype=torch.float64) for name in found}
    for row, length in enumerate(lengths[:2]):
        alone = layer(x[:length, row : row + 1])
        torch.testing.assert_close(output[:length, row : row + 1], alone.hidden, rtol=1e-12, atol=1e-12)
        for loss in alone.losses:
            expected[loss.name] = expected[loss.name] + loss.loss_sum
    assert sorted(found) == ["seq_load_balancing_loss", "z_loss"]
    for name, loss in found.items():
        assert loss.num_tokens == 11
        torch.testing.assert_close(loss.loss_sum, expected[name], rtol=1e-12, atol=0)
        both = (loss.loss_sum, expected[name])
        gradients = (torch.autograd.grad(each, layer.router.weight, retain_graph=True)[0] for each in both)
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert counts is not None
    assert torch.equal(counts, layer.router.tally.counts)
    assert (counts.sum(), counts[-1]) == (22, 0)


def test_a_micro_batch_of_padding_alone_has_losses_of_zero() -> None:
    kinds = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss")}
    _, layer = make_layer(**(ALL_LOSSES | kinds))
    output, losses = layer(torch.randn(5, 2, 28, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool))
    assert [float(loss.loss_sum.detach()) for loss in losses] == [0.0] * 4
    assert output.isfinite().all()
    total = output.sum() + torch.stack([loss.loss_sum for loss in losses]).sum()
    assert torch.autograd.grad(total, layer.router.weight)[0].isfinite().all()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_takes_no_place_of_a_capacity(policy: str) -> None:
    """Whatever stands where rows are padded, the tokens keep their experts."""
    _, layer = make_layer(moe_expert_capacity_factor=0.6, moe_token_drop_policy=policy)
    x = torch.randn(7, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    padding_mask = torch.arange(7) < torch.tensor((0, 3, 4)).unsqueeze(1)
    results = []
    for filling in (0.0, 30.0):
        layer.router.tally.begin_step()
        filled = x.masked_fill(padding_mask.t().unsqueeze(-1), filling)
        results.append((layer(filled, padding_mask).hidden[~padding_mask.t()], layer.router.tally.counts))
    assert torch.equal(*(output for output, _ in results))
    assert torch.equal(*(counts for _, counts in results))
