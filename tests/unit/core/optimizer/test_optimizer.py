"""The optimizer on one replica against torch's own in float64, its precisions, its refusals and its state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.weight_checks import BadWeightsError
from megatron.core.errors import TrainingError
from megatron.core.main_grad import main_grad_of
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, full_shards, spec_of
from tests.unit.core.distributed.toy_model import ToyModel, autograd_gradients, batch

STATE = describe_parallel_state(0, 1)
DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def build(
    dtype: torch.dtype = torch.float64, *, check: bool = True, in_bf16: bool = False, **options: object
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    ddp_config = DistributedDataParallelConfig(check_for_nan_in_loss_and_grad=check, grad_reduce_in_bf16=in_bf16)
    ddp = DistributedDataParallel(ToyModel(dtype), ddp_config, STATE)
    settings: dict[str, object] = {"lr": 0.01, "params_dtype": DTYPE_NAMES[dtype], **options}
    return ddp, MegatronOptimizer(OptimizerConfig(**settings), [ddp], STATE)  # type: ignore[arg-type]


def train_step(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, index: int) -> StepOutcome:
    ddp.zero_grad_buffer()
    (ddp(*batch(index)) * optimizer.loss_scale).backward()
    ddp.finish_grad_sync()
    return optimizer.step()


def oracle(steps: int, clip: float, make: type[torch.optim.Optimizer], decay: float, **options: object) -> ToyModel:
    """Train by torch alone: autograd's gradients, ``clip_grad_norm_`` and an unfused optimizer."""
    model = ToyModel()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = make(groups, lr=0.01, foreach=False, **options)  # type: ignore[call-arg]
    for index in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model(*batch(index)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same_parameters(model: nn.Module, expected: nn.Module, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[name].detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
def test_adam_equals_torch_in_float64(clip: float) -> None:
    options = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}
    ddp, optimizer = build(clip_grad=clip, weight_decay=0.1, **options)
    for index in range(5):
        assert train_step(ddp, optimizer, index).success
    expected = oracle(5, clip, torch.optim.AdamW, 0.1, betas=(0.8, 0.95), eps=1e-6)
    assert_same_parameters(ddp.module, expected)
    assert optimizer.num_steps == 5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch_in_float64(momentum: float) -> None:
    ddp, optimizer = build(optimizer="sgd", sgd_momentum=momentum, clip_grad=2.0, weight_decay=0.1)
    for index in range(4):
        train_step(ddp, optimizer, index)
    assert_same_parameters(ddp.module, oracle(4, 2.0, torch.optim.SGD, 0.1, momentum=momentum))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_float32_scales_in_the_kernel_to_the_same_result(name: str) -> None:
    ddp, optimizer = build(torch.float32, optimizer=name, clip_grad=0.7, weight_decay=0.1)
    for index in range(3):
        train_step(ddp, optimizer, index)
    make, options = {
        "adam": (torch.optim.AdamW, {"betas": (0.9, 0.999)}),
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    }[name]
    expected = oracle(3, 0.7, make, 0.1, **options).float()
    assert_same_parameters(ddp.module, expected, rtol=2e-4, atol=2e-6)


def test_outcome_reports_norm_and_zeros_of_the_unclipped_gradient() -> None:
    ddp, optimizer = build(clip_grad=0.5, log_num_zeros_in_grad=True)
    outcome = train_step(ddp, optimizer, 0)
    expected = autograd_gradients([0])
    norm = math.sqrt(sum(grad.square().sum().item() for grad in expected.values()))
    assert outcome.success
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-12)
    assert outcome.num_zeros == sum(int((grad == 0).sum()) for grad in expected.values())
    assert norm > 0.5


