"""Low-rank adapters from a Hugging Face model to one: trained, resumed, generated with, merged, exported, imported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.config_changes import refuse_other_adapters
from megatron.checkpoint.formats.native import NativeSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import InputError
from tests.e2e.test_convert import run_converter
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import exact_figures, newest
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.checkpoint.formats.huggingface.tiny_models import make_model, save_model, their_logits, tokens_of

TRAINING = """
    --use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 100 --mock-data --seq-length 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --eval-iters 0
    --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo --log-interval 1
"""
SCALED = "--lora-rank 2 --lora-alpha 5"
PARTS = "--lora-target-modules q_proj v_proj o_proj up_proj"
LORA = f"{SCALED} {PARTS} --lora-dropout 0.1"


def train(load: Path, *more: str | Path, nproc: int = 1) -> ForkedRun:
    words = [*TRAINING.split(), "--load", str(load)]
    for item in more:
        words += [str(item)] if isinstance(item, Path) else item.split()
    return fork_training(words, nproc)


def begin(kind: str, folder: Path, lora: str) -> ForkedRun:
    """Train adapters of a random model for four iterations."""
    save_model(kind, folder / "hf")
    save = folder / "run"
    return train(folder / "hf", lora, "--finetune --save-interval 2 --save", save).check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def run(folder: Path) -> ForkedRun:
    return begin("llama31", folder, LORA)


@pytest.fixture(scope="module")
def merged(run: ForkedRun, folder: Path) -> Path:
    run_converter(folder / "run", folder / "merged", "--merge-lora")
    return folder / "merged"


def test_adapters_alone_are_trained_and_resumed(run: ForkedRun, folder: Path) -> None:
    source = NativeSource(newest(folder / "run"))
    sizes = {name: math.prod(info.global_shape) for name, info in source.tensors.items() if name.startswith("model.")}
    trained = sum(size for name, size in sizes.items() if "adapters" in name)
    assert f" > trainable parameters: {trained:,} of {sum(sizes.values()):,} (" in run.stdout
    base = load_file(folder / "hf" / "model.safetensors")
    for name in ("self_attention.linear_proj", "mlp.linear_fc2"):
        theirs = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}[name]
        values = source.read(f"model.decoder.layers.1.{name}.weight")
        assert torch.equal(values, base[f"model.layers.1.{theirs}.weight"])
    kinds = {name.split(".adapters.")[-1] for name in source.tensors if name.startswith("optimizer.")}
    assert kinds == {f"{part}.lora_{letter}" for part in ("q", "v", "all", "up") for letter in "AB"}
    assert source.read("model.decoder.layers.2.self_attention.linear_qkv.adapters.v.lora_B").any()
    source.close()
    resumed = train(folder / "run", "--ckpt-step 2 --metrics-jsonl", folder / "resumed.jsonl").check()
    assert exact_figures(resumed.iterations()) == exact_figures(run.iterations()[2:])


@pytest.mark.long
def test_adapters_are_resumed_at_another_layout(run: ForkedRun, folder: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --ckpt-step 2"
    resumed = train(folder / "run", layout, "--metrics-jsonl", folder / "tp2.jsonl", nproc=4).check()
    assert resumed.losses() == pytest.approx(run.losses()[2:], rel=1e-5)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith(" > trainable parameters: "))
    assert line in resumed.stdout.splitlines()


def test_generation_has_the_adapters_and_so_has_the_merged_model(
    folder: Path, merged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted, source = (NativeSource(newest(path)) for path in (folder / "run", merged))
    assert not [name for name in source.tensors if "adapters" in name]
    assert source.common["config"]["model"]["lora_rank"] == 0
    tokens = tokens_of("llama31", 2, 9)
    ours = streamed_logits(adapted, tokens)
    assert torch.allclose(streamed_logits(source, tokens), ours, atol=1e-5 * float(ours.abs().max()))
    before = their_logits(make_model("llama31"), tokens)
    assert not torch.allclose(before, ours, atol=1e-2 * float(ours.abs().max()))
    given = []
    for path in (folder / "run", merged):
        words = ["--load", path, "--prompt", "5 9 44 7", "--greedy", "--tokens-to-generate", "6"]
        given.append(call_tool(monkeypatch, capsys, *words))
    assert given[0] == given[1]
    assert given[0][0] == 0


def test_the_merged_model_becomes_a_folder_that_transformers_reads(run: ForkedRun, folder: Path) -> None:
    lines = run_converter(folder / "run", folder / "merged_hf", "--merge-lora --saver hf --test-logits")
    assert any("within" in line and "transformers package" in line for line in lines)
    assert (folder / "merged_hf" / "config.json").read_bytes() == (folder / "hf" / "config.json").read_bytes()


def test_adapters_go_to_pefts_format_and_back(run: ForkedRun, folder: Path) -> None:
    base = folder / "hf"
    run_converter(folder / "run", folder / "peft", f"--saver peft --base-model {base}")
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 5.0, "lora_dropout": 0.1}
    expected |= {"bias": "none", "fan_in_fan_out": False, "base_model_name_or_path": str(base)}
    expected |= {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}
    assert {name: settings[name] for name in expected} == expected
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    shapes = {name.split("layers.1.")[1]: list(t.shape) for name, t in tensors.items() if ".layers.1." in name}
    prefix = "base_model.model.model.layers."
    assert all(name.startswith(prefix) for name in tensors)
    assert len(tensors) == 3 * len(shapes)
    assert shapes == {
        "self_attn.q_proj.lora_A.weight": [2, 48],
        "self_attn.q_proj.lora_B.weight": [48, 2],
        "self_attn.v_proj.lora_A.weight": [2, 48],
        "self_attn.v_proj.lora_B.weight": [16, 2],
        "self_attn.o_proj.lora_A.weight": [2, 48],
        "self_attn.o_proj.lora_B.weight": [48, 2],
        "mlp.up_proj.lora_A.weight": [2, 48],
        "mlp.up_proj.lora_B.weight": [88, 2],
    }
    assert_logits_of("llama31", folder, tensors, 2.5)
    run_converter(folder / "peft", folder / "back", "--loader peft --saver native")
    trained, back = (NativeSource(path) for path in (newest(folder / "run"), folder / "back" / "release"))
    wanted = {name for name in trained.tensors if name.startswith("model.")}
    assert set(back.tensors) == wanted
    assert all(torch.equal(trained.read(name), back.read(name)) for name in wanted)
    metrics = ("--metrics-jsonl", folder / "again.jsonl")
    again = [train(folder / name, f"--finetune {LORA}", *metrics).check().losses() for name in ("back", "peft")]
    assert again[0] == again[1]
    assert again[0][0] < run.losses()[0]


def assert_logits_of(kind: str, folder: Path, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Hold the checkpoint's logits against the base model with peft's sum of each layer worked out here."""
    model: Any = make_model(kind)
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            added = scale * tensors[name.replace("lora_A", "lora_B")] @ down
            module.weight.data += added.t() if kind == "gpt2" else added
    tokens = tokens_of(kind, 2, 9)
    source = NativeSource(newest(folder / "run"))
    ours, theirs = streamed_logits(source, tokens), their_logits(model, tokens)
    source.close()
    assert torch.allclose(ours, theirs, atol=2e-5 * float(theirs.abs().max()))


