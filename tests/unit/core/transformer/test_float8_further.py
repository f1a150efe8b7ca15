"""Layers that predict further tokens in fp8, against float64 products of the same quantized operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.flat_parameters import is_sent_in_float8
from megatron.core.models import fp8_layers
from megatron.core.models.fp8_layers import compute_in_float8, describe_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.float8_products import assert_products
from tests.harness.toy_model import make_float8_model, make_model

SHAPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "mtp_num_layers": 2,
    "num_layers": 3,
    "hidden_size": 144,
    "ffn_hidden_size": 32,
    "add_bias_linear": False,
}
LENGTH, BATCH = 24, 2


def make(recipe: str, **config: Any) -> GPTModel:
    return make_float8_model(recipe, **(SHAPE | config))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_all_products_are_those_of_quantized_operands(recipe: str) -> None:
    further = make(recipe).mtp.layers["1"]
    layer, generator = further.transformer_layer, torch.Generator().manual_seed(5)
    attention, mlp = layer.self_attention, layer.mlp
    modules = further.eh_proj, attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
    for number, module in enumerate(modules):
        assert_products(module, LENGTH, BATCH, generator, f"{number}, {recipe}")


def test_each_product_has_a_place_of_its_own_behind_the_layers() -> None:
    model = make("delayed")
    places = model.config.float8_places
    assert (places.num_layers, places.num_places, places.join) == (5, 5, 4)
    found = [module.quantizers._place for module in model.modules() if getattr(module, "quantizers", None)]
    expected = [(layer, place) for layer in range(5) for place in range(4)] + [(3, 4), (4, 4)]
    assert sorted(found) == sorted(expected)


def test_they_are_in_fp8_where_the_last_layers_are_not() -> None:
    """As in Megatron, which applies --first-last-layers-bf16 to the model's own layers alone."""
    model = make("delayed", first_last_layers_bf16=True)
    found = {module.quantizers._place[0] for module in model.modules() if getattr(module, "quantizers", None)}
    assert found == {1, 3, 4}
    line = describe_float8(model.config, "cpu")
    assert line is not None
    assert "layers 2 to 2 of 3, and those of further tokens" in line


@pytest.mark.parametrize(
    ("device", "has_products", "by"),
    [
        ("cpu", True, "float32 products of the quantized operands"),
        ("cuda", False, "float32 products of the quantized operands"),
        ("cuda", True, "torch's scaled products"),
    ],
)
def test_the_line_says_what_computes_the_products(
    monkeypatch: pytest.MonkeyPatch, device: str, has_products: bool, by: str
) -> None:
    monkeypatch.setattr(fp8_layers, "has_scaled_products", lambda *given: has_products)
    config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, fp8_format="hybrid")
    line = describe_float8(config, device)
    assert line is not None
    assert line.startswith("fp8: hybrid, ")
    assert f"layers 1 to 4 of 4; computed by {by}" in line
    assert "further tokens" not in line
    assert describe_float8(TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4), device) is None


def test_weights_are_gathered_in_fp8_where_their_products_are() -> None:
    model = make_model(single_rank_group(), bf16=True, fp8_format="hybrid", fp8_param_gather=True, **SHAPE)
    compute_in_float8([model], model.config, "cpu")
    sent = {name for name, parameter in model.named_parameters() if is_sent_in_float8(parameter)}
    linear = [name for name, _ in model.named_parameters() if "linear" in name or "eh_proj" in name]
    assert sent == {name for name in linear if name.endswith("weight")}
    assert "mtp.layers.1.eh_proj.weight" in sent
