"""4-bit base weights (QLoRA) from a Hugging Face model on: trained, resumed, moved to a layout, merged, and used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.formats.native import NativeSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.checkpoint.inspection import inspect_checkpoint
from tests.e2e.test_convert import run_converter
from tests.e2e.test_low_rank_adapters import train
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import exact_figures, newest
from tests.harness.forked_training import ForkedRun
from tests.unit.checkpoint.formats.huggingface.tiny_models import KINDS, save_model, tokens_of

SCALED = "--lora-rank 4 --lora-alpha 8 --lr 2e-3"
QLORA = f"{SCALED} --lora-base-quantization nf4"
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
LAYER = "decoder.layers.1.self_attention.linear_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "llama31", KINDS["llama31"] | WIDE)
        save_model("llama31", folder / "hf")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> ForkedRun:
    save = folder / "run"
    return train(folder / "hf", QLORA, "--train-iters 8 --finetune --save-interval 4 --save", save).check()


def test_a_run_resumes_bitwise_with_its_flags_only(run: ForkedRun, folder: Path) -> None:
    steps = "--lr 2e-3 --train-iters 8 --ckpt-step 4 --metrics-jsonl"
    resumed = train(folder / "run", steps, folder / "resumed.jsonl").check()
    assert exact_figures(resumed.iterations()) == exact_figures(run.iterations()[4:])
    refused = train(
        folder / "run", "--lr 2e-3 --lora-base-quantization fp4 --train-iters 8", "--metrics-jsonl", folder / "no"
    )
    assert refused.statuses == (2,)
    assert "--lora-base-quantization nf4), but this run has" in refused.errors[0]


def test_a_checkpoint_has_codes_instead_of_weights(run: ForkedRun, folder: Path) -> None:
    source = NativeSource(newest(folder / "run"))
    assert f"model.{LAYER}" not in source.tensors
    codes = source.tensors[f"model.{LAYER}.codes"]
    assert (codes.global_shape, codes.dtype) == ((128, 64), torch.uint8)
    assert "model.embedding.word_embeddings.weight" in source.tensors
    adapters = sum(
        info.num_elements for name, info in source.tensors.items() if name.startswith("model.") and ".adapters." in name
    )
    source.close()
    base = sum(weight.numel() for weight in load_file(folder / "hf" / "model.safetensors").values())
    lines: list[str] = []
    inspect_checkpoint(folder / "run", log=lines.append)
    assert any(line.startswith(f"parameters: {base + adapters} in ") for line in lines)


@pytest.mark.long
def test_weights_are_the_same_at_another_layout(run: ForkedRun, folder: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    again = train(folder / "hf", QLORA, layout, "--finetune --train-iters 4 --save", folder / "tp2", nproc=4).check()
    assert again.losses() == pytest.approx(run.losses()[:4], rel=1e-5)
    ours, theirs = (NativeSource(newest(folder / name)) for name in ("run", "tp2"))
    parts = [name for name in ours.tensors if name.rpartition(".")[2].startswith(("codes", "absmax"))]
    assert len(parts) == 3 * 4 * 4
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in parts)


def test_merging_takes_the_dequantized_or_the_original_weights(
    run: ForkedRun, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_converter(folder / "run", folder / "merged", "--merge-lora")
    run_converter(folder / "run", folder / "original", f"--merge-lora --base-model {folder / 'hf'}")
    run_converter(folder / "run", folder / "peft", f"--saver peft --base-model {folder / 'hf'}")
    adapted, merged, original = (NativeSource(newest(folder / name)) for name in ("run", "merged", "original"))
    assert merged.common["config"]["model"]["lora_base_quantization"] is None
    tokens = tokens_of("llama31", 2, 9)
    ours = streamed_logits(adapted, tokens)
    assert torch.allclose(streamed_logits(merged, tokens), ours, atol=1e-5 * float(ours.abs().max()))
    down, up = (adapted.read(f"model.{LAYER.removesuffix('weight')}adapters.all.lora_{letter}") for letter in "AB")
    base = load_file(folder / "hf" / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    assert torch.allclose(original.read(f"model.{LAYER}"), base + 2.0 * up @ down, atol=1e-7)
    assert not torch.allclose(merged.read(f"model.{LAYER}"), original.read(f"model.{LAYER}"), atol=1e-4)
    exported = load_file(folder / "peft" / "adapter_model.safetensors")
    assert torch.equal(exported["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"], down)
    given = []
    for name in ("run", "merged"):
        words = ["--load", folder / name, "--prompt", "5 9 44 7", "--greedy", "--tokens-to-generate", "6"]
        given.append(call_tool(monkeypatch, capsys, *words))
    assert given[0] == given[1]
    assert given[0][0] == 0