def test_fused_rows_have_one_adapter_here_and_the_layers_of_theirs_share_it(tmp_path: Path) -> None:
    begin("llama31", tmp_path, SCALED)
    run_converter(tmp_path / "run", tmp_path / "peft", "--saver peft")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0."
    downs = [tensors[f"{first}self_attn.{part}_proj.lora_A.weight"] for part in "qkv"]
    assert torch.equal(downs[0], downs[1])
    assert torch.equal(downs[0], downs[2])
    assert_logits_of("llama31", tmp_path, tensors, 2.5)


def test_gpt2_has_its_own_names_and_one_of_two_layers_with_one_name(tmp_path: Path) -> None:
    begin("gpt2", tmp_path, f"{SCALED} --lora-target-modules c_attn linear_fc2")
    run_converter(tmp_path / "run", tmp_path / "peft", "--saver peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["c_attn", "mlp.c_proj"]
    assert settings["fan_in_fan_out"] is True
    assert_logits_of("gpt2", tmp_path, load_file(tmp_path / "peft" / "adapter_model.safetensors"), 2.5)


@pytest.mark.long
def test_adapters_of_attention_and_mamba_are_exported(tmp_path: Path) -> None:
    begin("falcon_h1", tmp_path, SCALED)
    run_converter(tmp_path / "run", tmp_path / "peft", "--saver peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert {"q_proj", "o_proj", "in_proj", "out_proj"} <= {*settings["target_modules"]}
    assert_logits_of("falcon_h1", tmp_path, load_file(tmp_path / "peft" / "adapter_model.safetensors"), 2.5)


@pytest.mark.long
def test_adapters_of_attention_beside_experts_are_exported_and_merged(tmp_path: Path) -> None:
    begin("mixtral", tmp_path, f"{SCALED} --lora-target-modules q_proj v_proj o_proj")
    run_converter(tmp_path / "run", tmp_path / "peft", "--saver peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "v_proj", "o_proj"]
    assert_logits_of("mixtral", tmp_path, load_file(tmp_path / "peft" / "adapter_model.safetensors"), 2.5)
    lines = run_converter(tmp_path / "run", tmp_path / "merged", "--merge-lora --saver hf --test-logits")
    assert any("logits" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("mixtral", ""),
        ("qwen3_moe", "--lora-target-modules q_proj gate_proj down_proj"),
        ("olmoe", "--lora-target-modules linear_fc1"),
    ],
)
def test_adapters_of_experts_are_resumed_merged_and_exported(kind: str, targets: str, tmp_path: Path) -> None:
    first = begin(kind, tmp_path, f"{SCALED} {targets}")
    layout = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-step 2"
    resumed = train(tmp_path / "run", layout, "--metrics-jsonl", tmp_path / "ep2.jsonl", nproc=4).check()
    assert resumed.losses() == pytest.approx(first.losses()[2:], rel=1e-5)
    lines = run_converter(tmp_path / "run", tmp_path / "merged", "--merge-lora --saver hf --test-logits")
    assert any("within" in line and "transformers package" in line for line in lines)

    run_converter(tmp_path / "run", tmp_path / "peft", f"--saver peft --base-model {tmp_path / 'hf'}")
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    adapted = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")]
    assert any(".experts." in name for name in adapted)
    for name in adapted:
        added = 2.5 * adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        weights[f"{name.removeprefix('base_model.model.')}.weight"] += added
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == set(weights)
    for name, values in merged.items():
        assert torch.allclose(values, weights[name], atol=1e-6), name

    run_converter(tmp_path / "peft", tmp_path / "back", "--loader peft --saver native")
    trained, back = (NativeSource(path) for path in (newest(tmp_path / "run"), tmp_path / "back" / "release"))
    again = tmp_path / "again"
    run_converter(tmp_path / "back", again, "--saver peft")
    assert (again / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "peft" / "adapter_model.safetensors"
    ).read_bytes()
    tokens = tokens_of(kind, 2, 9)
    ours = streamed_logits(trained, tokens)
    assert torch.allclose(streamed_logits(back, tokens), ours, atol=1e-5 * float(ours.abs().max()))


def test_what_does_not_fit_is_refused_in_one_line(folder: Path, merged: Path, tmp_path: Path) -> None:
    other = train(folder / "run", f"--lora-alpha 6 {PARTS} --lora-rank 2 --metrics-jsonl", tmp_path / "m")
    assert other.statuses == (2,)
    assert (
        "contains LoRA adapters (--lora-rank 2 --lora-alpha 5.0 --lora-target-modules q_proj v_proj" in other.errors[0]
    )
    assert "but this run has --lora-rank 2 --lora-alpha 6.0 --lora-target-modules" in other.errors[0]
    assert "Traceback" not in other.errors[0]
    source = NativeSource(newest(folder / "run"))
    with pytest.raises(InputError, match=r"but this run has none; pass these flags, or merge the adapters into"):
        refuse_other_adapters(source.folder, source.common["config"], {"model": {"lora_rank": 0}})
    source.close()
    plain = train(merged, SCALED, "--no-load-optim --metrics-jsonl", tmp_path / "m")
    assert plain.statuses == (2,)
    assert "contains no LoRA adapters, but --lora-rank trains them; add --finetune" in plain.errors[0]
    with pytest.raises(InputError, match=r"contains LoRA adapters, which Hugging Face's format cannot store; add"):
        run_converter(folder / "run", tmp_path / "hf", "--saver hf")
    with pytest.raises(InputError, match=r"^--merge-lora: .* contains no LoRA adapters; omit it$"):
        run_converter(folder / "hf", tmp_path / "hf", "--loader hf --merge-lora")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama31", LORA),
        ("qwen_tied", SCALED),
        ("gpt2", f"{SCALED} --lora-target-modules c_attn c_proj c_fc"),
        ("gpt2", f"{SCALED} --lora-target-modules linear_qkv linear_proj"),
        ("mixtral", SCALED),
    ],
)
def test_peft_computes_the_same_logits(kind: str, lora: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    begin(kind, tmp_path, lora)
    run_converter(tmp_path / "run", tmp_path / "peft", "--saver peft")
    model = peft.PeftModel.from_pretrained(make_model(kind), tmp_path / "peft").eval()
    tokens = tokens_of(kind, 2, 9)
    source = NativeSource(newest(tmp_path / "run"))
    ours, theirs = streamed_logits(source, tokens), their_logits(model, tokens)
    source.close()
    assert torch.allclose(ours, theirs, atol=2e-5 * float(theirs.abs().max()))
    model.save_pretrained(tmp_path / "theirs")
    if kind == "mixtral":
        # It writes experts as transformers 5 holds them: in one tensor, with ranks of their own.
        with pytest.raises(InputError, match=r"rank_pattern .* \(only \{\} can be read\)"):
            run_converter(tmp_path / "theirs", tmp_path / "b", f"--loader peft --base-model {tmp_path / 'hf'}")
        return
    # What peft writes is read as it writes it.
    run_converter(
        tmp_path / "theirs", tmp_path / "back", f"--loader peft --saver native --base-model {tmp_path / 'hf'}"
    )
    back = NativeSource(tmp_path / "back" / "release")
    assert torch.allclose(streamed_logits(back, tokens), theirs, atol=2e-5 * float(theirs.abs().max()))
    back.close()
