"""Inner optimizers: which parameters are decayed, and update rules from elsewhere with their state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core import registry
from megatron.core.errors import ConfigurationError
from megatron.core.optimizer import inner_optimizer
from megatron.core.optimizer.inner_optimizer import InnerOptimizer, examine_rule, is_decayed
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import (
    GroupOverride,
    OptimizerConfig,
    parse_optimizer_args,
    parse_override,
    state_bytes,
)
from megatron.core.optimizer.param_rates import ParamRates, Rate
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from megatron.training import register_optimizer
from tests.unit.core.optimizer.test_optimizer import assert_same_parameters, build, oracle, train_step


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("embedding.word_embeddings.weight", (5, 3), True),
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 3), True),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4,), False),
        ("decoder.final_layernorm.weight", (3,), False),
        ("experts.linear_fc1.bias", (2, 4), False),
    ],
)
def test_biases_and_one_dimensional_parameters_are_not_decayed(
    name: str, shape: tuple[int, ...], decayed: bool
) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed


def parameter(name: str, shape: tuple[int, ...]) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(shape))
    attach_spec(result, ParamSpec(name, shape, full_shards(shape)))
    return result


def test_decayed_parameters_come_first_in_the_given_order() -> None:
    a, b, c = parameter("a.weight", (2, 3)), parameter("a.bias", (2,)), parameter("b.weight", (3, 4))
    rates = ParamRates(OptimizerConfig())
    (most, decayed), (least, others) = rates.by_decay([a, b, c])
    assert (most, least) == (1.0, 0.0)
    assert decayed[0] is a
    assert decayed[1] is c
    assert others[0] is b
    assert len(rates.by_decay([a, c])) == 1


def test_the_first_override_that_matches_and_has_the_multiplier_counts() -> None:
    texts = ("*.mlp.*:wd_mult=0", "decoder.*:lr_mult=0.5,wd_mult=2", "*.mlp.*:lr_mult=3")
    rates = ParamRates(OptimizerConfig(decoupled_lr=1.0, param_group_overrides=texts))
    fc1, norm = parameter("decoder.layers.0.mlp.linear_fc1.weight", (2, 2)), parameter("decoder.norm.weight", (2,))
    words = parameter("embedding.word_embeddings.weight", (2, 2))
    assert [rates.weight_decay(p) for p in (fc1, norm, words)] == [0.0, 2.0, 1.0]
    assert [rates.learning_rate(p) for p in (fc1, norm, words)] == [Rate(False, 0.5), Rate(False, 0.5), Rate(True, 1.0)]
    assert [rate for rate, _ in rates.by_rate([words, norm, fc1])] == [Rate(False, 0.5), Rate(True, 1.0)]


def test_every_pattern_matches_a_parameter_of_some_rank() -> None:
    alone, given = single_rank_group(), [parameter("decoder.norm.weight", (2,)), parameter("decoder.norm.bias", (2,))]
    ParamRates(OptimizerConfig(param_group_overrides=("*.norm.*:lr_mult=2",))).check_patterns(given, alone)
    rates = ParamRates(OptimizerConfig(param_group_overrides=("*.bias:lr_mult=2", "*.fc1.*:lr_mult=2")))
    with pytest.raises(
        ConfigurationError, match=r"--param-group-overrides \*\.fc1\.\*: no trained parameter"
    ) as caught:
        rates.check_patterns(given, alone)
    assert "decoder.norm.bias, decoder.norm.weight and 0 more" in str(caught.value)
    assert "*.bias" not in str(caught.value)


def test_the_state_of_a_built_in_rule_exists_from_the_start() -> None:
    inner = InnerOptimizer(OptimizerConfig(lr=0.1), [([nn.Parameter(torch.ones(3))], 1.0)])
    inner.make_state()
    assert inner.num_updates == 0
    inner.set_num_steps(4)
    inner.drop_made_state()
    assert inner.num_updates == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr_mult=2", "not a pattern"),
        (":lr_mult=2", "not a pattern"),
        ("a:lr=2", "'lr=2' is neither"),
        ("a:lr_mult=x", "'x' of lr_mult is not a number"),
        ("a:wd_mult=-1", "wd_mult=-1 must be 0 or more"),
        ("a:lr_mult=nan", "must be 0 or more"),
        ("a:lr_mult=1,lr_mult=2", "lr_mult is repeated"),
    ],
)
def test_an_override_that_says_something_else_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_override(text)
    assert parse_override("a:b:lr_mult=1e-1") == GroupOverride("a:b", 0.1)


@pytest.mark.parametrize(
    ("config", "hidden", "word"),
    [
        ({}, 0.25, 0.25),
        ({"optimizer": "muon", "muon_scale_mode": "spectral"}, 0.5, 0.25),
        ({"optimizer": "muon", "muon_scale_mode": "unit_rms_norm"}, 1.0, 0.25),
    ],
)
def test_the_learning_rate_of_a_wider_model(config: dict[str, str], hidden: float, word: float) -> None:
    rates = ParamRates(OptimizerConfig(**config))  # type: ignore[arg-type]
    for name, multiplier in (
        ("decoder.layers.0.mlp.linear_fc1.weight", hidden),
        ("embedding.word_embeddings.weight", word),
    ):
        given = nn.Parameter(torch.zeros(4, 4))
        attach_spec(given, ParamSpec(name, (4, 4), full_shards((4, 4)), width_multiplier=4.0))
        assert rates.learning_rate(given).multiplier == multiplier
        assert rates.learning_rate(parameter(name, (4, 4))).multiplier == 1.0


ELEMENTWISE = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adagrad)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., torch.optim.Optimizer]], str]:
    """Return a function that makes an update rule the one named ``added``."""

    def use(make: Callable[..., torch.optim.Optimizer]) -> str:
        monkeypatch.setattr(inner_optimizer, "_make_torch_optimizer", lambda config, groups, fused: make(groups))
        monkeypatch.setattr(inner_optimizer, "_state_names", lambda config: ())
        return "added"

    return use


class DedupMask(torch.optim.SGD):
    """Keep a Python number for each parameter, which the update follows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["factor"] = 0.5 * state.get("factor", 1.0)
                parameter.sub_(parameter.grad, alpha=group["lr"] * state["factor"])