def test_norm_of_the_main_parameters() -> None:
    _, optimizer = build()
    expected = math.sqrt(sum(p.detach().square().sum().item() for p in ToyModel().parameters()))
    assert optimizer.params_norm() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_parameters_are_their_own_main_parameters(dtype: torch.dtype) -> None:
    ddp, optimizer = build(dtype)
    assert not any(name.startswith("optimizer.main_param") for name in optimizer.sharded_state())
    train_step(ddp, optimizer, 0)
    assert all(parameter.grad is None for parameter in ddp.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_rounded_from_float32_ones(dtype: torch.dtype) -> None:
    ddp, optimizer = build(dtype, lr=1e-5, initial_loss_scale=2.0**6)
    before = {name: tensor.clone() for name, (_, tensor) in optimizer.sharded_state().items()}
    for index in range(3):
        assert train_step(ddp, optimizer, index).success
    state = optimizer.sharded_state()
    for parameter in ddp.parameters():
        name = f"optimizer.main_param.{parameter.spec.name}"
        main = state[name][1]
        assert main.dtype is torch.float32
        assert torch.equal(parameter.detach(), main.to(dtype))
        # Steps of 1e-5 vanish in the rounding of most weights: only the main parameters keep them.
        assert not torch.equal(main, before[name])


def test_loss_scale_leaves_norm_and_update_unchanged() -> None:
    updates = []
    for scale in (None, 1024.0):
        ddp, optimizer = build(torch.float32, loss_scale=scale, clip_grad=0.3)
        outcome = train_step(ddp, optimizer, 0)
        updates.append((outcome.grad_norm, ddp.module.fc1.detach().clone()))
    assert updates[0][0] == pytest.approx(updates[1][0], rel=1e-6)
    torch.testing.assert_close(updates[0][1], updates[1][1], rtol=1e-6, atol=1e-8)


def test_bf16_gradients_update_float32_main_parameters() -> None:
    ddp, optimizer = build(torch.bfloat16, in_bf16=True, clip_grad=0.3)
    assert train_step(ddp, optimizer, 0).success
    reference, reference_optimizer = build(torch.bfloat16, clip_grad=0.3)
    train_step(reference, reference_optimizer, 0)
    for name, (_, tensor) in optimizer.sharded_state().items():
        torch.testing.assert_close(tensor, reference_optimizer.sharded_state()[name][1], rtol=0.1, atol=0.011)


def poison(ddp: DistributedDataParallel, name: str, value: float) -> None:
    main_grad = main_grad_of(dict(ddp.module.named_parameters())[name])
    assert main_grad is not None
    main_grad.tensor.view(-1)[1] = value


def snapshot(optimizer: MegatronOptimizer, ddp: DistributedDataParallel) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in optimizer.sharded_state().values()] + [
        parameter.detach().clone() for parameter in ddp.parameters()
    ]


def poisoned_step(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, value: float) -> StepOutcome:
    ddp.zero_grad_buffer()
    (ddp(*batch(1)) * optimizer.loss_scale).backward()
    ddp.finish_grad_sync()
    poison(ddp, "fc2", value)
    return optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bad_gradient_stops_the_run_and_is_named(dtype: torch.dtype, value: float) -> None:
    ddp, optimizer = build(dtype)
    train_step(ddp, optimizer, 0)
    before = snapshot(optimizer, ddp)
    with pytest.raises(TrainingError, match=r"rank 0: fc2\.weight;"):
        poisoned_step(ddp, optimizer, value)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, ddp), strict=True))


def test_a_bad_gradient_is_skipped_where_the_check_is_off() -> None:
    ddp, optimizer = build(torch.float32, check=False)
    train_step(ddp, optimizer, 0)
    before = snapshot(optimizer, ddp)
    assert poisoned_step(ddp, optimizer, float("nan")) == StepOutcome(False, None, None)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, ddp), strict=True))
    assert train_step(ddp, optimizer, 2).success


