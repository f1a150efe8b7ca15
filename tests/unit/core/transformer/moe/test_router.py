"""What megatron-core's routers and reports do apart from the numbers that tests/golden compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module, import_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, EXPERTS = 12, 4


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(group: Any, default: str = "tp", check: bool = True) -> Any:
        return resolve_group(None if isinstance(group, Alone) else group, default)

    monkeypatch.setattr(moe_utils, "resolve_group", resolve)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()


def make_router(**settings: Any) -> TopKRouter:
    config = TransformerConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        use_cpu_initialization=True,
        add_bias_linear=False,
        **settings,
    )
    groups = ProcessGroupCollection(**dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), Alone()))
    return TopKRouter(config, groups)


def test_settings_of_the_configuration_may_change_after_construction() -> None:
    router = make_router(moe_router_load_balancing_type="aux_loss", params_dtype=torch.bfloat16, bf16=True)
    router.set_layer_number(1)
    x = torch.randn(6, 2, HIDDEN, dtype=torch.bfloat16)
    probs, routing_map = router(x)
    assert (probs.shape, routing_map.shape) == ((12, EXPERTS), (12, EXPERTS))
    assert (probs.dtype, routing_map.dtype) == (torch.bfloat16, torch.bool)
    assert (routing_map.sum(dim=1) == 2).all()
    probs.sum().mul(0.0).backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() == 0.0
    router.config.moe_aux_loss_coeff = 1.0
    router(x)[0].sum().mul(0.0).backward()
    assert router.weight.grad.abs().sum() > 0.0
    router.config.moe_router_dtype = "fp64"
    assert router(x)[0].dtype is torch.float64


def test_padding_is_neither_counted_nor_part_of_a_loss() -> None:
    router = make_router(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[0.5, 0.5],
        moe_z_loss_coeff=0.1,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    router.set_layer_number(2)
    x = torch.randn(6, 2, HIDDEN)
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    router(x[:4])
    expected = {name: tracked["values"].clone() for name, tracked in tracker.items()}
    counts = router.local_tokens_per_expert.clone()  # type: ignore[union-attr]
    moe_utils.clear_aux_losses_tracker()
    router.local_tokens_per_expert.zero_()  # type: ignore[union-attr]
    router(x, torch.arange(6)[:, None].expand(6, 2) >= 4)
    assert counts.sum() == 16
    assert torch.equal(router.local_tokens_per_expert, counts)  # type: ignore[arg-type]
    assert expected.keys() == {"load_balancing_loss", "z_loss", "seq_load_balancing_loss"}
    for name in ("load_balancing_loss", "z_loss", "seq_load_balancing_loss"):
        torch.testing.assert_close(tracker[name]["values"], expected[name])
        assert tracker[name]["values"].nonzero().tolist() == [[1]]


def test_jitter_and_forced_balance_draw_numbers() -> None:
    router = make_router(moe_input_jitter_eps=0.01)
    x = torch.ones(500, 1, HIDDEN)
    jittered = router.apply_input_jitter(x)
    assert 0.0 < (jittered - x).abs().max() <= 0.0101
    router.config.moe_input_jitter_eps = None
    assert router.apply_input_jitter(x) is x
    assert (router(x)[1].sum(dim=0) == 500).sum() == 2, "equal tokens have equal experts"
    router.config.moe_router_force_load_balancing = True
    assert (router(x)[1].sum(dim=0) > 150).all()


def test_the_expert_bias_stays_float32_and_moves_to_balance() -> None:
    router = make_router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True).bfloat16()
    router(torch.randn(6, 2, HIDDEN, dtype=torch.bfloat16))
    assert router.expert_bias is not None
    assert router.expert_bias.dtype is torch.float32
    counts = torch.tensor([[8.0, 0.0, 4.0, 4.0]])
    moved = moe_utils.get_updated_expert_bias(counts, torch.zeros(1, EXPERTS), 0.5)
    assert moved.tolist() == [[-0.5, 0.5, 0.0, 0.0]]
    with torch.no_grad():
        before = router.local_tokens_per_expert.clone()  # type: ignore[union-attr]
        router(torch.randn(6, 2, HIDDEN, dtype=torch.bfloat16))
        assert torch.equal(router.local_tokens_per_expert, before)  # type: ignore[arg-type]


def test_the_global_loss_counts_micro_batches_until_it_is_reset() -> None:
    router = make_router(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1)
    for number in (1, 2):
        router(torch.randn(6, 2, HIDDEN))
        assert router.global_tokens_per_expert.sum() == 24 * number  # type: ignore[union-attr]
    router.reset_global_aux_loss_tracker()
    assert router.global_tokens_per_expert.sum() == router.ga_steps == 0  # type: ignore[union-attr]


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[f"{name} {iteration}"] = round(float(value), 6)

    def log(self, scalars: dict[str, Any], iteration: int) -> None:
        for name, value in scalars.items():
            self.add_scalar(name, value, iteration)


@pytest.mark.parametrize("to", ["writer", "wandb_writer"])
@pytest.mark.parametrize(("freq", "expected"), [(None, 1.0), (2, 1.5), ([1, 0, 0], 3.0)])
def test_reports_are_means_over_layers_with_experts(freq: Any, expected: float, to: str) -> None:
    for layer, value in ((1, 2.0), (3, 4.0)):
        moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(value), layer, 3)
    moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(9.0), None, 3)
    writer, total = Writer(), {"load_balancing_loss": torch.tensor(10.0)}
    moe_utils.track_moe_metrics(
        0.5,
        7,
        **{to: writer},
        total_loss_dict=total,
        per_layer_logging=True,
        force_initialize=True,
        track_names=["load_balancing_loss", "z_loss"],
        num_layers=3,
        moe_layer_freq=freq,
    )
    assert writer.scalars["load_balancing_loss 7"] == expected
    assert writer.scalars["moe/load_balancing_loss_layer_2 7"] == 2.0
    assert writer.scalars["z_loss 7"] == 0.0
    assert total["load_balancing_loss"].item() == 10.0 + expected
    assert not moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].any()


def test_modules_are_built_of_specifications() -> None:
    spec = ModuleSpec(module=nn.Linear, params={"bias": False})
    assert build_module(spec, 3, 4).bias is None
    with pytest.raises(TypeError, match="multiple values for keyword argument 'bias' when instantiating Linear"):
        spec(3, 4, bias=True)
    assert get_module(ModuleSpec(module=("torch.nn", "Linear"))) is nn.Linear
    assert build_module(nn.Linear, 3, 4).out_features == 4
    with pytest.raises(TypeError, match="when instantiating Linear"):
        build_module(spec, 3)
    with pytest.raises(ImportError, match="has no Linera"):
        import_module(("torch.nn", "Linera"))


def test_a_layer_of_a_specification_is_rejected_and_its_mlp_is_built() -> None:
    with pytest.raises(RuntimeError, match=r"build its part submodules\.mlp"):
        build_module(get_gpt_layer_local_spec(), config=None)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, gated_linear_unit=True
    )
    mlp = build_module(get_gpt_layer_local_spec().submodules.mlp, config)
    x = torch.randn(3, 2, HIDDEN)
    output, bias = mlp(x)
    gate, linear = (x @ mlp.linear_fc1.weight.t()).chunk(2, dim=-1)
    inner = nn.functional.gelu(gate) * linear
    torch.testing.assert_close(output, inner @ mlp.linear_fc2.weight.t())
    assert bias.shape == (HIDDEN,)
    with pytest.raises(RuntimeError, match="use_te=False"):
        get_mlp_module_spec()


@pytest.mark.parametrize("overlaps", [False, True])
def test_shared_experts_have_a_stream_if_communication_overlaps(overlaps: bool) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_overlap=overlaps,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    shared = get_mlp_module_spec(use_te=False, num_experts=EXPERTS).submodules.shared_experts
    assert (build_module(shared, config=config).stream is not None) == overlaps


@pytest.mark.parametrize(
    "field",
    [
        {"moe_enable_routing_replay": True},
        {"moe_router_topk_limited_devices": 2},
        {"moe_latent_size": 4},
        {"fp8": "hybrid"},
        {"activation_func_fp8_input_store": True},
        {"use_kitchen": True},
        {"activation_func_clamp_value": 7.0},
    ],
)
def test_options_that_would_have_no_effect_are_rejected(field: dict[str, Any]) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        use_cpu_initialization=True,
        add_bias_linear=False,
        **field,
    )
    ((name, value),) = field.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r} is unsupported"):
        build_module(get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp, config)


def run_recomputed(modules: list[str], x: torch.Tensor) -> tuple[int, list[torch.Tensor | None]]:
    """Return the bytes that a layer saves for its backward pass, and the gradients of its parameters."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=96,
        num_moe_experts=EXPERTS,
        moe_grouped_gemm=True,
        moe_shared_expert_intermediate_size=96,
        use_cpu_initialization=True,
        add_bias_linear=False,
        recompute_granularity="selective",
        recompute_modules=modules,
    )
    torch.manual_seed(1)
    layer = build_module(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=True).submodules.mlp, config)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        output, _ = layer(x)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in saved}
    output.square().sum().backward()
    return sum(storages.values()), [parameter.grad for parameter in layer.parameters()]