class FromTheStart(torch.optim.SGD):
    """Create the state in the constructor only."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["past"] = torch.full_like(parameter, 0.25)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                past = self.state[parameter]["past"]
                past.mul_(0.5).add_(parameter.grad)
                parameter.sub_(past, alpha=group["lr"])


class ScalingEachTensor(torch.optim.SGD):
    """Scale the gradient of each tensor to a norm between ``smallest`` and ``largest``."""

    def __init__(self, groups: Any, smallest: float, largest: float) -> None:
        super().__init__(groups, lr=0.0)
        self.bounds = smallest, largest

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = float(parameter.grad.norm())
                parameter.sub_(parameter.grad * (sorted((norm, *self.bounds))[1] / norm), alpha=group["lr"])


def stored(optimizer: MegatronOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {name: tensor.clone() for name, (_, tensor) in optimizer.sharded_state().items()}
    return tensors, optimizer.scalar_state()


def load(optimizer: MegatronOptimizer, state: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    wanted = optimizer.sharded_state()
    assert wanted.keys() == state[0].keys()
    for name, (_, tensor) in wanted.items():
        tensor.copy_(state[0][name])
    optimizer.load_scalar_state(state[1])


@pytest.mark.parametrize("make", [*ELEMENTWISE, torch.optim.Adafactor, DedupMask, FromTheStart])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_rule_resumes_to_the_bit(make: type[torch.optim.Optimizer], steps_before: int, use: Any) -> None:
    options: dict[str, Any] = {"optimizer": use(make), "clip_grad": 0.7, "weight_decay": 0.1}
    ddp, uninterrupted = build(**options)
    for index in range(5):
        train_step(ddp, uninterrupted, index)
    saved_ddp, saved = build(**options)
    for index in range(steps_before):
        train_step(saved_ddp, saved, index)
    state = stored(saved)
    again_ddp, again = build(**options)
    again_ddp.module.load_state_dict(saved_ddp.module.state_dict())
    load(again, state)
    for index in range(steps_before, 5):
        train_step(saved_ddp, saved, index)
        train_step(again_ddp, again, index)
    assert_same_parameters(saved_ddp.module, ddp.module, 0.0, 0.0)
    assert_same_parameters(again_ddp.module, ddp.module, 0.0, 0.0)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor])
def test_a_rule_that_ignores_grad_scale_is_given_clipped_gradients(make: Any, use: Any) -> None:
    ddp, optimizer = build(optimizer=use(make), clip_grad=0.7, weight_decay=0.1)
    for index in range(3):
        train_step(ddp, optimizer, index)
    assert_same_parameters(ddp.module, oracle(3, 0.7, make, 0.1))
    ddp, optimizer = build(torch.float32, optimizer="added", clip_grad=0.7, weight_decay=0.1)
    for index in range(3):
        train_step(ddp, optimizer, index)
    assert_same_parameters(ddp.module.double(), oracle(3, 0.7, make, 0.1), 1e-4, 1e-5)


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_an_elementwise_rule_is_known_by_its_steps(make: Any, use: Any) -> None:
    rule = examine_rule(OptimizerConfig(optimizer=use(make)))
    assert (rule.name, rule.is_elementwise, rule.unsaved) == (make.__name__, True, ())


def test_a_factored_rule_is_not_elementwise(use: Any) -> None:
    rule = examine_rule(OptimizerConfig(optimizer=use(torch.optim.Adafactor)))
    assert (rule.is_elementwise, rule.unsaved) == (False, ())


@pytest.mark.parametrize("bounds", [(0.0, 10.0), (1e-3, math.inf)])
def test_a_rule_with_a_threshold_on_a_whole_tensor_is_not_elementwise(bounds: tuple[float, float], use: Any) -> None:
    make = functools.partial(ScalingEachTensor, smallest=bounds[0], largest=bounds[1])
    assert not examine_rule(OptimizerConfig(optimizer=use(make))).is_elementwise


def test_a_rule_whose_threshold_is_never_reached_is_elementwise(use: Any) -> None:
    make = functools.partial(ScalingEachTensor, smallest=0.0, largest=math.inf)
    assert examine_rule(OptimizerConfig(optimizer=use(make))).is_elementwise


class InGroups(torch.optim.SGD):
    """Keep a number in the parameter groups, a list in the state and a number of its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 1.0) * 0.5
            for parameter in group["params"]:
                self.state[parameter].setdefault("past", []).append(0)
                if self.calls > 1:
                    self.state[parameter]["late"] = torch.zeros_like(parameter)


