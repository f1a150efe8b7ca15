"""DeepSeek-V3's, GPT-OSS's and OLMo 3's folders as they are published: quantized weights and their positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.huggingface.families import hugging_face_config, read_model
from megatron.checkpoint.formats.huggingface.model_export import ExportedView, write_hugging_face
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource, LoadedModelSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.sharding import Box
from tests.unit.checkpoint.formats.huggingface.family_settings import GPT_OSS, OLMO3, YARN, config_of
from tests.unit.checkpoint.formats.huggingface.tiny_models import (
    KINDS,
    MemorySource,
    copy_of,
    edit_config,
    folder_bytes,
    import_transformers,
    make_model,
    save_model,
    their_logits,
    tokens_of,
)

LAYER = "model.layers.3."
"""What the names of the layer behind the last of the tiny model begin with."""
BLOCK = (16, 12)


def add_mtp_module(folder: Path) -> None:
    """Add an MTP module with a layer like the last one."""
    values = load_file(folder / "model.safetensors")
    last = {name: value for name, value in values.items() if name.startswith("model.layers.2.")}
    generator = torch.Generator().manual_seed(5)
    values |= {
        name.replace("layers.2.", "layers.3."): torch.randn(value.shape, generator=generator)
        for name, value in last.items()
    }
    values |= {f"{LAYER}{name}.weight": torch.randn(48, generator=generator) for name in ("enorm", "hnorm")}
    values[f"{LAYER}eh_proj.weight"] = torch.randn(48, 96, generator=generator)
    values[f"{LAYER}shared_head.norm.weight"] = torch.randn(48, generator=generator)
    values[f"{LAYER}shared_head.head.weight"] = values["lm_head.weight"].clone()
    values[f"{LAYER}embed_tokens.weight"] = values["model.embed_tokens.weight"].clone()
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a folder and its model, to which a layer of MTP modules was added that transformers passes over."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    model = save_model("deepseek", folder)
    add_mtp_module(folder)
    return folder, model


@pytest.fixture
def own(models: tuple[Path, Any], tmp_path: Path) -> Path:
    """Return a copy of the folder to be changed."""
    return Path(shutil.copytree(models[0], tmp_path / "model"))


def rewrite(folder: Path, change: Any) -> None:
    values = load_file(folder / "model.safetensors")
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def without_record(source: MemorySource) -> MemorySource:
    common = {name: value for name, value in source.common.items() if name != "hugging_face"}
    return MemorySource(source.values, common, source.folder)


def test_a_layer_of_further_tokens_comes_and_goes(models: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = models
    source = HuggingFaceSource(folder)
    assert source.config.mtp.mtp_num_layers == 1
    assert source.read("model.mtp.layers.0.eh_proj.weight").shape == (48, 96)
    tokens = tokens_of("deepseek", 2, 80)
    expected = their_logits(model, tokens)
    assert (streamed_logits(source, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    write_hugging_face(copy_of(source), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(folder)
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    assert folder_bytes(tmp_path / "anew")["model.safetensors"] == folder_bytes(folder)["model.safetensors"]
    assert json.loads((tmp_path / "anew" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_the_mtp_module_of_qwen3_next_comes_and_goes(tmp_path: Path) -> None:
    """transformers passes over the module; its parts are those of a layer with attention."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "mlp_only_layers": []}
    model = save_model("qwen3_next", tmp_path / "model", **kinds)

    def add(values: dict[str, torch.Tensor]) -> None:
        generator, last = torch.Generator().manual_seed(5), "model.layers.1."
        layer = {name.replace(last, "mtp.layers.0."): value for name, value in values.items() if name.startswith(last)}
        for name, value in layer.items():
            values[name] = torch.randn(value.shape, generator=generator)
        values["mtp.fc.weight"] = torch.randn(48, 96, generator=generator)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            values[f"mtp.{name}.weight"] = torch.randn(48, generator=generator)

    rewrite(tmp_path / "model", add)
    source = HuggingFaceSource(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert source.config.mtp.mtp_num_layers == 1
    assert torch.equal(source.read("model.mtp.layers.0.enorm.weight"), stored["mtp.pre_fc_norm_embedding.weight"])
    tokens = tokens_of("qwen3_next", 2, 40)
    assert differ(streamed_logits(source, tokens), their_logits(model, tokens)) <= 1e-5
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    written = load_file(tmp_path / "anew" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in written.items())
    assert HuggingFaceSource(tmp_path / "anew").config.mtp.mtp_num_layers == 1


def test_the_mtp_module_of_nemotron_3_comes_and_goes(tmp_path: Path) -> None:
    """transformers ignores the module, whose two layers are one of ours."""
    kinds = {"layers_block_type": ["linear_attention", "full_attention", "moe"], "num_nextn_predict_layers": 1}
    model = save_model("nemotron_h_latent", tmp_path / "model", **kinds)
    fields, layers = {"enorm": (48,), "hnorm": (48,), "eh_proj": (48, 96)}, ("mtp.layers.0.", "mtp.layers.1.")

    def add(values: dict[str, torch.Tensor]) -> None:
        for number, layer in enumerate(layers, 1):
            before = f"backbone.layers.{number}."
            values |= {
                name.replace(before, layer): value.clone() for name, value in values.items() if name.startswith(before)
            }
        generator = torch.Generator().manual_seed(5)
        for name, shape in fields.items():
            values[f"{layers[0]}{name}.weight"] = torch.randn(shape, generator=generator)
        values[f"{layers[1]}final_layernorm.weight"] = torch.randn(48, generator=generator)

    rewrite(tmp_path / "model", add)
    source = HuggingFaceSource(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert source.config.mtp.mtp_num_layers == 1
    own = "model.mtp.layers.0."
    assert torch.equal(source.read(f"{own}final_layernorm.weight"), stored["mtp.layers.1.final_layernorm.weight"])
    assert torch.equal(
        source.read(f"{own}transformer_layer.pre_mlp_layernorm.weight"), stored["mtp.layers.1.norm.weight"]
    )
    tokens = tokens_of("nemotron_h_latent", 2, 40)
    assert differ(streamed_logits(source, tokens), their_logits(model, tokens)) <= 1e-5
    write_hugging_face(copy_of(source), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "model")
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    written = load_file(tmp_path / "anew" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in written.items())
    assert HuggingFaceSource(tmp_path / "anew").config.mtp.mtp_num_layers == 1


VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 48,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_position_embeddings": 4,
}
VISION_OF_GEMMA4 = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 4,
}


