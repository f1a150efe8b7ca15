"""Hugging Face → ours → Hugging Face gives the same bytes, for models that transformers made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.formats.huggingface import linked_tensors, model_export
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.native import NativeSource, write_native
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from tests.unit.checkpoint.formats.huggingface.tiny_models import KINDS, MemorySource, copy_of, folder_bytes, save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model folder of every kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        save_model(kind, folder / kind)
    return folder


def through_native(folder: Path, run: Path) -> NativeSource:
    """Write a model as a native checkpoint and open that: what is read back comes from its files alone."""
    source = HuggingFaceSource(folder)
    native = NativeSource(write_native(source, run, "release"))
    source.close()
    return native


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_the_same(models: Path, tmp_path: Path, kind: str) -> None:
    write_hugging_face(through_native(models / kind, tmp_path / "native"), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(models / kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "native"]


@pytest.mark.parametrize("kind", ["gpt2", "llama31"])
def test_tensors_that_are_read_in_many_parts_are_the_same(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in (linked_tensors, model_export):
        monkeypatch.setattr(module, "MAX_SHARD_BYTES", 500)
    write_hugging_face(copy_of(HuggingFaceSource(models / kind)), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(models / kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_with_an_index_are_the_same_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model("llama31", tmp_path / "model", dtype=dtype, max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    write_hugging_face(copy_of(HuggingFaceSource(tmp_path / "model")), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "model")


def without_record(source: MemorySource) -> MemorySource:
    """Forget where the model came from, as training does."""
    common = {name: value for name, value in source.common.items() if name != "hugging_face"}
    return MemorySource(source.values, common, source.folder)


# A Qwen3.5 model with experts of our own is written as Qwen3-Next, which computes the same.
@pytest.mark.default(9)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3_5_moe"])
def test_a_model_of_our_own_gets_files_that_transformers_reads(models: Path, tmp_path: Path, kind: str) -> None:
    """The weights' file is again the same; config.json is new, and describes the same model to transformers."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: requirements/dev.txt has it"
    )
    write_hugging_face(without_record(copy_of(HuggingFaceSource(models / kind))), tmp_path / "again")
    before, after = folder_bytes(models / kind), folder_bytes(tmp_path / "again")
    # Of architectures that compute the same, ours becomes the first one: GPT-J and Qwen3-Next. transformers does not
    # write the dense layers of Kimi Linear under their published names.
    if kind not in ("codegen", "qwen3_5_moe", "kimi_linear"):
        assert after["model.safetensors"] == before["model.safetensors"]
    tokens = torch.arange(90).remainder(KINDS[kind]["vocab_size"])[None]
    logits = []
    for folder in (models / kind, tmp_path / "again"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def test_a_large_model_of_our_own_is_spread_over_files(models: Path, tmp_path: Path) -> None:
    source = without_record(copy_of(HuggingFaceSource(models / "gpt2")))
    write_hugging_face(source, tmp_path / "again", max_file_bytes=60_000)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    values = load_file(models / "gpt2" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    assert sorted(index["weight_map"]) == sorted(values)
    again = HuggingFaceSource(tmp_path / "again")
    assert all(torch.equal(again.read(name), source.read(name)) for name in source.tensors)


@pytest.mark.parametrize("kind", ["gpt2", "qwen_untied"])
def test_any_box_is_that_part_of_the_whole(models: Path, kind: str) -> None:
    source = HuggingFaceSource(models / kind)
    for name, info in source.tensors.items():
        box = Box(tuple(n // 3 for n in info.global_shape), tuple((n + 1) // 2 for n in info.global_shape))
        before = source.files.bytes_read
        part = source.read(name, box)
        assert source.files.bytes_read - before == part.nbytes, name
        assert torch.equal(part, source.read(name)[box.slices]), name
        assert part.is_contiguous()
    source.close()


def rewrite(folder: Path, change: Any) -> None:
    """Change a folder's tensors."""
    values = load_file(folder / "model.safetensors")
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def own(models: Path, tmp_path: Path) -> Any:
    """Return a function that copies a model folder to be changed."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(models / kind, tmp_path / "model"))

    return copy


def test_names_without_their_prefix_and_a_second_tied_copy_come_back(own: Any, tmp_path: Path) -> None:
    folder = own("gpt2")
    rewrite(folder, lambda values: [values.update({k[12:]: values.pop(k)}) for k in list(values)])
    rewrite(folder, lambda values: values.update({"lm_head.weight": values["wte.weight"].clone()}))
    write_hugging_face(copy_of(HuggingFaceSource(folder)), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(folder)


def test_buffers_of_older_files_are_left_out(own: Any, tmp_path: Path) -> None:
    folder = own("gpt2")
    before = folder_bytes(folder)
    rewrite(folder, lambda values: values.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4).tril()}))
    write_hugging_face(copy_of(HuggingFaceSource(folder)), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == before


def test_a_tied_copy_that_differs_is_refused(own: Any) -> None:
    folder = own("qwen_tied")
    rewrite(folder, lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        HuggingFaceSource(folder)


def test_missing_and_unexpected_tensors_and_shapes_are_named(own: Any) -> None:
    folder = own("llama31")

    def change(values: dict[str, torch.Tensor]) -> None:
        del values["model.layers.1.mlp.up_proj.weight"]
        values["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        values["model.norm.weight"] = torch.ones(47)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceSource(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "model.norm.weight has shape [47], but config.json requires [48]" in message


def test_parts_of_one_tensor_must_share_a_dtype(own: Any) -> None:
    folder = own("llama31")
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(folder, lambda values: values.update({name: values[name].half()}))
    with pytest.raises(CheckpointError, match=rf"must have the same dtype: .*{name} torch\.float16"):
        HuggingFaceSource(folder)


def test_a_changed_model_is_not_written_with_the_old_settings(models: Path, tmp_path: Path) -> None:
    """As after training with a longer context: the record of the folder no longer describes the model."""
    source = copy_of(HuggingFaceSource(models / "llama31"))
    common = json.loads(json.dumps(source.common))
    common["config"]["model"]["rope_scaling_factor"] = 16.0
    write_hugging_face(MemorySource(source.values, common, source.folder), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["rope_scaling"]["factor"] == 16.0


def test_a_changed_model_keeps_its_architecture_if_that_can_express_it(models: Path, tmp_path: Path) -> None:
    """CodeGen computes what GPT-J computes, which a model of unknown origin becomes."""
    source = copy_of(HuggingFaceSource(models / "codegen"))
    common = json.loads(json.dumps(source.common))
    common["config"]["model"]["norm_epsilon"] = 1e-6
    write_hugging_face(MemorySource(source.values, common, source.folder), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["architectures"], written["layer_norm_epsilon"]) == (["CodeGenForCausalLM"], 1e-6)
    weights = "model.safetensors"
    assert folder_bytes(tmp_path / "again")[weights] == folder_bytes(models / "codegen")[weights]
    write_hugging_face(without_record(source), tmp_path / "anew")
    assert json.loads((tmp_path / "anew" / "config.json").read_text())["architectures"] == ["GPTJForCausalLM"]


def test_another_dtype_is_said_in_the_settings(models: Path, tmp_path: Path) -> None:
    source = copy_of(HuggingFaceSource(models / "llama31"))
    halves = MemorySource({name: v.bfloat16() for name, v in source.values.items()}, source.common, source.folder)
    write_hugging_face(halves, tmp_path / "again")
    before = json.loads((models / "llama31" / "config.json").read_text())
    after = json.loads((tmp_path / "again" / "config.json").read_text())
    assert after == before | {"dtype": "bfloat16"}


def test_a_source_that_lacks_a_tensor_leaves_nothing(models: Path, tmp_path: Path) -> None:
    source = copy_of(HuggingFaceSource(models / "gpt2"))
    source.tensors.pop("model.decoder.final_layernorm.bias")
    with pytest.raises(CheckpointError, match=r"model\.decoder\.final_layernorm\.bias is missing"):
        write_hugging_face(source, tmp_path / "again")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_leaves_nothing(models: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "config.json").is_file()
        raise CheckpointError("they differ")

    with pytest.raises(CheckpointError, match="they differ"):
        write_hugging_face(HuggingFaceSource(models / "gpt2"), tmp_path / "again", check=refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_touched(models: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    write_hugging_face(HuggingFaceSource(models / "gpt2"), tmp_path / "again")
    before = folder_bytes(tmp_path / "again")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        write_hugging_face(HuggingFaceSource(models / "qwen_tied"), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == before