def test_state_that_no_checkpoint_holds_is_named(use: Any) -> None:
    rule = examine_rule(OptimizerConfig(optimizer=use(InGroups)))
    assert rule.unsaved == (
        "estimate of param_groups[0]",
        "calls of the optimizer",
        "past (list)",
        "late (which does not exist after the first update)",
    )


def test_a_rule_that_needs_a_closure_is_rejected_in_one_line(use: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"LBFGS fails in a trial step.*closure") as caught:
        examine_rule(OptimizerConfig(optimizer=use(torch.optim.LBFGS)))
    assert "\n" not in str(caught.value)


def test_state_that_was_made_to_be_loaded_goes_with_a_return_to_the_beginning(use: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = InnerOptimizer(OptimizerConfig(optimizer=use(torch.optim.Adagrad)), [([parameter], 1.0)])
    first = inner.state_of(parameter, "sum").clone()
    inner.set_learning_rate(0.5, 0.25)
    inner.make_state()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert parameter.grad is None
    (group,) = inner.rule.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    for num_steps, expected in ((4, 5.0), (0, 0.0)):
        inner.state_of(parameter, "sum").fill_(5.0)
        inner.set_num_steps(num_steps)
        assert torch.equal(inner.state_of(parameter, "sum"), first + expected)
    inner.make_state()
    inner.state_of(parameter, "sum").fill_(5.0)
    inner.make_state()
    assert torch.equal(inner.state_of(parameter, "sum"), first + 5.0)


class SteppingAlways(torch.optim.SGD):
    """Move every parameter, whatever the learning rate is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["past"] = parameter.grad.clone()
                parameter.add_(1.0)


def test_creating_state_leaves_parameters_and_gradients(use: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    inner = InnerOptimizer(OptimizerConfig(optimizer=use(SteppingAlways)), [([parameter], 1.0)])
    inner.make_state()
    assert inner.names_of_state(parameter) == ["past"]
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))


def test_a_rule_that_is_not_elementwise_needs_whole_parameters(use: Any) -> None:
    name = use(torch.optim.Adafactor)
    with pytest.raises(ConfigurationError, match="Adafactor is not elementwise, but --use-precision-aware-optimizer"):
        build(torch.bfloat16, optimizer=name, use_precision_aware_optimizer=True)
    with pytest.raises(ConfigurationError, match="a rank has only a shard of"):
        build(torch.float32, optimizer=name, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)


class Halving(torch.optim.Optimizer):
    """Halve the weights, and count in a tensor of half their number."""

    def __init__(self, params: Any, lr: float, power: int = 1, betas: tuple[float, ...] = ()) -> None:
        super().__init__(params, {"lr": lr, "power": power, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5 ** group["power"])
                self.state[parameter]["seen"] = torch.zeros(parameter.numel() // 2)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_optimizer("halving", Halving)
    register_optimizer("declared", Halving, state_bytes=6)
    register_optimizer("nothing", lambda params, lr: None)  # type: ignore[arg-type, return-value]


def test_a_registered_optimizer_gets_its_arguments(registered: None) -> None:
    config = OptimizerConfig(optimizer="halving", optimizer_args=("power=3", "betas=(0.5,0.9)"))
    weights = torch.ones(4)
    inner = InnerOptimizer(config, [([weights], 1.0)])
    weights.grad = torch.ones(4)
    inner.step([weights], 1.0)
    assert weights.tolist() == [0.125] * 4
    assert inner.rule.defaults["betas"] == (0.5, 0.9)
    assert inner.names_of_state(weights) == ["seen"]


def test_the_state_of_a_registered_optimizer_is_measured_or_declared(registered: None) -> None:
    assert state_bytes(OptimizerConfig(optimizer="halving")) == 2
    assert state_bytes(OptimizerConfig(optimizer="halving", params_dtype="bfloat16")) == 4 + 2
    assert state_bytes(OptimizerConfig(optimizer="declared")) == 6
    with pytest.raises(ConfigurationError, match="--optimizer nothing: the trial step that measures its state fails"):
        state_bytes(OptimizerConfig(optimizer="nothing"))
    with pytest.raises(ConfigurationError, match="the registered function returned NoneType, not a"):
        examine_rule(OptimizerConfig(optimizer="nothing"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eps",), "eps is not NAME=VALUE"),
        (("lr=1",), r"lr is set by the run \(--lr, --weight-decay\)"),
        (("a=1", "a=2"), "a is repeated"),
    ],
)
def test_arguments_of_an_optimizer_that_cannot_be_read_are_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_optimizer_args(words)
    assert parse_optimizer_args(("a=1e-3", "b=None", "c=text", "d=(1,2)")) == {
        "a": 1e-3,
        "b": None,
        "c": "text",
        "d": (1, 2),
    }
