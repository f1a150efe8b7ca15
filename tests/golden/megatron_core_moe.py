"""Numbers of megatron-core's MoE functions, routers and layers, computed by names that this framework offers too.

Run as a program by an interpreter that has megatron-core 0.16.1, it writes them: ``python megatron_core_moe.py
moe/megatron_core_moe.json`` (a CPU is enough). The tests import it, and compute them with this framework.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, EXPERTS, SEQ, BATCH = 12, 8, 5, 2
SHAPE = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS}
SHAPE |= {"use_cpu_initialization": True, "add_bias_linear": False}

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "one expert": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
    "groups of scores": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "bias": {"add_bias_linear": True, "expert_tensor_parallel_size": 1},
    "float64": {"moe_router_dtype": "fp64"},
    "aux loss": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "aux loss of sigmoid": {"moe_aux_loss_coeff": 0.1, "moe_router_score_function": "sigmoid"},
    "sequences": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.2},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "several": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "calculate_per_token_loss": True,
        "moe_z_loss_coeff": 0.05,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "sinkhorn of one": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "none": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.8},
    "padded capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}

LAYERS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "gated": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "moe_ffn_hidden_size": 20},
    "alltoall": {"moe_token_dispatcher_type": "alltoall", "moe_router_topk": 3},
    "biases": {"add_bias_linear": True, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_token_dispatcher_type": "alltoall"},
    "gated shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "capacity": {"moe_expert_capacity_factor": 0.8, "moe_token_dispatcher_type": "alltoall"},
    "padded capacity": {
        "moe_expert_capacity_factor": 0.8,
        "moe_token_dispatcher_type": "alltoall",
        "moe_pad_expert_input_to_capacity": True,
    },
}


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return numbers that depend on no generator of torch."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + seed * 0.37).view(shape).mul(1.3).float()


def listed(tensor: torch.Tensor | None) -> Any:
    """Return a tensor as a list, with seven significant digits."""
    if tensor is None:
        return None
    return json.loads(
        json.dumps(tensor.detach().double().tolist()), parse_float=lambda text: float(f"{float(text):.7g}")
    )


def fill(module: torch.nn.Module) -> None:
    """Give every parameter numbers that depend on its place in the module."""
    for number, (_, parameter) in enumerate(module.named_parameters()):
        parameter.data.copy_(drawn(tuple(parameter.shape), number + 1) * 0.4)


def losses() -> dict[str, Any]:
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    found = {name: listed(tracked["values"]) for name, tracked in sorted(tracker.items()) if tracked["values"].any()}
    moe_utils.clear_aux_losses_tracker()
    return found


def route(settings: dict[str, Any], training: bool = True) -> dict[str, Any]:
    """Return what a router computes in two micro-batches, with gradients and tracked losses."""
    router = TopKRouter(TransformerConfig(**(SHAPE | settings)), moe_utils.get_default_pg_collection())
    router.set_layer_number(2)
    router.train(training)
    fill(router)
    if router.expert_bias is not None:
        router.expert_bias.copy_(drawn((EXPERTS,), 9) * 0.2)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(2.0))
    steps = []
    for number in (1, 2):
        x = drawn((SEQ, BATCH, HIDDEN), 20 + number).requires_grad_()
        probs, routing_map = router(x)
        (probs * drawn(tuple(probs.shape), 30)).sum().backward()
        steps.append({"probs": listed(probs), "map": routing_map.int().tolist(), "x_grad": listed(x.grad)})
    result = {"steps": steps, "losses": losses(), "weight_grad": listed(router.weight.grad)}
    if router.enable_expert_bias:
        counts = router.local_tokens_per_expert
        result["counts"] = listed(counts)
        result["bias"] = listed(moe_utils.get_updated_expert_bias(counts, router.expert_bias, 0.01))
    return result


def run_layer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a whole layer computes, with gradients."""
    config = TransformerConfig(**(SHAPE | {"moe_aux_loss_coeff": 0.1} | settings))
    layer = MoELayer(config, get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp.submodules)
    layer.set_layer_number(1)
    if config.moe_shared_expert_gate and layer.shared_experts.gate_weight is None:
        raise RuntimeError("the shared experts have no gate")
    fill(layer)
    x = drawn((SEQ, BATCH, HIDDEN), 40).requires_grad_()
    output, bias = layer(x)
    (output * drawn(tuple(output.shape), 50)).sum().backward()
    gradients = {name: listed(p.grad) for name, p in layer.named_parameters() if p.grad is not None}
    return {
        "output": listed(output),
        "bias": listed(bias),
        "x_grad": listed(x.grad),
        "gradients": gradients,
        "losses": losses(),
    }


