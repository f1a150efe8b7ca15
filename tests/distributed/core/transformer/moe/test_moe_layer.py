"""megatron-core's MoE layer on several ranks: dispatch and combination restore tokens, and layouts compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_state import resolve_group
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.distributed import run_distributed

HIDDEN, FFN, EXPERTS, SEQ, BATCH = 8, 12, 8, 16, 2


def initialize(tp: int, ep: int, etp: int, cp: int = 1) -> None:
    parallel_state.initialize_model_parallel(
        tp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )


def make_layer(tp: int, ep: int, etp: int, grouped: bool = False, **settings: Any) -> MoELayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
        add_bias_linear=False,
        use_cpu_initialization=True,
        moe_grouped_gemm=grouped,
        **({"moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32"} | settings),
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=grouped)
    layer = MoELayer(config, spec.submodules.mlp.submodules)
    layer.set_layer_number(1)
    return layer


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def permute_and_restore(tp: int, ep: int, etp: int, settings: dict[str, Any]) -> None:
    """With weights of 1 / topk, every token returns as it was, once per rank that holds a shard of its expert."""
    initialize(tp, ep, etp)
    layer = make_layer(tp, ep, etp, **settings)
    with torch.no_grad():
        layer.router.weight.copy_(drawn(EXPERTS, HIDDEN, seed=1))
    hidden = drawn(SEQ, BATCH, HIDDEN, seed=10 + dist.get_rank()).requires_grad_()
    _, routing_map = layer.router(hidden)
    probs = (torch.ones(routing_map.shape) / layer.router.topk) * routing_map
    dispatcher = layer.token_dispatcher
    rows, counts, weights = dispatcher.token_permutation(hidden, probs, routing_map)
    assert rows.shape[0] == weights.shape[0] == counts.sum()
    assert counts.shape == (EXPERTS // ep,)
    restored, bias = dispatcher.token_unpermutation(rows * weights.unsqueeze(-1))
    assert bias is None
    torch.testing.assert_close(restored / etp, hidden)
    torch.autograd.backward(restored / etp, hidden.detach())
    torch.testing.assert_close(hidden.grad, hidden.detach())


SETTINGS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "flex": {"moe_token_dispatcher_type": "flex"},
    "quantized": {"moe_router_padding_for_quantization": True},
}


@pytest.mark.parametrize(
    ("tp", "ep", "etp"), [(1, 4, 1), (4, 1, 4), (2, 2, 2), (4, 2, 2), (2, 4, 1), (1, 2, 2), (4, 2, 1)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_dispatch_and_combination_restore_tokens(name: str, tp: int, ep: int, etp: int) -> None:
    run_distributed(4, permute_and_restore, tp, ep, etp, SETTINGS[name])


def compare_capacities(ep: int) -> None:
    """Padding the experts' input to their capacity changes neither the output nor a gradient."""
    initialize(1, ep, 1)
    results = []
    for pads in (False, True):
        layer = make_layer(
            1, ep, 1, moe_expert_capacity_factor=0.7, moe_pad_expert_input_to_capacity=pads, moe_router_topk=3
        )
        for number, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(drawn(*parameter.shape, seed=100 + number))
        hidden = drawn(SEQ, BATCH, HIDDEN, seed=10 + dist.get_rank()).requires_grad_()
        _, routing_map = layer.router(hidden)
        capacity = moe_utils.get_capacity(SEQ * BATCH * 3, EXPERTS, 0.7)
        assert (routing_map.sum(dim=0) == capacity).all() if pads else (routing_map.sum(dim=0) <= capacity).all()
        output, _ = layer(hidden)
        output.square().sum().backward()
        assert hidden.grad is not None
        results.append([output.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())])
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs)


def test_padding_to_capacity_changes_no_number() -> None:
    run_distributed(2, compare_capacities, 2)


def whole_weight(name: str, ep_rank: int, num_local: int, etp: int, etp_rank: int) -> torch.Tensor:
    """Return a parameter's shard of weights that are the same in every layout."""
    if "local_experts" not in name:
        shape = {"router.weight": (EXPERTS, HIDDEN)}[name]
        return drawn(*shape, seed=1)
    expert = ep_rank * num_local + int(name.split("local_experts.")[1].split(".")[0])
    if "fc1" in name:
        return drawn(FFN, HIDDEN, seed=1000 + expert).chunk(etp)[etp_rank]
    return drawn(HIDDEN, FFN, seed=2000 + expert).chunk(etp, dim=1)[etp_rank]