def test_a_float16_overflow_skips_the_step_and_halves_the_scale() -> None:
    ddp, optimizer = build(torch.float16, initial_loss_scale=256.0, hysteresis=1)
    train_step(ddp, optimizer, 0)
    before = snapshot(optimizer, ddp)
    assert poisoned_step(ddp, optimizer, float("inf")) == StepOutcome(False, None, None)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, ddp), strict=True))
    assert optimizer.loss_scale == 128.0
    assert optimizer.num_steps == 1
    assert train_step(ddp, optimizer, 2).success


def test_a_bad_weight_is_named_and_no_gradient() -> None:
    ddp, optimizer = build(torch.bfloat16)
    with torch.no_grad():
        ddp.module.fc2[1, 2] = float("nan")
    optimizer.reload_main_params()
    with pytest.raises(BadWeightsError) as caught:
        train_step(ddp, optimizer, 0)
    size = ddp.module.fc2.numel()
    assert str(caught.value) == (
        f"weights are NaN or Inf: fc2.weight on rank 0: 1 of {size} elements, the first at [1, 2] is nan; resume from "
        "an earlier checkpoint with --ckpt-step"
    )


@pytest.mark.parametrize("check", [True, False])
def test_float16_does_not_skip_for_ever_over_a_bad_weight(check: bool) -> None:
    ddp, optimizer = build(torch.float16, check=check)
    with torch.no_grad():
        ddp.module.embedding[0, 3] = float("inf")
    optimizer.reload_main_params()
    with pytest.raises(
        BadWeightsError, match=r"embedding\.weight on rank 0: 1 of \d+ elements, the first at \[0, 3\] is inf"
    ):
        train_step(ddp, optimizer, 0)


def test_float16_that_overflows_at_the_smallest_scale_ends() -> None:
    ddp, optimizer = build(torch.float16, initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1)
    assert not poisoned_step(ddp, optimizer, float("inf")).success
    with pytest.raises(TrainingError, match=r"smallest loss scale \(--min-loss-scale 2\); .*fc2\.weight.*--bf16"):
        poisoned_step(ddp, optimizer, float("inf"))


def test_the_skips_in_a_row_are_limited() -> None:
    ddp, optimizer = build(torch.float32, check=False, max_consecutive_skipped_iterations=3)
    for _ in range(2):
        poisoned_step(ddp, optimizer, float("nan"))
    assert train_step(ddp, optimizer, 0).success
    for _ in range(2):
        poisoned_step(ddp, optimizer, float("nan"))
    with pytest.raises(TrainingError, match="3 iterations in a row had gradients that are not finite"):
        poisoned_step(ddp, optimizer, float("nan"))


def test_a_finite_gradient_whose_norm_overflows_is_called_too_large() -> None:
    ddp, optimizer = build(torch.float32)
    with pytest.raises(
        TrainingError, match=r"too large: all its elements are finite.* 1e\+30 in fc2\.weight"
    ) as caught:
        poisoned_step(ddp, optimizer, 1e30)
    assert "not finite" not in str(caught.value)


def test_an_update_that_is_not_accepted_changes_nothing() -> None:
    ddp, optimizer = build(torch.float32)
    train_step(ddp, optimizer, 0)
    before = snapshot(optimizer, ddp)
    ddp.zero_grad_buffer()
    ddp(*batch(1)).backward()
    ddp.finish_grad_sync()
    totals = optimizer.begin_step(accept=lambda norm: norm < 0)
    outcome = optimizer.finish_step(totals.tolist(), is_accepted=False)
    assert not outcome.success
    assert outcome.grad_norm == optimizer.measure()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, ddp), strict=True))
    assert optimizer.num_steps == 1