def functions() -> dict[str, Any]:
    """Return what the functions of ``moe_utils`` compute."""
    logits = drawn((7, EXPERTS), 3) * 2
    mask = torch.tensor([False, True, False, False, True, False, False])
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, 2)
    counts = routing_map.sum(dim=0)
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid", padding_mask=mask)
    tokens = drawn((7, 4), 5)
    rows, weights, order = moe_utils.permute(tokens, routing_map, probs)
    kept, kept_map = moe_utils.apply_router_token_dropping(probs, routing_map, 2, 1.0, pad_to_capacity=True)
    padded, padded_weights, padded_order = moe_utils.permute(tokens, kept_map, kept, 16, drop_and_pad=True)
    sizes = torch.tensor([2, 0, 3, 2])
    sorted_rows, sorted_weights = moe_utils.sort_chunks_by_idxs(
        tokens, sizes, torch.tensor([2, 0, 3, 1]), probs=tokens[:, 0]
    )
    return {
        "capacities": [moe_utils.get_capacity(*each) for each in ((10, 4, 1.0), (10, 4, 1.3), (1, 8, 1.0, 4))],
        "switch": float(moe_utils.switch_load_balancing_loss_func(probs, counts, 7, 2, EXPERTS, 0.01)),
        "z": float(moe_utils.z_loss_func(logits, 0.1)),
        "masked z": float(moe_utils.z_loss_func(logits, 0.1, padding_mask=mask)),
        "sinkhorn": listed(moe_utils.sinkhorn(logits)),
        "scores": listed(scores),
        "chosen": chosen.int().tolist(),
        "rows": listed(rows),
        "weights": listed(weights),
        "order": order.tolist(),
        "restored": listed(moe_utils.unpermute(rows, order, tokens.shape)),
        "weighted": listed(moe_utils.unpermute(rows, order, tokens.shape, probs=probs, routing_map=routing_map)),
        "kept": listed(kept),
        "padded": listed(
            moe_utils.unpermute(padded, padded_order, tokens.shape, probs=kept, drop_and_pad=True, routing_map=kept_map)
        ),
        "padded weights": listed(padded_weights),
        "sorted": [listed(sorted_rows), listed(sorted_weights)],
        "group-limited": [listed(each) for each in moe_utils.group_limited_topk(logits, 2, 7, EXPERTS, 4, 2)],
        "quantized": moe_utils.pad_routing_map(routing_map.int(), 3).int().tolist(),
    }


def compute() -> dict[str, Any]:
    """Return all numbers by name."""
    return {
        "functions": functions(),
        "routers": {name: route(settings) for name, settings in ROUTERS.items()},
        "evaluated": {name: route(ROUTERS[name], training=False) for name in ("aux loss", "sinkhorn")},
        "layers": {name: run_layer(settings) for name, settings in LAYERS.items()},
    }


def main() -> None:
    """Write the numbers of megatron-core to a file."""
    sys.path.insert(0, str(Path(__file__).parent))
    from make_references import without_cuda

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29533")}
    dist.init_process_group("gloo", rank=0, world_size=1)
    without_cuda()
    parallel_state.initialize_model_parallel()
    Path(sys.argv[1]).write_text(json.dumps(compute()) + "\n")


if __name__ == "__main__":
    main()