def test_recomputed_modules_change_no_gradient_and_save_fewer_activations() -> None:
    x = torch.randn(16, 2, HIDDEN, requires_grad=True)
    num_saved, gradients = run_recomputed([], x)
    for module in ("moe_act", "shared_experts"):
        fewer, again = run_recomputed([module], x)
        assert all(map(torch.equal, again, gradients))
        assert fewer < num_saved


def test_grouped_experts_take_float_counts_and_have_gradients_without_tokens() -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=2,
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    experts = GroupedMLP(2, config)
    x, weights = torch.randn(5, HIDDEN), torch.rand(5)
    by_float, by_int = (experts(x, torch.tensor([3, 2]).to(dtype), weights)[0] for dtype in (torch.float, torch.int))
    assert torch.equal(by_float, by_int)
    experts(torch.empty(0, HIDDEN), torch.zeros(2), torch.empty(0))[0].sum().backward()
    assert experts.weight1.grad is not None
    assert not experts.weight1.grad.any()


@pytest.mark.parametrize("kind", DISPATCHERS)
def test_experts_of_a_rank_must_be_consecutive(kind: str) -> None:
    with pytest.raises(AssertionError, match=r"\[0, 2\] must be consecutive"):
        DISPATCHERS[kind](2, [0, 2], make_router().config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sqrtsoftplus_weighs_and_counts_roots_of_softplus(dtype: torch.dtype) -> None:
    """Scores are computed in float32 at least; the expert bias moves the choice alone."""
    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    bias = torch.tensor([0.4, -0.3, 0.0, 0.9], dtype=torch.float64)
    scores = logits.double().exp().log1p().sqrt()
    chosen = torch.zeros_like(scores).scatter(1, (scores + bias).topk(2, dim=1).indices, 1.0)
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        logits, 2, scaling_factor=1.5, score_function="sqrtsoftplus", expert_bias=bias
    )
    assert probs.dtype == dtype
    assert torch.equal(routing_map, chosen.bool())
    expected = 1.5 * scores * chosen / (scores * chosen).sum(dim=1, keepdim=True)
    rtol = 1e-13 if dtype == torch.float64 else 2**-8
    torch.testing.assert_close(probs.double(), expected, rtol=rtol, atol=0)
    counted, shares = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sqrtsoftplus")
    assert torch.equal(counted, torch.zeros_like(counted).scatter(1, scores.topk(2, dim=1).indices, True))
    torch.testing.assert_close(shares.double(), scores / scores.sum(dim=1, keepdim=True), rtol=4 * rtol, atol=0)


