"""A model of every Hugging Face family that was trained at TP 2 and PP 2 is the same model to transformers.

Three families by default, all of them in the long tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from tests.e2e.test_convert import run_converter
from tests.e2e.toy_run import TRAINING, toy_args
from tests.harness.forked_training import fork_training
from tests.unit.interop.huggingface.tiny_models import KINDS, folder_bytes, save_model

FLAGS = """
    --use-checkpoint-args --finetune --tokenizer-type NullTokenizer --seq-length 24 --train-iters 5
    --lr-warmup-iters 0 --mock-data --eval-iters 0 --distributed-backend gloo
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
"""
TRAINED = ("gemma3",)
"""Norms on both sides and windows; experts are in other default tests."""
OTHERS = (
    *("mixtral", "neox", "phi3", "qwen3", "mistral", "olmo2", "gemma2", "qwen3_moe", "olmoe", "deepseek"),
    *("gpt_oss", "olmo3", "smollm3"),
)


def test_what_cannot_be_exported_is_said_when_training_begins(tmp_path: Path) -> None:
    words = "--mock-data --train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --qk-layernorm"
    run = fork_training(toy_args(tmp_path, words, data=False)).check()
    first, _, rest = run.stdout.partition("checkpoints of this run cannot become Hugging Face models: ")
    assert " iteration " not in first
    assert "llama has no " in rest.splitlines()[0]
    assert "qk_layernorm True" in rest.splitlines()[0]
    run = fork_training(toy_args(tmp_path, words.replace("--qk-layernorm", ""), save=False, data=False)).check()
    assert "Hugging Face" not in run.stdout


@pytest.mark.parametrize("kind", [*TRAINED, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_what_five_steps_at_tp2_pp2_make_is_exported_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if kind.startswith("gemma"):
        changes |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True}
    if kind == "olmo3":
        changes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    if kind == "smollm3":
        changes |= {"no_rope_layers": [1, 0, 1, 0]}
    save_model(kind, tmp_path / "hf", **changes)
    run_converter(tmp_path / "hf", tmp_path / "native", "--loader hf --saver megatron")
    folders = f"--load {tmp_path / 'native'} --save {tmp_path / 'run'} --vocab-size {KINDS[kind]['vocab_size'] - 1}"
    fork_training([*TRAINING.split(), *FLAGS.split(), *folders.split()], 4).check()
    # Bits are compared, and logits with those of AutoModelForCausalLM: within 1e-5.
    lines = run_converter(tmp_path / "run", tmp_path / "back", "--saver hf --test-logits")
    assert any("transformers package" in line for line in lines)
    before, after = folder_bytes(tmp_path / "hf"), folder_bytes(tmp_path / "back")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"model.safetensors"}
    old, new = HuggingFaceSource(tmp_path / "hf"), HuggingFaceSource(tmp_path / "back")
    assert [name for name in old.tensors if old.read(name).equal(new.read(name))] == []