def test_a_step_that_is_computed_again_moves_the_loss_scale_once() -> None:
    options = {"initial_loss_scale": 4.0, "min_loss_scale": 2.0, "hysteresis": 1, "loss_scale_window": 2}
    ddp, optimizer = build(torch.float16, max_consecutive_skipped_iterations=1, **options)
    train_step(ddp, optimizer, 0)
    (ddp(*batch(1)) * optimizer.loss_scale).backward()
    ddp.finish_grad_sync()
    begun = optimizer.begin_step(accept=lambda norm: norm < 0).tolist()
    outcome = optimizer.finish_step(begun, is_accepted=False)
    assert optimizer.loss_scale == 4.0
    assert outcome.grad_norm == optimizer.measure()
    assert train_step(ddp, optimizer, 1).success
    assert optimizer.loss_scale == 8.0
    with pytest.raises(TrainingError, match="1 iterations in a row had gradients that are not finite"):
        poisoned_step(ddp, optimizer, float("inf"))
    assert optimizer.loss_scale == 8.0


def build_deciding(
    on_device: bool, dtype: torch.dtype, **options: object
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build a pair of which the kernels, or the host, find out whether a gradient is finite."""
    ddp, optimizer = build(dtype, check=False, **options)
    optimizer._on_device[0].inner.decides_on_device = on_device
    return ddp, optimizer


@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_decide_change_the_same_bits(dtype: torch.dtype, name: str, clip: float) -> None:
    options = {"optimizer": name, "clip_grad": clip, "weight_decay": 0.1, "initial_loss_scale": 2.0**10}
    on_device, on_host = (build_deciding(decides, dtype, **options) for decides in (True, False))
    for index, value in enumerate((None, float("nan"), None, float("inf"), None)):
        outcomes = []
        for ddp, optimizer in (on_device, on_host):
            before = snapshot(optimizer, ddp)
            good = value is None
            outcome = train_step(ddp, optimizer, index) if good else poisoned_step(ddp, optimizer, value)
            outcomes.append(outcome)
            assert outcome.success is good
            same = [torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, ddp), strict=True)]
            assert all(same) is not good
        assert outcomes[0] == outcomes[1]
    for mine, other in zip(snapshot(*reversed(on_device)), snapshot(*reversed(on_host)), strict=True):
        assert torch.equal(mine, other)
    assert on_device[1].num_steps == on_host[1].num_steps == 3
    assert on_device[1].scalar_state() == on_host[1].scalar_state()


def test_an_optimizer_of_another_kind_is_not_left_to_decide() -> None:
    """An update rule that is not fused knows nothing of ``found_inf``."""
    _, optimizer = build(torch.float32)
    with FakeTensorMode():
        weight = torch.zeros(3, device="cuda")
        assert InnerOptimizer(OptimizerConfig(), [([weight], 1.0)]).decides_on_device
        assert not InnerOptimizer(OptimizerConfig(), [([weight.double()], 1.0)]).decides_on_device
        assert not InnerOptimizer(OptimizerConfig(), [([weight], 1.0)], Unfused).decides_on_device
    assert not optimizer._on_device[0].inner.decides_on_device


class Unfused(torch.optim.SGD):
    """Stand for apex's Adam."""

    def __init__(self, params: list[dict[str, object]], **options: object) -> None:
        super().__init__(params, lr=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_resumed_training_is_bitwise_equal(dtype: torch.dtype, name: str) -> None:
    options = {"optimizer": name, "initial_loss_scale": 2.0**10, "loss_scale_window": 3}
    first, first_optimizer = build(dtype, **options)
    for index in range(2):
        train_step(first, first_optimizer, index)
    second, second_optimizer = build(dtype, **options)
    second.module.load_state_dict(first.module.state_dict())
    stored = first_optimizer.sharded_state()
    assert stored.keys() == second_optimizer.sharded_state().keys()
    for key, (_, tensor) in second_optimizer.sharded_state().items():
        tensor.copy_(stored[key][1])
    second_optimizer.load_scalar_state(json.loads(json.dumps(first_optimizer.scalar_state())))
    for index in range(2, 5):
        outcome = train_step(first, first_optimizer, index)
        assert train_step(second, second_optimizer, index) == outcome
    assert first_optimizer.loss_scale == second_optimizer.loss_scale
    for mine, other in zip(snapshot(first_optimizer, first), snapshot(second_optimizer, second), strict=True):
        assert torch.equal(mine, other)


def test_state_exists_before_the_first_step_under_global_names() -> None:
    _, optimizer = build(torch.bfloat16)
    state = optimizer.sharded_state()
    names = {parameter.spec.name for parameter in ToyModel().parameters()}
    kinds = ("main_param", "exp_avg", "exp_avg_sq")
    assert set(state) == {f"optimizer.{kind}.{name}" for kind in kinds for name in names}
    for name, (spec, tensor) in state.items():
        assert spec.name == name
        assert tensor.shape == spec.global_shape
        assert tensor.dtype is torch.float32
    assert optimizer.scalar_state() == {"num_steps": 0, "grad_scaler": {}}


def test_two_parts_of_one_global_tensor_have_a_name_each() -> None:
    model = nn.Module()
    for name, start, rows in (("query", 0, 4), ("key_value", 6, 2)):
        parameter = nn.Parameter(torch.zeros(rows, 3))
        shard = Shard(Box((start, 0), (rows, 3)), (0, 0))
        attach_spec(parameter, ParamSpec("qkv.weight", (8, 3), (shard,)))
        model.register_parameter(name, parameter)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), STATE)
    state = MegatronOptimizer(OptimizerConfig(optimizer="sgd"), [ddp], STATE).sharded_state()
    assert list(state) == ["optimizer.momentum_buffer.qkv.weight", "optimizer.momentum_buffer.qkv.weight@6,0"]
    assert {spec.name for spec, _ in state.values()} == {"optimizer.momentum_buffer.qkv.weight"}


