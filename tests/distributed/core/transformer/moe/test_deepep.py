"""A layer of experts whose tokens DeepEP exchanges computes what it computes with alltoall, gradients too.

A stand-in for the package computes what DeepEP documents, and rejects what it rejects.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.config_base import from_fields
from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import MainGrad, attach_main_grad, main_grad_of
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, create_parallel_state
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.moe import deepep
from megatron.core.transformer.moe.expert_layer import ExpertLayer
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights
from tests.unit.core.ops import deep_ep_stand_in

EXPERTS, HIDDEN = 8, 16
FORWARD, BACKWARD = ["layout", "dispatch", "combine"], ["dispatch (cached)", "combine (weights)"]


@dataclass(frozen=True)
class Layout:
    """Sizes of a world, with fields of the model and the shape of each rank's hidden states."""

    world_size: int = 2
    tp: int = 1
    ep: int = 2
    etp: int = 1
    shape: tuple[int, int] = (7, 3)
    dtype: str = "float64"
    recomputed: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True}
DROPPED = {"moe_expert_capacity_factor": 0.6}
LAYOUTS = {
    "ep 2": Layout(fields=SHARED),
    "ep 4": Layout(4, ep=4, fields={"moe_router_topk": 4, "moe_router_pre_softmax": True}),
    "ep 2, etp 2": Layout(4, etp=2),
    "ep 2, tp 2": Layout(4, tp=2),
    "ep 2, tp 2, etp 2": Layout(4, tp=2, etp=2, fields=SHARED),
    "ep 4, tp 2": Layout(4, tp=2, ep=4, fields={"add_bias_linear": True}),
    "dropped": Layout(fields=DROPPED),
    "dropped and padded": Layout(fields=DROPPED | {"moe_pad_expert_input_to_capacity": True}),
    "one token": Layout(4, ep=4, shape=(1, 1)),
    "latent": Layout(4, tp=2, fields=SHARED | {"moe_latent_size": 12}),
    "recomputed": Layout(recomputed=True),
    "bfloat16, one rank per token": Layout(
        dtype="bfloat16",
        fields={"moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"},
    ),
}


def install() -> deepep.DeepEP:
    """Install the stand-in in this process."""
    sys.modules["deep_ep"] = deep_ep_stand_in
    deepep.load_deepep.cache_clear()
    found = deepep.load_deepep()
    assert found is not None
    return found


def make_layer(layout: Layout) -> ExpertLayer:
    """Return a layer with weights that do not depend on the layout."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "vocab_size": 53,
        "max_position_embeddings": 14,
        "add_bias_linear": False,
        "params_dtype": layout.dtype,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_experts": EXPERTS,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 12,
        "moe_token_dispatcher_type": "flex",
    }
    sizes = ParallelSizes(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    groups = ExpertGroups.of(create_parallel_state(sizes))
    layer = ExpertLayer(from_fields(GPTConfig, **(settings | layout.fields)), groups, "cpu")
    load_global_weights(layer)  # type: ignore[arg-type]
    return layer


def run(layer: ExpertLayer, layout: Layout, *, defers: bool = False) -> list[torch.Tensor]:
    """Return the output of this rank's tokens, and the gradients of the tokens and of the weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(*layout.shape, HIDDEN, generator=generator, dtype=torch.float64).to(layer.router.weight.dtype)
    x.requires_grad_()
    layer.zero_grad()
    if defers:
        for weight in layer.experts.parameters():
            attach_main_grad(weight, MainGrad(torch.zeros_like(weight)))
    y = recompute(layer, x).hidden if layout.recomputed else layer(x).hidden
    slopes = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    (y * slopes).sum().backward()
    found = [y.detach(), x.grad]
    for parameter in layer.parameters():
        main_grad = main_grad_of(parameter)
        found.append(parameter.grad if main_grad is None else main_grad.tensor)
    assert all(each is not None for each in found)
    return [each.clone() for each in found if each is not None]


def compare(name: str) -> None:
    layout, package = LAYOUTS[name], install()
    layer = make_layer(layout)
    expected = run(layer, layout)
    layer.dispatch = deepep.DeepEPDispatcher(EXPERTS, layer.groups, package)
    deep_ep_stand_in.calls.clear()
    found = run(layer, layout)
    again = FORWARD[:2] if layout.recomputed else []
    assert deep_ep_stand_in.calls == ["Buffer", *FORWARD, BACKWARD[0], *again, BACKWARD[1]]
    exact = layout.dtype == "bfloat16"
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
    if not layout.fields.get("add_bias_linear"):
        deferred = run(layer, layout, defers=True)
        for mine, theirs in zip(deferred, found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    # The buffer is made once.
    assert deep_ep_stand_in.calls.count("Buffer") == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_and_gradients_are_those_of_alltoall(name: str) -> None:
    run_distributed(LAYOUTS[name].world_size, compare, name)


def send_to_two_experts_of_a_rank() -> tuple[int, int]:
    """Return the numbers of rows that this rank has received and its experts have processed."""
    layout, package = Layout(fields={"moe_router_topk": EXPERTS}), install()
    layer = make_layer(layout)
    layer.dispatch = deepep.DeepEPDispatcher(EXPERTS, layer.groups, package)
    numbers = []
    inner, send = layer.experts.forward, deep_ep_stand_in.Buffer.dispatch

    def dispatch(*arguments: Any, **more: Any) -> Any:
        results = send(*arguments, **more)
        numbers.append(len(results[0]))
        return results

    def compute(tokens: torch.Tensor, counts: Any, *more: Any, **options: Any) -> torch.Tensor:
        numbers.append(sum(counts))
        return inner(tokens, counts, *more, **options)

    layer.experts.forward = compute  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deep_ep_stand_in.Buffer, "dispatch", dispatch)
        layer(torch.randn(7, 3, HIDDEN, dtype=torch.float64))
    received, computed = numbers
    return received, computed


