"""DeepSeek-V3's folders as they are published: layers of further tokens, and weights of 8 bits in blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.formats.huggingface.families import hugging_face_config
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from tests.unit.interop.huggingface.memory_source import MemorySource, copy_of
from tests.unit.interop.huggingface.tiny_models import edit_config, folder_bytes, save_model, their_logits, tokens_of

LAYER = "model.layers.3."
"""What the names of the layer behind the last of the tiny model begin with."""
BLOCK = (16, 12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a folder and its model, to which a layer of further tokens was added that transformers passes over."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    model = save_model("deepseek", folder)
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
    assert source.config.mtp_num_layers == 1
    assert source.read("model.mtp.layers.0.eh_proj.weight").shape == (48, 96)
    tokens = tokens_of("deepseek", 2, 80)
    expected = their_logits(model, tokens)
    assert (streamed_logits(source, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    write_hugging_face(copy_of(source), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(folder)
    write_hugging_face(without_record(copy_of(source)), tmp_path / "anew")
    assert folder_bytes(tmp_path / "anew")["model.safetensors"] == folder_bytes(folder)["model.safetensors"]
    assert json.loads((tmp_path / "anew" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_copies_of_the_embeddings_may_be_missing_but_not_differ(own: Path, tmp_path: Path) -> None:
    rewrite(own, lambda values: values.pop(f"{LAYER}embed_tokens.weight"))
    write_hugging_face(copy_of(HuggingFaceSource(own)), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(own)
    rewrite(own, lambda values: values[f"{LAYER}shared_head.head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight differs from lm_head\.weight"):
        HuggingFaceSource(own)


def test_further_layers_that_are_stated_and_not_there_are_none(own: Path) -> None:
    """As transformers writes the model: it keeps the number and leaves the layers out."""
    assert hugging_face_config(own).mtp_num_layers == 1
    rewrite(own, lambda values: [values.pop(name) for name in list(values) if name.startswith(LAYER)])
    assert hugging_face_config(own).mtp_num_layers is None
    assert HuggingFaceSource(own).config.mtp_num_layers is None


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


def test_factors_that_are_missing_or_too_few_are_named(own: Path) -> None:
    quantize(own)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    rewrite(own, lambda values: values.update({f"{name}_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight_scale_inv has the shape \[2, 2\]; .* \[7, 2\]"):
        HuggingFaceSource(own)
    rewrite(own, lambda values: values.pop(f"{name}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"of 8 bits, and .*kv_b_proj\.weight_scale_inv is missing"):
        HuggingFaceSource(own)
