"""What a layer keeps in fp8 and beside frozen weights, counted where autograd saves it, is as the closed form says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.models.fp8_layers import compute_in_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.closed_forms.saved_activations import saved_bytes
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

LENGTH, BATCH = 12, 3
FP8: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
GATED: dict[str, Any] = {"swiglu": True, "num_query_groups": 2}
LORA: dict[str, Any] = {"lora_rank": 3, "lora_target_modules": ("linear_qkv",)}


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def make(num_layers: int, **config: Any) -> GPTModel:
    # In float32 a CPU's norms keep what the fused ones do.
    settings = {"params_dtype": "float32", "position_embedding_type": "learned_absolute"} | config
    model = make_model(tensor_parallel_group(), num_layers=num_layers, **settings)
    load_global_weights(model)
    compute_in_float8([model], model.config, "cpu")
    return model


def kept(model: GPTModel) -> int:
    """Return the bytes that autograd saves of one micro-batch, parameters left out."""
    owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage._cdata not in owned:
            found[storage._cdata] = tensor
        return tensor

    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, positions, labels=labels).mean()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def kept_by_a_layer(**config: Any) -> int:
    """Return what a third layer keeps: the first one may have an input that no gradient is wanted of."""
    return kept(make(3, **config)) - kept(make(2, **config))


def formula(**config: Any) -> int:
    return sum(saved_bytes(make(3, **config).config, LENGTH, BATCH, layer_number=2).values())


@pytest.mark.default(11)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="plain"),
        *(
            pytest.param({"fp8_format": "hybrid", "fp8_recipe": recipe}, id=recipe)
            for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
        ),
        pytest.param(FP8 | {"fp8_wgrad": False}, id="no-wgrad"),
        pytest.param(FP8 | again("core_attn"), id="core_attn"),
        pytest.param(FP8 | again("layernorm"), id="layernorm"),
        pytest.param({"fp8_format": "hybrid", "fp8_recipe": "mxfp8"} | again("layernorm"), id="layernorm-mxfp8"),
        pytest.param(FP8 | again("core_attn", "layernorm", "mlp"), id="modules"),
        pytest.param(LORA, id="lora-qkv"),
        pytest.param(LORA | again("layernorm"), id="lora-layernorm"),
        pytest.param(LORA | again("core_attn"), id="lora-core_attn"),
        pytest.param(LORA | {"lora_target_modules": ()}, id="lora-everywhere"),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says(config: dict[str, Any]) -> None:
    assert kept_by_a_layer(**config) == formula(**config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FP8, id="fp8"),
        pytest.param(FP8 | again("core_attn", "layernorm"), id="modules"),
        pytest.param(LORA | {"lora_target_modules": ("v_proj", "down_proj")}, id="lora-down"),
        pytest.param(LORA | FP8 | {"lora_target_modules": ("q_proj", "o_proj")}, id="lora-fp8"),
    ],
)
def test_gated_layers_keep_as_much_more_or_less_as_the_closed_form_says(config: dict[str, Any]) -> None:
    """A CPU computes a gate in several steps, which keep more than the fused ones."""
    changed = kept_by_a_layer(**GATED, **config) - kept_by_a_layer(**GATED)
    assert changed == formula(**GATED, **config) - formula(**GATED)


def test_frozen_weights_keep_no_input() -> None:
    """Attention and activation keep what they need themselves: gone are a norm's output and the activation's."""
    trained = kept_by_a_layer()
    frozen = kept_by_a_layer(**LORA)
    tokens, hidden, ffn, rank = LENGTH * BATCH, 28, 36, 3
    # Query, key and value have an adapter, which keeps the first norm's output.
    assert trained - frozen == 4 * tokens * (hidden + ffn - rank)


def test_recomputed_norms_free_what_fp8_keeps_of_their_outputs() -> None:
    for recipe in ("delayed", "mxfp8"):
        config = {"fp8_format": "hybrid", "fp8_recipe": recipe}
        freed = kept_by_a_layer(**config) - kept_by_a_layer(**config, **again("layernorm"))
        assert freed >= 2 * LENGTH * BATCH * 28


def test_layers_that_stay_in_bf16_keep_as_much_as_those() -> None:
    config = make(3, **FP8, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0).config
    plain = make(3).config
    assert saved_bytes(config, LENGTH, BATCH, 0) == saved_bytes(plain, LENGTH, BATCH, 0)
    assert saved_bytes(config, LENGTH, BATCH, 1) == saved_bytes(config, LENGTH, BATCH)
    assert sum(saved_bytes(config, LENGTH, BATCH, 1).values()) < sum(saved_bytes(plain, LENGTH, BATCH, 1).values())
