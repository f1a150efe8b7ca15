"""What --recompute-modules names of experts and latent attention is not kept, and changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.recompute import storage_key
from tests.harness.toy_model import load_global_weights, make_batch, make_model

LENGTH, BATCH, WIDTH, TOPK = 14, 3, 8, 2
MODEL: dict[str, Any] = {
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 4,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 18,
    "moe_shared_expert_intermediate_size": 22,
    "moe_aux_loss_coeff": (0.1,),
    "params_dtype": "float64",
    "recompute_granularity": "selective",
}
TOKENS, LAYERS, HEADS = LENGTH * BATCH, 2, 4


def numbers_kept(*modules: str) -> tuple[int, list[torch.Tensor]]:
    """Return how many numbers the backward pass is left, without weights, and all gradients."""
    model = make_model(single_rank_group(), **MODEL, recompute_modules=modules)
    load_global_weights(model)
    weights = {storage_key(parameter) for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in weights and tensor.is_floating_point():
            kept[storage_key(tensor)] = tensor.detach()
        return tensor

    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, positions, labels=labels, losses=[]).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(tensor.untyped_storage().nbytes() // 8 for tensor in kept.values()), gradients


@pytest.mark.parametrize(
    ("modules", "saved"),
    [
        (("moe_act",), TOKENS * TOPK * 18),
        # The input of the gated activation, twice as wide, its two factors' product and what torch keeps of one.
        (("shared_experts",), TOKENS * 4 * 22),
        # Queries, keys and values of one width; the rotary part of the keys takes their place.
        (("mla_up_proj",), TOKENS * (3 * HEADS * 10 - 4)),
        (("mla_up_proj", "moe_act"), TOKENS * (3 * HEADS * 10 - 4 + TOPK * 18)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_named_module_is_not_kept_and_no_bit_changes(modules: tuple[str, ...], saved: int) -> None:
    (plain, expected), (kept, gradients) = numbers_kept(), numbers_kept(*modules)
    assert plain - kept == LAYERS * saved
    assert len(gradients) == len(expected)
    assert all(map(torch.equal, gradients, expected))


def test_modules_go_with_recompute_of_the_core_and_the_whole() -> None:
    expected = numbers_kept()[1]
    for modules in (("core_attn", "mla_up_proj", "layernorm"), ("moe", "moe_act", "shared_experts")):
        assert all(map(torch.equal, numbers_kept(*modules)[1], expected))
