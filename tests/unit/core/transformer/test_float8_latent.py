"""The linear maps of latent attention in fp8, against float64 products of the same quantized operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from tests.harness.float8_products import assert_products
from tests.harness.toy_model import make_float8_model

NARROW = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
SHAPE: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 48,
    "kv_lora_rank": 160,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "hidden_size": 144,
    "num_query_groups": 4,
    "ffn_hidden_size": 32,
    "add_bias_linear": False,
}
LENGTH, BATCH = 24, 2


def make(recipe: str, **config: Any) -> GPTModel:
    return make_float8_model(recipe, **(SHAPE | config))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_all_products_are_those_of_quantized_operands(recipe: str) -> None:
    attention = make(recipe, num_layers=1).decoder.layers["0"].self_attention
    generator = torch.Generator().manual_seed(5)
    for name in NARROW:
        assert_products(getattr(attention, name), LENGTH, BATCH, generator, f"{name}, {recipe}")


@pytest.mark.parametrize(("q_lora_rank", "num_linear"), [(48, 7), (None, 6)])
def test_delayed_scaling_has_a_place_for_each_map(q_lora_rank: int | None, num_linear: int) -> None:
    model = make("delayed", q_lora_rank=q_lora_rank)
    places = model.config.float8_places
    assert (places.num_layers, places.num_places) == (2, num_linear)
    found = [module.quantizers._place for module in model.modules() if getattr(module, "quantizers", None)]
    assert sorted(found) == [(layer, place) for layer in range(2) for place in range(num_linear)]


def test_inputs_that_a_norm_of_the_stream_gives_are_known_as_such() -> None:
    """What `--recompute-modules layernorm` computes again is not kept in fp8; narrow vectors are."""
    model = make("delayed", recompute_granularity="selective", recompute_modules=("layernorm",))
    attention = model.decoder.layers["0"].self_attention
    again = {name for name in NARROW if getattr(attention, name).quantizers.input_is_recomputed}
    assert again == {"linear_q_down_proj", "linear_kv_down_proj"}