def test_expert_bias_needs_scores_of_one_logit_each() -> None:
    settings = {"moe_router_enable_expert_bias": True}
    assert make_router(moe_router_score_function="sqrtsoftplus", **settings).expert_bias is not None
    with pytest.raises(ValueError, match="only supports the score functions sigmoid and sqrtsoftplus"):
        make_router(moe_router_score_function="softmax", **settings)


def test_unknown_values_are_named() -> None:
    logits = torch.randn(3, EXPERTS)
    with pytest.raises(ValueError, match="Invalid score_function: tanh"):
        moe_utils.topk_routing_with_score_function(logits, 2, score_function="tanh")
    with pytest.raises(ValueError, match="Invalid drop_policy: last"):
        moe_utils.apply_router_token_dropping(logits, logits > 0, 2, 1.0, drop_policy="last")
    kept, kept_map = moe_utils.apply_router_token_dropping(
        torch.ones(6, 2), torch.tensor([[0, 1]] + [[1, 1]] * 5).bool(), 1, 1.0, drop_policy="position"
    )
    assert kept_map.t().tolist() == [[False, True, True, True, False, False], [True, True, True, False, False, False]]
    assert torch.equal(kept, kept_map.float())


def test_sinkhorn_of_large_costs_is_finite() -> None:
    costs = 400 * torch.randn(256, 16, generator=torch.Generator().manual_seed(3))
    assert moe_utils.sinkhorn(costs).isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_sinkhorn_ends_with_balanced_experts_for_widely_spread_costs(scale: float) -> None:
    costs = scale * torch.randn(256, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = moe_utils.sinkhorn(costs)
    torch.testing.assert_close(weights.sum(dim=0), torch.full((16,), 1 / 16, dtype=torch.float64), rtol=1e-3, atol=0.0)
