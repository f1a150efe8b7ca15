"""Newton-Schulz against the singular values it acts on, Muon against torch's, and Lion against its formula."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.muon import COEFFICIENTS, Muon, is_orthogonalized, orthogonalize, update_scale
from megatron.core.optimizer.muon_shard_exchange import (
    MuonShardExchange,
    RankCoordinates,
    _choose_batches,
    _choose_owners,
    _largest_first,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from megatron.core.transformer.hybrid_config import RECURRENT_KINDS, HybridConfig


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16), (1, 9)])
@pytest.mark.parametrize("num_steps", [1, 5, 7])
def test_iterations_act_on_the_singular_values_alone(kind: str, shape: tuple[int, int], num_steps: int) -> None:
    matrix = random(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for step in range(num_steps):
        a, b, c = COEFFICIENTS[kind][step % len(COEFFICIENTS[kind])]
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    torch.testing.assert_close(orthogonalize(matrix, num_steps, kind, torch.float64), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_five_iterations_bring_singular_values_near_one(kind: str) -> None:
    values = torch.linalg.svdvals(orthogonalize(random(32, 96), 5, kind, torch.float32))
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalize(torch.zeros(4, 6), 5, "quintic", torch.bfloat16).any()


def test_scales() -> None:
    assert update_scale(8, 32, "spectral") == update_scale(32, 8, "spectral") == 32**0.5
    assert [update_scale(8, 32, mode) for mode in ("unit_rms_norm", "shape_scaling")] == [0.5, 1.0]
    assert [update_scale(32, 8, mode) for mode in ("unit_rms_norm", "shape_scaling")] == [2.0, 2.0]


def muon_of(
    weight: torch.nn.Parameter, config: OptimizerConfig, fused_rows: tuple[int, ...] = (), layer: str = "in_proj"
) -> tuple[Muon, torch.Tensor]:
    spec = ParamSpec(f"{layer}.weight", tuple(weight.shape), full_shards(weight.shape), fused_rows=fused_rows)
    attach_spec(weight, spec)
    flat = weight.data.view(-1)
    part = ParamShard(weight, 0, weight.numel(), flat, torch.zeros_like(flat))
    alone = single_rank_group()
    exchange = MuonShardExchange([weight], [part], alone, alone, is_sharded=False)
    return Muon(config, [flat], [1.0], exchange), flat


def step(muon: Muon, weights: list[torch.Tensor], gradients: list[torch.Tensor], grad_multiplier: float = 1.0) -> None:
    factor = torch.tensor(grad_multiplier, dtype=torch.float64)
    muon.step_if(torch.tensor(True), weights, gradients, factor)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_torch(nesterov: bool) -> None:
    ours = torch.nn.Parameter(random(24, 64).float())
    theirs = torch.nn.Parameter(ours.detach().clone())
    config = OptimizerConfig(
        optimizer="muon",
        muon_nesterov=nesterov,
        muon_coefficient_type="simple",
        muon_scale_mode="shape_scaling",
    )
    muon, flat = muon_of(ours, config)
    muon.set_learning_rate(0.02, 0.1)
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn="original"
    )
    before = ours.detach().clone()
    for seed in range(1, 6):
        gradient = random(24, 64, seed=seed).float()
        step(muon, [flat], [4.0 * gradient.view(-1)], grad_multiplier=0.25)
        theirs.grad = gradient.clone()
        reference.step()
    # Both round their products to bfloat16, at places of their own.
    assert (ours - theirs).norm() < 0.01 * (theirs - before).norm()


def test_fused_matrices_are_made_orthogonal_one_by_one() -> None:
    """Two groups of two query rows, a key and a value row: two matrices of 2 rows, and one of 4."""
    gradient = random(8, 16)
    rows = [[0, 1, 4, 5], [2, 6], [3, 7]]
    for is_split, matrices in ((True, rows), (False, [list(range(8))])):
        config = OptimizerConfig(optimizer="muon", muon_momentum=0.0, muon_split_qkv=is_split)
        weight = torch.nn.Parameter(torch.zeros(8, 16, dtype=torch.float64))
        muon, flat = muon_of(weight, config, fused_rows=(2, 1, 1), layer="self_attention.linear_qkv")
        muon.set_learning_rate(1.0, 0.0)
        step(muon, [flat], [gradient.reshape(-1).clone()])
        for chosen in matrices:
            expected = orthogonalize(gradient[chosen], 5, "quintic", torch.float64) * update_scale(
                len(chosen), 16, "spectral"
            )
            torch.testing.assert_close(-weight.detach()[chosen], expected)


@pytest.mark.parametrize("mixer", RECURRENT_KINDS)
@pytest.mark.parametrize("is_split", [True, False])
def test_each_tensor_of_a_recurrent_layers_projection_is_made_orthogonal_by_itself(mixer: str, is_split: bool) -> None:
    """--muon-no-split-qkv is about attention alone."""
    hybrid = HybridConfig(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=2,
        mamba_num_heads=4,
        mamba_head_dim=3,
        mamba_num_groups=2,
        mamba_state_dim=2,
    )
    rows = hybrid.projection_rows(mixer, 8)
    gradient, config = random(sum(rows), 8), OptimizerConfig(optimizer="muon", muon_split_qkv=is_split)
    weight = torch.nn.Parameter(torch.zeros(sum(rows), 8, dtype=torch.float64))
    muon, flat = muon_of(weight, dataclasses.replace(config, muon_momentum=0.0), fused_rows=rows)
    muon.set_learning_rate(1.0, 0.0)
    step(muon, [flat], [gradient.reshape(-1).clone()])
    for found, part in zip(weight.detach().split(rows), gradient.split(rows), strict=True):
        expected = orthogonalize(part, 5, "quintic", torch.float64) * update_scale(len(part), 8, "spectral")
        torch.testing.assert_close(-found, expected)


def test_each_expert_has_matrices_of_its_own() -> None:
    """Three experts whose gate and up are stacked: six matrices, also where shards begin anywhere."""
    gradient = random(3, 8, 5)
    config = OptimizerConfig(optimizer="muon", muon_momentum=0.0)
    weight = torch.nn.Parameter(torch.zeros(3, 8, 5, dtype=torch.float64))
    shape = tuple(weight.shape)
    attach_spec(weight, ParamSpec("experts.weight", shape, full_shards(shape), fused_rows=(4, 4), is_expert=True))
    flat, ends = weight.data.view(-1), (0, 7, 90, weight.numel())
    parts = [ParamShard(weight, a, b, flat[a:b], torch.zeros(b - a)) for a, b in pairwise(ends)]
    alone = single_rank_group()
    main = [part.values for part in parts]
    muon = Muon(config, main, [1.0] * 3, MuonShardExchange([weight], parts, alone, alone, is_sharded=False))
    muon.set_learning_rate(1.0, 0.0)
    step(muon, main, [gradient.view(-1)[part.start : part.end].clone() for part in parts])
    for expert in range(3):
        for rows in (slice(0, 4), slice(4, 8)):
            expected = orthogonalize(gradient[expert, rows], 5, "quintic", torch.float64) * 5**0.5
            torch.testing.assert_close(-weight.detach()[expert, rows], expected)


def test_batches_bound_the_memory_of_whole_matrices_and_change_no_bit() -> None:
    """Thirty experts of 7 x 12, of which a batch has three, in parts that end within one."""
    shape, weights, num_wholes = (30, 7, 12), [], []
    for batch_bytes in (2**30, 3 * 7 * 12 * 4):
        weight = torch.nn.Parameter(random(*shape).float())
        attach_spec(weight, ParamSpec("experts.weight", shape, full_shards(shape), is_expert=True))
        flat, ends = weight.data.view(-1), (0, 1000, weight.numel())
        parts = [ParamShard(weight, a, b, flat[a:b], torch.zeros(b - a)) for a, b in pairwise(ends)]
        alone, main = single_rank_group(), [part.values for part in parts]
        exchange = MuonShardExchange([weight], parts, alone, alone, is_sharded=False, batch_bytes=batch_bytes)
        muon = Muon(OptimizerConfig(optimizer="muon", muon_nesterov=True), main, [1.0, 0.5], exchange)
        muon.set_learning_rate(0.1, 0.3)
        for seed in (1, 2):
            gradient = random(*shape, seed=seed).float().view(-1)
            step(muon, main, [gradient[part.start : part.end] for part in parts], 0.5)
        weights.append(weight.detach())
        num_wholes.append([sum(at.end - at.start for at in each.shard_ranges) // (7 * 12) for each in exchange.batches])
    assert num_wholes == [[30], [3] * 10]
    assert torch.equal(*weights)


class Operators(TorchDispatchMode):
    """Count the operators that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_ranks", [4, 8, 32])