@pytest.mark.parametrize(
    ("kind", "is_stacked"),
    [
        *(("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)),
        *(("gemma4", False), ("gemma4_e2b", False)),
    ],
)
def test_the_language_model_of_a_model_with_a_vision_part_is_read(kind: str, is_stacked: bool, tmp_path: Path) -> None:
    """Published folders have a vision part, and their experts are stacked; what is written is the language model."""
    transformers = import_transformers()
    text, family = make_model(kind), KINDS[kind]["class"]
    config = getattr(transformers, f"{family}Config")(
        text_config=text.config.to_dict(),
        vision_config=VISION_OF_GEMMA4 if family == "Gemma4" else VISION,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "model")

    def stack(values: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.language_model.layers.{layer}.mlp.experts."
            experts = whole.model.language_model.layers[layer].mlp.experts
            for name in [name for name in values if name.startswith(prefix)]:
                del values[name]
            values[f"{prefix}gate_up_proj"] = experts.gate_up_proj.detach()
            values[f"{prefix}down_proj"] = experts.down_proj.detach()

    if is_stacked:
        rewrite(tmp_path / "model", stack)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert any(name.startswith(("model.visual.", "model.vision_tower.")) for name in stored)
    assert any(name.endswith("experts.gate_up_proj") for name in stored) == is_stacked
    source = HuggingFaceSource(tmp_path / "model")
    tokens = tokens_of(kind, 2, 40)
    assert differ(streamed_logits(source, tokens), their_logits(whole, tokens)) <= 1e-5
    loaded, written = LoadedModelSource(whole), tmp_path / "written"
    write_hugging_face(copy_of(source), written)
    again = HuggingFaceSource(written)
    assert again.family.model_type == f"{kind.removesuffix('_e2b')}_text"
    for name in source.tensors:
        assert torch.equal(source.read(name), loaded.read(name)), name
        assert torch.equal(source.read(name), again.read(name)), name


def test_keys_and_values_of_layers_that_use_those_of_others_are_not_read(tmp_path: Path) -> None:
    """Published folders have them, and transformers ignores them."""
    model = save_model("gemma4_e2b", tmp_path / "model")
    plain = HuggingFaceSource(tmp_path / "model")

    def add(values: dict[str, torch.Tensor]) -> None:
        for name in ("k_proj", "v_proj", "k_norm"):
            values[f"model.layers.4.self_attn.{name}.weight"] = values[f"model.layers.1.self_attn.{name}.weight"] + 1

    rewrite(tmp_path / "model", add)
    source, tokens = HuggingFaceSource(tmp_path / "model"), tokens_of("gemma4_e2b", 2, 40)
    assert source.tensors.keys() == plain.tensors.keys()
    assert differ(streamed_logits(source, tokens), their_logits(model, tokens)) <= 1e-5
    rewrite(tmp_path / "model", lambda values: values.update({"model.layers.1.self_attn.k_bias": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.self_attn\.k_bias"):
        HuggingFaceSource(tmp_path / "model")


def test_a_vision_model_without_the_settings_of_its_language_model_is_rejected() -> None:
    values = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    with pytest.raises(ConfigurationError, match=r"text_config is missing; Qwen3_5ForConditionalGeneration needs it$"):
        read_model(Settings(values, "config.json"))


def test_small_weights_of_a_norm_stored_with_an_offset_keep_the_bits_that_the_sum_has(tmp_path: Path) -> None:
    """Ours is stored minus one: differences below half a unit in the last place of one are rounded away."""
    save_model("qwen3_next", tmp_path / "model")
    source = copy_of(HuggingFaceSource(tmp_path / "model"))
    name = "model.decoder.layers.0.self_attention.out_norm.weight"
    small = torch.linspace(-1e-6, 1e-6, 14) * 0.97
    source.values[name] = small
    write_hugging_face(source, tmp_path / "again")
    result = HuggingFaceSource(tmp_path / "again")
    stored = load_file(tmp_path / "again" / "model.safetensors")["model.layers.0.linear_attn.norm.weight"]
    assert torch.equal(stored, 1 + small)
    assert not torch.equal(result.read(name), small)
    view = ExportedView(source, result.family, result.config)
    assert [each.name for each in compare_sources(view, result) if not each.is_equal] == []


def test_copies_of_the_embeddings_may_be_missing_but_not_differ(own: Path, tmp_path: Path) -> None:
    rewrite(own, lambda values: values.pop(f"{LAYER}embed_tokens.weight"))
    write_hugging_face(copy_of(HuggingFaceSource(own)), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(own)
    rewrite(own, lambda values: values[f"{LAYER}shared_head.head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight differs from lm_head\.weight"):
        HuggingFaceSource(own)


def test_further_layers_that_are_stated_and_not_there_are_none(own: Path) -> None:
    """As transformers writes the model: it keeps the number and leaves the layers out."""
    assert hugging_face_config(own).mtp.mtp_num_layers == 1
    rewrite(own, lambda values: [values.pop(name) for name in list(values) if name.startswith(LAYER)])
    assert hugging_face_config(own).mtp.mtp_num_layers is None
    assert HuggingFaceSource(own).config.mtp.mtp_num_layers is None


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Give a folder's linear weights 8 bits, and return what they stand for."""
    values, stored, expected = load_file(folder / "model.safetensors"), {}, {}
    for name, value in values.items():
        expected[name] = value.bfloat16()
        is_linear = (
            value.dim() == 2 and ".layers." in name and not name.endswith(("gate.weight", "shared_head.head.weight"))
        )
        if not is_linear or "embed" in name or "eh_proj" in name:
            stored[name] = expected[name]
            continue
        rows, columns = (-(-length // size) for length, size in zip(value.shape, BLOCK))
        factors = torch.rand(rows, columns) + 0.5
        spread = factors.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: len(value), : value.shape[1]]
        stored[name] = (value / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = factors
        expected[name] = (stored[name].float() * spread).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    edit_config(folder, lambda c: c.update(quantization_config=quantization, dtype="bfloat16", auto_map={"A": "b.C"}))
    return expected


def test_weights_of_8_bits_in_blocks_are_read_as_what_they_stand_for(own: Path, tmp_path: Path) -> None:
    expected = quantize(own)
    source = HuggingFaceSource(own)
    assert {info.dtype for info in source.tensors.values()} == {torch.bfloat16}
    name = "model.decoder.layers.1.mlp.experts.linear_fc1.weight"
    whole, part = source.read(name), source.read(name, Box((3, 7, 5), (2, 20, 30)))
    assert torch.equal(part, whole[3:5, 7:27, 5:35])
    write_hugging_face(source, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(plain) == set(expected)
    assert [name for name, value in plain.items() if not torch.equal(value, expected[name])] == []
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in written
    assert HuggingFaceSource(tmp_path / "plain").config == source.config


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_the_mtp_module_of_sparse_attention_has_an_indexer_and_rows_of_8_bits_keep_their_order(
    kind: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path / "model")
    add_mtp_module(tmp_path / "model")
    source = HuggingFaceSource(tmp_path / "model")
    assert source.config.mtp.mtp_num_layers == 1
    name = "model.mtp.layers.0.transformer_layer.self_attention.core_attention.indexer.linear_wq_b.weight"
    heads, width = source.config.mla.dsa_indexer_n_heads or 0, source.config.mla.dsa_indexer_head_dim or 0
    assert source.read(name).shape == (heads * width, 24)
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    again = load_file(tmp_path / "anew" / "model.safetensors")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    if kind == "deepseek_v32":
        theirs = stored[f"{LAYER}self_attn.indexer.wq_b.weight"].view(heads, width, 24)
        ours = source.read(name).view(heads, width, 24)
        assert torch.equal(ours[:, :8], theirs[:, 6:])
        assert torch.equal(ours[:, 8::2], theirs[:, :3])
        assert torch.equal(ours[:, 9::2], theirs[:, 3:6])
    assert {key for key, value in stored.items() if not torch.equal(again[key], value)} == set()
    expected = quantize(tmp_path / "model")
    edit_config(tmp_path / "model", lambda settings: settings.pop("auto_map"))
    write_hugging_face(HuggingFaceSource(tmp_path / "model"), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert {key for key, value in plain.items() if not torch.equal(value, expected[key])} == set()


def test_factors_that_are_missing_or_too_few_are_named(own: Path) -> None:
    quantize(own)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    rewrite(own, lambda values: values.update({f"{name}_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight_scale_inv has shape \[2, 2\], but .* \[7, 2\]"):
        HuggingFaceSource(own)
    rewrite(own, lambda values: values.pop(f"{name}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"in FP8, but its scales .*kv_b_proj\.weight_scale_inv are missing"):
        HuggingFaceSource(own)


SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 3}
"""Sizes that blocks of 32 divide."""


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_settings_that_are_left_out_are_those_of_the_configuration_class(tmp_path: Path) -> None:
    config = config_of(tmp_path, GPT_OSS)
    assert (config.kv_channels, config.num_query_groups, config.rotary_base) == (64, 2, 150000)
    assert (config.softmax_type, config.activation, config.glu_linear_offset) == ("learnable", "quick_geglu", 1.0)
    assert (config.activation_func_clamp_value, config.moe.moe_router_topk, config.moe.num_experts) == (7.0, 4, 8)
    assert config.layer_windows == (128, None, 128)
    assert (config.rope.rotary_scaling_factor, config.rope.yarn_correction_range_round_to_int) == (32.0, False)
    assert config.add_bias_linear
    assert config.has_qkv_bias
    nulls = config_of(tmp_path, GPT_OSS | {"head_dim": None, "num_key_value_heads": None})
    assert (nulls.kv_channels, nulls.num_query_groups) == (8, 6)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": False}, "attention_bias is false, but only true is supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, but only 1.702 is supported"),
        ({"swiglu_limit": None}, "swiglu_limit is null"),
        ({"rope_scaling": None}, "rope_scaling is null, which releases of transformers interpret differently"),
        ({"sliding_window": None}, "sliding_window is None; a positive integer is expected"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but the model has 8 experts"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", but only "silu" is supported'),
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


def quantize_to_4_bits(folder: Path) -> dict[str, torch.Tensor]:
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
    stored = quantize_to_4_bits(tmp_path / "model")
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
    stored = quantize_to_4_bits(tmp_path / "model")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = stored[f"{name}_scales"]
    scales.copy_(torch.arange(scales.numel()).remainder(255).view(scales.shape))
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    weight = HuggingFaceSource(tmp_path / "model").read("model.decoder.layers.0.mlp.experts.linear_fc1.weight")
    wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], scales).mT
    assert torch.equal(weight, torch.cat((wanted[:, ::2], wanted[:, 1::2]), dim=1))


def test_blocks_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_model("gpt_oss", tmp_path / "model", **SIZES)
    stored = quantize_to_4_bits(tmp_path / "model")
    name = "model.layers.1.mlp.experts.down_proj"
    spoiled: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{name}_scales": None}, r"in MXFP4, but its scales .*down_proj_scales are missing"),
        ({f"{name}_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}, r"down_proj_scales has shape \[3, 64, 2\]"),
        (
            {(f"{name}_scales"): torch.zeros(3, 64, 1)},
            r"down_proj_scales has dtype torch\.float32; torch\.uint8 is expected",
        ),
        (
            {f"{name}_blocks": torch.zeros(3, 64, 1, 8, dtype=torch.uint8)},
            ("four dimensions are expected, the last of size 16"),
        ),
        ({f"{name}_blocks": None, f"{name}_scales": None}, r"missing: .*experts\.down_proj"),
    ]
    for changes, problem in spoiled:
        values = {key: value for key, value in (stored | changes).items() if value is not None}
        save_file(values, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=problem):
            HuggingFaceSource(tmp_path / "model")


PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
SCALED = YARN | PLAIN | {"rope_type": "yarn"}


def test_only_layers_without_a_window_are_scaled(tmp_path: Path) -> None:
    older = config_of(tmp_path, OLMO3 | {"rope_theta": 500000.0, "rope_scaling": YARN})
    newer = {"full_attention": SCALED, "sliding_attention": PLAIN}
    assert config_of(tmp_path, OLMO3 | {"rope_parameters": newer}) == older
    assert older.layer_windows == (4096, 4096, 4096, None, 4096)
    assert (older.rotary_base, older.rotary_base_local, older.stretches_positions) == (500000, 500000, True)
    plain = config_of(tmp_path, OLMO3)
    assert (plain.rotary_base, plain.rotary_base_local) == (500000, None)
    full = config_of(tmp_path, OLMO3 | {"rope_scaling": YARN, "layer_types": ["full_attention"] * 5})
    assert (full.rotary_base_local, full.window_size) == (None, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_theta": 10000.0}, "set rope_parameters with a rope_theta for sliding_attention"),
        ({"rope_parameters": PLAIN}, "it has neither full_attention nor sliding_attention"),
        ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": SCALED}}, 'rope_type is "yarn"'),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries, but the model has 5 layers"),
    ],
)
def test_settings_that_mean_another_model_are_refused_of_olmo3(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(tmp_path, OLMO3 | changes)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


OLMO3_VARIANTS: dict[str, dict[str, Any]] = {
    "tied, heads of their own": {"tie_word_embeddings": True, "num_key_value_heads": 6, "head_dim": 10},
    "two bases": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }
    },
    "windows alone": {"layer_types": ["sliding_attention"] * 3},
}


@pytest.mark.parametrize("name", OLMO3_VARIANTS)
def test_unusual_models_come_and_go_of_olmo3(name: str, tmp_path: Path) -> None:
    model = save_model("olmo3", tmp_path / "model", **OLMO3_VARIANTS[name])
    tokens = tokens_of("olmo3", 2, 200)
    expected, source = their_logits(model, tokens), copy_of(HuggingFaceSource(tmp_path / "model"))
    ours = streamed_logits(source, tokens)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    common = {name: value for name, value in source.common.items() if name != "hugging_face"}
    write_hugging_face(MemorySource(source.values, common, source.folder), tmp_path / "anew")
    again = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "anew")
    assert torch.equal(their_logits(again, tokens), expected)