def test_main_parameters_follow_weights_that_were_loaded_alone() -> None:
    ddp, optimizer = build(torch.bfloat16)
    with torch.no_grad():
        ddp.module.norm.fill_(3.0)
    optimizer.reload_main_params()
    assert optimizer.sharded_state()["optimizer.main_param.norm.weight"][1].eq(3.0).all()


def test_learning_rate_and_decay_take_effect_at_the_next_step() -> None:
    ddp, optimizer = build(clip_grad=0.0)
    optimizer.set_learning_rate(0.0, 0.5)
    train_step(ddp, optimizer, 0)
    assert_same_parameters(ddp.module, ToyModel(), rtol=0.0, atol=0.0)
    optimizer.set_learning_rate(0.1, 0.5)
    assert optimizer.learning_rate == 0.1
    ddp.zero_grad_buffer()
    ddp.finish_grad_sync()
    before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    optimizer.step()
    # Without a gradient and without moments only the decay moves a weight.
    torch.testing.assert_close(ddp.module.unused.detach(), before["unused"] * (1 - 0.1 * 0.5))


class WithExperts(nn.Module):
    """Hold a matrix of a dense layer and one of an expert."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("dense", (4, 3)), ("expert", (2, 4, 3))):
            parameter = nn.Parameter(torch.randn(shape))
            full_name = f"decoder.layers.0.mlp.{name}.weight"
            attach_spec(parameter, ParamSpec(full_name, shape, full_shards(shape), is_expert=name == "expert"))
            self.register_parameter(name, parameter)


def test_muon_brings_experts_together_over_the_groups_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    class Recorded(MuonShardExchange):
        def __init__(
            self, parameters: Sequence[nn.Parameter], parts: object, model: object, dp: object, **options: object
        ) -> None:
            found.update({spec_of(parameter).name.split(".")[-2]: (model, dp) for parameter in parameters})
            super().__init__(parameters, parts, model, dp, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(optimizer_module, "MuonShardExchange", Recorded)
    state = replace(STATE, expert_model=single_rank_group(("etp", "ep")), expert_dp=single_rank_group(("edp",)))
    ddp = DistributedDataParallel(WithExperts(), DistributedDataParallelConfig(), state)
    MegatronOptimizer(OptimizerConfig(optimizer="muon"), [ddp], state)
    assert found == {"dense": (state.tp, state.dp_cp), "expert": (state.expert_model, state.expert_dp)}