def test_a_token_is_sent_once_to_all_its_experts_on_a_rank() -> None:
    num_tokens = 2 * 7 * 3
    for received, computed in run_distributed(2, send_to_two_experts_of_a_rank):
        assert (received, computed) == (num_tokens, num_tokens * EXPERTS // 2)


def misuse() -> None:
    """Use the stand-in as DeepEP must not be used."""
    install()
    package, group = deep_ep_stand_in, dist.group.WORLD
    config = package.Buffer.get_dispatch_config(2)
    buffer = package.Buffer(group, config.get_nvl_buffer_size_hint(HIDDEN * 2, 2))
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    indices, weights = torch.tensor([[0, 3], [1, -1], [2, 3], [0, 1]]), torch.ones(4, 2)
    with pytest.raises(AssertionError):
        buffer.get_dispatch_layout(indices.int(), 4)
    per_rank, _, per_expert, is_sent, _ = buffer.get_dispatch_layout(indices, 4)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_sent, "num_tokens_per_expert": per_expert}
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        buffer.dispatch(x, topk_idx=indices, topk_weights=weights, **{**layout, "num_tokens_per_expert": None})
    for broken in ({"topk_weights": weights.bfloat16()}, {"topk_idx": indices.int()}):
        with pytest.raises(AssertionError):
            buffer.dispatch(x, **{"topk_idx": indices, "topk_weights": weights, **broken}, **layout)
    for rows in (x.float(), x[:, ::2], torch.ones(4, 8, dtype=torch.bfloat16)):
        with pytest.raises((AssertionError, KeyError)):
            buffer.dispatch(rows, topk_idx=indices, topk_weights=weights, **layout)
    arguments = {"topk_idx": indices, "topk_weights": weights, **layout}
    received, *_, handle, event = buffer.dispatch(x, **arguments, async_finish=True)
    assert received.isnan().all()
    with pytest.raises(AssertionError, match="not been waited for"):
        buffer.combine(received, handle)
    event.current_stream_wait()
    assert torch.equal(received, torch.ones_like(received))
    with pytest.raises(AssertionError):
        buffer.combine(received[1:], handle)
    total, _, _ = buffer.combine(received, handle)
    assert torch.equal(total, x * is_sent.sum(dim=1, keepdim=True))


def test_the_stand_in_rejects_misuse() -> None:
    run_distributed(2, misuse)


def build(fields: dict[str, Any], layout: Layout, device: str) -> list[str]:
    """Return the problems of a model on a device, or the name of its dispatcher."""
    install()
    groups = make_layer(layout).groups
    settings = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": 53}
    more = {"max_position_embeddings": 14, "num_experts": EXPERTS, "params_dtype": "bfloat16"}
    config = from_fields(GPTConfig, **(settings | more | {"moe_token_dispatcher_type": "flex"} | fields))
    try:
        found = deepep.deepep_dispatcher(config, groups, device)
    except ConfigurationError as error:
        return list(error.problems)
    return [type(found).__name__, str(deep_ep_stand_in.Buffer.num_sms)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"moe_deepep_num_sms": 24}, ["DeepEPDispatcher", "24"]),
        ({"params_dtype": "float32"}, "DeepEP sends bfloat16, and the model is in float32; add --bf16, or use"),
        ({"moe_router_dtype": "fp64"}, "--moe-router-dtype fp64: DeepEP sends weights in float32"),
        ({"hidden_size": 24}, "--hidden-size 24: DeepEP needs a multiple of 16 up to 8176"),
        ({"hidden_size": 8192}, "--hidden-size 8192: DeepEP needs a multiple of 16 up to 8176"),
        ({"moe_latent_size": 24}, "--moe-latent-size 24: DeepEP needs a multiple of 16 up to 8176"),
        ({"hidden_size": 8192, "moe_latent_size": 2048}, ["DeepEPDispatcher", "20"]),
        ({"num_experts": 64, "moe_router_topk": 40}, "their product is 40, and DeepEP supports 32"),
    ],
)
def test_settings_that_deepep_does_not_support_are_rejected(fields: dict[str, Any], expected: Any) -> None:
    (found, *_) = run_distributed(2, build, fields, Layout(), "cuda")
    assert found == expected if isinstance(expected, list) else (len(found) == 1 and expected in found[0])


def test_other_numbers_of_ranks_are_rejected() -> None:
    (found, *_) = run_distributed(3, build, {}, Layout(3, ep=1, etp=3, tp=3, fields={"hidden_size": 24}), "cuda")
    assert len(found) == 1
    assert "does not support 3 ranks; use 2, 4 or 8" in found[0]


def test_without_cuda_it_is_not_used() -> None:
    assert run_distributed(2, build, {"params_dtype": "float32"}, Layout(), "cpu")[0][0] == "NoneType"
