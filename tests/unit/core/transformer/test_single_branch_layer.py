"""Layers with one part, and the layer of an MTP module of a model with a pattern of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.multi_token_prediction import MTPLayer
from megatron.core.transformer.single_branch_layer import SingleBranchLayer
from tests.harness.toy_model import load_global_weights, make_model

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_latent_size": 10}


@pytest.mark.parametrize(("pattern", "fields"), [("*EM", EXPERTS), ("*-M", {})])
def test_an_mtp_module_computes_what_two_layers_of_one_part_compute(pattern: str, fields: dict[str, int]) -> None:
    shape = {"mamba_num_groups": 2, "mamba_head_dim": 7, "position_embedding_type": "none", "params_dtype": "float64"}
    model = make_model(
        single_rank_group(), num_layers=3, hybrid_override_pattern=pattern, mtp_num_layers=1, **shape, **fields
    )
    load_global_weights(model)
    module = next(each for each in model.modules() if isinstance(each, MTPLayer))
    attention, feed_forward, _ = (layer for layer in model.modules() if isinstance(layer, SingleBranchLayer))
    own = module.transformer_layer
    for theirs, part in (
        (attention.input_layernorm, own.input_layernorm),
        (attention.self_attention, own.self_attention),
        (feed_forward.input_layernorm, own.pre_mlp_layernorm),
        (feed_forward.mlp, own.mlp),
    ):
        part.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(3)
    hidden, embedded = (torch.randn(7, 2, 28, dtype=torch.float64, generator=generator) for _ in range(2))
    both = torch.cat((module.enorm(embedded), module.hnorm(hidden)), dim=-1)
    x = F.linear(both, module.eh_proj.weight)
    for layer in (attention, feed_forward):
        x = layer(x, CAUSAL, None).hidden
    expected = module.final_layernorm(x)
    found = module(hidden, embedded, CAUSAL, None, None).hidden
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
