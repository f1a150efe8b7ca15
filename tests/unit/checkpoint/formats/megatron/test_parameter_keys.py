"""The names and row orders of files of every age stand for one native tensor each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.parameter_keys import fused_key, local_key, named_tensors
from megatron.checkpoint.formats.megatron.stored_optimizer import plan_flat_buffer
from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor, StorageKey
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource
from megatron.core.errors import CheckpointError

HIDDEN, HEADS, HEAD_DIM, LAYERS, WORDS, POSITIONS = 128, 2, 64, 2, 131, 10

OLD_LAYER = {
    "input_layernorm": "input_layernorm",
    "{attention}.query_key_value": "self_attention.linear_qkv",
    "{attention}.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
LATER_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}


def weights() -> dict[str, torch.Tensor]:
    """Return a model under native names."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "input_layernorm.bias": (HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
        "self_attention.linear_qkv.bias": (3 * HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "self_attention.linear_proj.bias": (HIDDEN,),
        "pre_mlp_layernorm.weight": (HIDDEN,),
        "pre_mlp_layernorm.bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (4 * HIDDEN, HIDDEN),
        "mlp.linear_fc1.bias": (4 * HIDDEN,),
        "mlp.linear_fc2.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.linear_fc2.bias": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(3)
    found = {
        "embedding.word_embeddings.weight": torch.randn(WORDS, HIDDEN, generator=generator),
        "embedding.position_embeddings.weight": torch.randn(POSITIONS, HIDDEN, generator=generator),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            found[f"decoder.layers.{layer}.{name}"] = torch.randn(shape, generator=generator)
    found["decoder.final_layernorm.weight"] = torch.randn(HIDDEN, generator=generator)
    found["decoder.final_layernorm.bias"] = torch.randn(HIDDEN, generator=generator)
    return found


def old_rows(values: torch.Tensor, version: float | None) -> torch.Tensor:
    """Return a native QKV weight or bias with the rows of a version."""
    parts = values.view(HEADS, 3, HEAD_DIM, *values.shape[1:])
    if version is None:
        parts = parts.transpose(0, 1)
    elif version == 1.0:
        parts = parts.transpose(1, 2)
    return parts.reshape(values.shape)


def old_file(version: float | None, encoder: str, attention: str, later_norms: bool) -> dict[str, Any]:
    """Return what an old Megatron saved of the model: nested, under its names, in its row order."""
    model = weights()
    layers: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for old, new in OLD_LAYER.items():
            for kind in ("weight", "bias"):
                values = model[f"decoder.layers.{layer}.{new}.{kind}"]
                old = LATER_NORMS.get(old, old) if later_norms else old
                name = f"layers.{layer}.{old.format(attention=attention)}.{kind}"
                layers[name] = old_rows(values, version) if "query_key_value" in old else values
    final = "final_norm" if later_norms else "final_layernorm"
    for kind in ("weight", "bias"):
        layers[f"{final}.{kind}"] = model[f"decoder.final_layernorm.{kind}"]
    file: dict[str, Any] = {
        "model": {
            "language_model": {
                "embedding": {
                    "word_embeddings": {"weight": model["embedding.word_embeddings.weight"]},
                    "position_embeddings": {"weight": model["embedding.position_embeddings.weight"]},
                },
                encoder: layers,
            }
        }
    }
    return file if version is None else file | {"checkpoint_version": version}


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize(
    ("version", "encoder", "attention", "later_norms"),
    [
        (None, "transformer", "attention", False),
        (1.0, "transformer", "attention", False),
        (2.0, "encoder", "self_attention", False),
        (3.0, "encoder", "self_attention", True),
    ],
)
def test_old_files_hold_the_native_model(
    version: float | None, encoder: str, attention: str, later_norms: bool, is_zip: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "release"
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(
        old_file(version, encoder, attention, later_norms),
        folder / "mp_rank_00" / "model_optim_rng.pt",
        _use_new_zipfile_serialization=is_zip,
    )
    source = MegatronTorchSource(folder)
    expected = {f"model.{name}": values for name, values in weights().items()}
    assert source.tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(source.read(name), values), name
    assert (source.model.num_layers, source.model.num_attention_heads, source.model.ffn_hidden_size) == (2, 2, 512)
    assert source.common["optimizer"] is None


def test_every_key_that_is_known() -> None:
    for old, new in (
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_bias", "decoder.layers.0.pre_mlp_layernorm.bias"),
        (
            "language_model.encoder.layers.7.self_attention.dense.bias",
            "decoder.layers.7.self_attention.linear_proj.bias",
        ),
        ("language_model.encoder.final_norm.weight", "decoder.final_layernorm.weight"),
        ("word_embeddings_for_head.weight", "output_layer.weight"),
        ("language_model.output_layer.weight", "output_layer.weight"),
    ):
        assert local_key(old) == new
    assert local_key("decoder.layers.0.mlp.linear_fc1._extra_state") is None
    modules = {"decoder.layers.3.self_attention.linear_qkv", "decoder.layers.2.mixer.in_proj"}
    for native, stored in (
        ("decoder.layers.3.input_layernorm.bias", "decoder.layers.3.self_attention.linear_qkv.layer_norm_bias"),
        ("decoder.layers.2.norm.weight", "decoder.layers.2.mixer.in_proj.layer_norm_weight"),
        ("decoder.layers.2.mixer.norm.weight", "decoder.layers.2.mixer.norm.weight"),
        ("decoder.layers.2.input_layernorm.bias", "decoder.layers.2.input_layernorm.bias"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ):
        assert fused_key(native, modules) == stored
        assert local_key(stored) == native


def test_a_tensor_of_another_model_is_named() -> None:
    tensor = LazyTensor(StorageKey("0", torch.float32, 1), 0, (1,), (1,))
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.mixer\.x_proj\.weight"):
        named_tensors({"decoder.layers.0.mixer.x_proj.weight": tensor}, "file")


def test_flat_buffer_places() -> None:
    # Reverse order, each at a multiple of 64; nothing after the last.
    assert plan_flat_buffer([100, 64, 3], None).starts == (128, 64, 0)
    assert plan_flat_buffer([100, 64, 3], None).num_elements == 228
    # Padding after a bucket is left out of the file, so that the next begins right behind it.
    assert plan_flat_buffer([100, 70, 3], bucket_size=70).starts == (134, 64, 0)
    # A tied embedding closes the bucket before it where it would have begun itself.
    assert plan_flat_buffer([100, 70, 3], None, alone={0}).starts == (192, 64, 0)
    assert plan_flat_buffer([100, 70, 3], None, alone={0}).num_elements == 292
    assert plan_flat_buffer([7, 100], None, alone={1}).starts == (100, 0)