@pytest.mark.parametrize("is_bucketed", [True, False])
def test_owners_work_in_the_same_batches(num_ranks: int, is_bucketed: bool) -> None:
    """A model of 7B whose shards are of each bucket, or of a run of layers: most work is done by all owners at once."""
    width, inner = 4096, 11008
    of_layer = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (2 * inner, width), "fc2": (width, inner)}
    shapes = {f"layers.{layer}.{name}": shape for layer in range(32) for name, shape in of_layer.items()}
    ends = [0, *accumulate(rows * columns for rows, columns in shapes.values())]
    cut = [0]
    for end in ends if is_bucketed else ends[-1:]:
        if end - cut[-1] >= 40_000_000 or end == ends[-1]:
            cut.append(end)
    num_held: dict[str, dict[RankCoordinates, int]] = {name: {} for name in shapes}
    for of_rank, (start, end) in zip(num_held.values(), pairwise(ends)):
        bucket = max(number for number, first in enumerate(cut[:-1]) if first <= start)
        share = -(-(cut[bucket + 1] - cut[bucket]) // num_ranks)
        for rank in range(num_ranks):
            first = cut[bucket] + rank * share
            count = min(end, first + share) - max(start, first)
            if count > 0:
                of_rank[RankCoordinates(rank, 0)] = count
    owner = _choose_owners(shapes, _largest_first(shapes, num_held), [shapes], num_ranks)
    most = 1 << 24
    batch_of = _choose_batches(shapes, owner, num_held, most)
    done: Counter[tuple[int, tuple[int, int]]] = Counter()
    held: Counter[tuple[int, tuple[int, int]]] = Counter()
    for name, (rows, columns) in shapes.items():
        done[batch_of[name], owner[name]] += rows * columns * min(rows, columns)
        for rank, count in num_held[name].items():
            held[batch_of[name], rank] += count
    slowest = [max(work for (number, _), work in done.items() if number == each) for each in set(batch_of.values())]
    assert sum(slowest) <= 2.0 * sum(done.values()) / num_ranks
    assert max(held.values()) <= max(most, 2 * inner * width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_and_weights_of_a_batch_are_updated_together(dtype: torch.dtype) -> None:
    """Twelve experts in two batches; a gradient in bfloat16 becomes float32 in each."""
    shape = (12, 3, 5)
    weight = torch.nn.Parameter(torch.zeros(shape))
    attach_spec(weight, ParamSpec("experts.weight", shape, full_shards(shape), is_expert=True))
    flat, alone = weight.data.view(-1), single_rank_group()
    parts = [ParamShard(weight, 0, weight.numel(), flat, torch.zeros_like(flat))]
    exchange = MuonShardExchange([weight], parts, alone, alone, is_sharded=False, batch_bytes=6 * 3 * 5 * 4)
    config = OptimizerConfig(optimizer="muon", muon_nesterov=True, muon_fp32_matmul_prec="highest")
    muon = Muon(config, [flat], [1.0], exchange)
    gradient = random(weight.numel()).to(dtype)
    with Operators() as operators:
        step(muon, [flat], [gradient], 0.5)
    counts = operators.counts
    assert counts["aten.lerp.Scalar"] == counts["aten.where.self_out"] == 2 * 2
    assert counts["aten._foreach_add_.List"] == 2
    # The factor of the gradients once, and their conversion once per batch.
    assert counts["aten._to_copy.default"] == (1 if dtype is torch.float32 else 3)


def test_nothing_changes_where_a_gradient_is_not_finite() -> None:
    weight = torch.nn.Parameter(random(4, 6).float())
    muon, flat = muon_of(weight, OptimizerConfig(optimizer="muon"))
    muon.set_learning_rate(0.1, 0.1)
    before = weight.detach().clone()
    nan = torch.full_like(flat, torch.nan)
    muon.step_if(torch.tensor(False), [flat], [nan], torch.tensor(1.0, dtype=torch.float64))
    assert torch.equal(weight, before)
    assert not muon.state_of(flat, "momentum_buffer").any()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", (8, 4), True),
        ("decoder.layers.0.mlp.linear_fc1.bias", (8,), False),
        ("embedding.word_embeddings.weight", (8, 4), False),
        ("embedding.position_embeddings.weight", (8, 4), False),
        ("output_layer.weight", (8, 4), False),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", (2, 8, 4), True),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (2, 8), False),
    ],
)
def test_hidden_matrices_are_chosen(name: str, shape: tuple[int, ...], expected: bool) -> None:
    spec = ParamSpec(name, shape, full_shards(shape), is_expert="experts" in name)
    assert is_orthogonalized(spec) == expected