def run_layer(tp: int, ep: int, etp: int, cp: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a layer on this rank's tokens of one batch for each data-parallel rank."""
    initialize(tp, ep, etp, cp)
    layer = make_layer(tp, ep, etp, context_parallel_size=cp, **settings)
    expt_tp, ep_group = resolve_group(None, "expt_tp"), resolve_group(None, "ep")
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(whole_weight(name, ep_group.rank, EXPERTS // ep, etp, expt_tp.rank))
    tp_cp, dp = resolve_group(None, "tp_cp"), resolve_group(None, "dp")
    inputs = drawn(SEQ, BATCH, HIDDEN, seed=10 + dp.rank)
    hidden = inputs.chunk(tp_cp.size)[tp_cp.rank].contiguous().requires_grad_()
    output, _ = layer(hidden)
    target = drawn(SEQ, BATCH, HIDDEN, seed=50).chunk(tp_cp.size)[tp_cp.rank]
    (output * target).sum().backward()
    moe_utils.reduce_aux_losses_tracker_across_ranks()
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    assert hidden.grad is not None
    return {
        "place": (dp.rank, tp_cp.rank),
        "output": output.detach(),
        "grad": hidden.grad,
        "router": layer.router.weight.grad,
        "losses": {name: tracked["values"].item() for name, tracked in tracker.items()},
    }


def joined(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
    """Return the tokens of all ranks: data-parallel ranks one after the other along the batch."""
    places = sorted(ranks, key=lambda rank: rank["place"])
    num_replicas = 1 + max(dp for dp, _ in (rank["place"] for rank in places))
    return torch.cat(
        [torch.cat([rank[name] for rank in places if rank["place"][0] == dp]) for dp in range(num_replicas)], dim=1
    )


LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.25],
    "moe_z_loss_coeff": 0.1,
}


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "cp", "kind"),
    [
        (4, 1, 4, 1, "alltoall"),
        (2, 2, 2, 1, "alltoall"),
        (1, 2, 2, 4, "alltoall"),
        (2, 4, 1, 2, "alltoall"),
        (2, 2, 2, 2, "allgather"),
        (4, 4, 1, 1, "allgather"),
    ],
)
def test_layouts_compute_what_one_process_computes(tp: int, ep: int, etp: int, cp: int, kind: str) -> None:
    settings = LOSSES | {"moe_token_dispatcher_type": kind}
    ranks = run_distributed(4, run_layer, tp, ep, etp, cp, settings)
    dp = 4 // (tp * cp)
    if dp > 1:
        # Each replica's tokens are a batch of their own for the losses.
        settings = {"moe_token_dispatcher_type": kind}
        ranks = run_distributed(4, run_layer, tp, ep, etp, cp, settings)
    (one,) = run_distributed(1, run_layer, 1, 1, 1, 1, settings)
    first = [rank for rank in ranks if rank["place"][0] == 0]
    torch.testing.assert_close(joined(first, "output"), one["output"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(joined(first, "grad"), one["grad"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(rank["router"] for rank in first), one["router"], rtol=1e-4, atol=1e-3)
    if dp == 1:
        for name in ("load_balancing_loss", "seq_load_balancing_loss"):
            assert ranks[0]["losses"][name] == pytest.approx(one["losses"][name], rel=1e-5)


def compare_kinds_of_experts(etp: int, gated: bool) -> None:
    """Grouped GEMMs compute what separate MLPs compute."""
    initialize(1, 2, etp)
    settings = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if gated else {}
    sequential, grouped = (make_layer(1, 2, etp, grouped=each, **settings) for each in (False, True))
    assert sum(p.numel() for p in sequential.parameters()) == sum(p.numel() for p in grouped.parameters())
    local = EXPERTS // 2
    first = grouped.experts.weight1.view(local, HIDDEN, -1)
    second = grouped.experts.weight2.view(local, -1, HIDDEN)
    with torch.no_grad():
        grouped.router.weight.copy_(sequential.router.weight)
        for number, expert in enumerate(sequential.experts.local_experts):
            first[number].copy_(expert.linear_fc1.weight.t())
            second[number].copy_(expert.linear_fc2.weight.t())
    results = []
    for layer in (sequential, grouped):
        hidden = drawn(SEQ, BATCH, HIDDEN, seed=10 + dist.get_rank()).requires_grad_()
        output, _ = layer(hidden)
        output.square().sum().backward()
        results.append((output, hidden.grad))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs)
    of_grouped = grouped.experts.weight1.grad.view(local, HIDDEN, -1)
    for number, expert in enumerate(sequential.experts.local_experts):
        torch.testing.assert_close(of_grouped[number].t(), expert.linear_fc1.weight.grad)


@pytest.mark.parametrize(("etp", "gated"), [(1, False), (2, True)])
def test_kinds_of_experts_agree(etp: int, gated: bool) -> None:
    run_distributed(2 * etp, compare_kinds_of_experts, etp, gated)
