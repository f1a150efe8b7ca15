"""GPT-OSS's folders: what their settings may say, and experts of 4 bits as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource, LoadedModelSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.sharding import Box
from tests.unit.interop.huggingface.family_settings import GPT_OSS, YARN, config_of
from tests.unit.interop.huggingface.memory_source import MemorySource, copy_of
from tests.unit.interop.huggingface.tiny_models import (
    edit_config,
    folder_bytes,
    import_transformers,
    save_model,
    their_logits,
    tokens_of,
)

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 3}
"""Sizes that blocks of 32 divide."""


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def without_record(source: MemorySource) -> MemorySource:
    common = {name: value for name, value in source.common.items() if name != "hugging_face"}
    return MemorySource(source.values, common, source.folder)


def test_settings_that_are_left_out_are_those_of_the_configuration_class(tmp_path: Path) -> None:
    config = config_of(tmp_path, GPT_OSS)
    assert (config.kv_channels, config.num_query_groups, config.rotary_base) == (64, 2, 150000)
    assert (config.softmax_type, config.activation, config.glu_linear_offset) == ("learnable", "quick_geglu", 1.0)
    assert (config.activation_func_clamp_value, config.moe_router_topk, config.num_experts) == (7.0, 4, 8)
    assert config.layer_windows == (128, None, 128)
    assert (config.rotary_scaling_factor, config.yarn_correction_range_round_to_int) == (32.0, False)
    assert config.add_bias_linear
    assert config.has_qkv_bias
    nulls = config_of(tmp_path, GPT_OSS | {"head_dim": None, "num_key_value_heads": None})
    assert (nulls.kv_channels, nulls.num_query_groups) == (8, 6)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": False}, "attention_bias is false, supported is true"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, supported is 1.702"),
        ({"swiglu_limit": None}, "swiglu_limit is null"),
        ({"rope_scaling": None}, "rope_scaling is null, which releases of transformers read differently"),
        ({"sliding_window": None}, "sliding_window is None; its layers need a positive whole number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", supported is "silu"'),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_settings_that_mean_another_model_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(tmp_path, GPT_OSS | changes)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


VARIANTS: dict[str, dict[str, Any]] = {
    "tied, one head of keys": {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 1},
    "no window": {"layer_types": ["full_attention"] * 3, "head_dim": 8},
    "a window of one": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "amplitudes": {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e6, "attention_factor": 0.8}},
}


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_unusual_models_come_and_go(name: str, tmp_path: Path) -> None:
    """Their logits are those of transformers before, and after they were written without a record of the folder."""
    model = save_model("gpt_oss", tmp_path / "model", **VARIANTS[name])
    tokens = tokens_of("gpt_oss", 2, 96)
    expected, source = their_logits(model, tokens), HuggingFaceSource(tmp_path / "model")
    assert differ(streamed_logits(source, tokens), expected) <= 1e-5
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    same = ("model.safetensors",)
    assert [folder_bytes(tmp_path / "anew")[file] for file in same] == [
        folder_bytes(tmp_path / "model")[file] for file in same
    ]
    again = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "anew")
    assert torch.equal(their_logits(again, tokens), expected)


def test_a_model_in_memory_has_the_weights_of_its_folder(tmp_path: Path) -> None:
    model = save_model("gpt_oss", tmp_path / "model")
    loaded, stored = LoadedModelSource(model), HuggingFaceSource(tmp_path / "model")
    assert loaded.tensors.keys() == stored.tensors.keys()
    assert all(torch.equal(loaded.read(name), stored.read(name)) for name in stored.tensors)


def test_gate_and_up_are_apart_here_and_in_turn_there(tmp_path: Path) -> None:
    save_model("gpt_oss", tmp_path / "model")
    source = HuggingFaceSource(tmp_path / "model")
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    layer, ours = "model.layers.1.mlp.experts.", "model.decoder.layers.1.mlp.experts.linear_fc1."
    weight, bias = source.read(f"{ours}weight"), source.read(f"{ours}bias")
    assert torch.equal(weight[:, :20], theirs[f"{layer}gate_up_proj"][..., ::2].mT)
    assert torch.equal(weight[:, 20:], theirs[f"{layer}gate_up_proj"][..., 1::2].mT)
    assert torch.equal(bias[:, 20:], theirs[f"{layer}gate_up_proj_bias"][..., 1::2])
    part = Box((1, 17, 5), (3, 9, 21))
    assert torch.equal(source.read(f"{ours}weight", part), weight[part.slices])


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Give a folder's experts random weights of 4 bits, and return the stored tensors."""
    generator = torch.Generator().manual_seed(8)
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value.bfloat16()
            continue
        experts, columns, rows = value.shape
        blocks = (experts, rows, columns // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(119, 126, blocks, generator=generator, dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    edit_config(folder, lambda c: c.update(quantization_config=quantization, dtype="bfloat16"))
    return stored


def test_experts_of_4_bits_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    transformers = import_transformers()
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_model("gpt_oss", tmp_path / "model", **SIZES)
    stored = quantize(tmp_path / "model")
    edit_config(tmp_path / "model", lambda c: c.pop("dtype"))
    source = HuggingFaceSource(tmp_path / "model")
    assert source.config.bf16
    assert {info.dtype for info in source.tensors.values()} == {torch.bfloat16}
    write_hugging_face(source, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, value in plain.items():
        wanted = stored.get(name)
        if wanted is None:
            wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(value, wanted), name
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    name = "model.decoder.layers.1.mlp.experts.linear_fc1.weight"
    part = Box((1, 17, 35), (2, 9, 21))
    assert torch.equal(source.read(name, part), source.read(name)[part.slices])
    load, tokens = transformers.GptOssForCausalLM.from_pretrained, tokens_of("gpt_oss", 1, 20)
    dequantized = load(
        tmp_path / "model", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    expected = their_logits(load(tmp_path / "plain", dtype=torch.bfloat16), tokens)
    assert torch.equal(their_logits(dequantized, tokens), expected)


def test_every_exponent_and_every_4_bits_are_read(tmp_path: Path) -> None:
    """The least exponents leave numbers below the usual ones, and the largest infinity, as there."""
    import_transformers()
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_model("gpt_oss", tmp_path / "model", **SIZES)
    stored = quantize(tmp_path / "model")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = stored[f"{name}_scales"]
    scales.copy_(torch.arange(scales.numel()).remainder(255).view(scales.shape))
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    weight = HuggingFaceSource(tmp_path / "model").read("model.decoder.layers.0.mlp.experts.linear_fc1.weight")
    wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], scales).mT
    assert torch.equal(weight, torch.cat((wanted[:, ::2], wanted[:, 1::2]), dim=1))


def test_blocks_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_model("gpt_oss", tmp_path / "model", **SIZES)
    stored = quantize(tmp_path / "model")
    name = "model.layers.1.mlp.experts.down_proj"
    spoiled: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{name}_scales": None}, r"of 4 bits, and .*down_proj_scales is missing"),
        ({f"{name}_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}, r"down_proj_scales has the shape \[3, 64, 2\]"),
        ({f"{name}_scales": torch.zeros(3, 64, 1)}, r"down_proj_scales is torch\.float32; torch\.uint8 is expected"),
        ({f"{name}_blocks": torch.zeros(3, 64, 1, 8, dtype=torch.uint8)}, "four dims are expected, the last of 16"),
        ({f"{name}_blocks": None, f"{name}_scales": None}, r"missing: .*experts\.down_proj"),
    ]
    for changes, problem in spoiled:
        values = {key: value for key, value in (stored | changes).items() if value is not None}
        save_file(values, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=problem):
            HuggingFaceSource(tmp_path / "model")