def test_lion_follows_its_formula() -> None:
    weight, momentum = random(6).float(), torch.zeros(6)
    expected = weight.clone()
    lion = InnerOptimizer(OptimizerConfig(optimizer="lion", lion_beta1=0.9, lion_beta2=0.7), [([weight], 1.0)])
    lion.set_learning_rate(0.1, 0.5)
    for seed in range(4):
        gradient = random(6, seed=seed).float()
        weight.grad = 8.0 * gradient
        lion.step([weight], grad_multiplier=0.125)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * (0.9 * momentum + 0.1 * gradient).sign()
        momentum = 0.7 * momentum + 0.3 * gradient
        torch.testing.assert_close(weight, expected)
        torch.testing.assert_close(lion.state_of(weight, "exp_avg"), momentum)


def test_lion_on_a_device_that_decides_makes_the_step_of_the_host_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Shards of 4 and 2 elements.
    monkeypatch.setattr("megatron.core.optimizer.inner_optimizer._PIECE", 4)
    config = OptimizerConfig(optimizer="lion", lion_beta1=0.9, lion_beta2=0.7)
    weights = [random(6).float() for _ in range(2)]
    on_host, on_device = (InnerOptimizer(config, [([weight], 1.0)]) for weight in weights)
    on_device.decides_on_device = True
    factor = torch.tensor(0.375, dtype=torch.float64)
    for seed in range(3):
        for lion, weight in zip((on_host, on_device), weights):
            lion.set_learning_rate(0.1, 0.5)
            weight.grad = random(6, seed=seed).float()
            lion.step_if(torch.tensor(True), [weight], factor)
    before = weights[1].clone(), on_device.state_of(weights[1], "exp_avg").clone()
    assert torch.equal(weights[0], before[0])
    assert torch.equal(on_host.state_of(weights[0], "exp_avg"), before[1])
    weights[1].grad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 0.0, 2.0])
    on_device.step_if(torch.tensor(False), [weights[1]], factor)
    assert torch.equal(weights[1], before[0])
    assert torch.equal(on_device.state_of(weights[1], "exp_avg"), before[1])


def test_lion_on_a_device_asks_for_two_operators_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimizerConfig(optimizer="lion")
    first = [random(5 + number, seed=number).float() for number in range(40)]
    weights, operators = [], []
    for shard in (1 << 24, 100, 7):
        monkeypatch.setattr("megatron.core.optimizer.inner_optimizer._PIECE", shard)
        own = [weight.clone() for weight in first]
        lion = InnerOptimizer(config, [(own, 1.0)])
        lion.decides_on_device = True
        for seed in (1, 2):
            lion.set_learning_rate(0.1, 0.5)
            for number, weight in enumerate(own):
                weight.grad = random(weight.numel(), seed=100 * seed + number).float()
            with Operators() as counted:
                lion.step_if(torch.tensor(True), own, torch.tensor(0.375, dtype=torch.float64))
        weights.append(torch.cat(own))
        operators.append(sum(counted.counts.values()))
    assert operators[0] <= 2 * 40 + 10
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
