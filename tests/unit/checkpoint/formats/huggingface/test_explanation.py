"""``megatron convert --explain-family``: which family reads a folder, and what keeps the others from it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.formats.huggingface.explanation import explain_family, model_flags
from megatron.checkpoint.formats.huggingface.families import FAMILIES, read_as
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.checkpoint.formats.huggingface.settings import ObservedValues, Settings
from megatron.cli import convert
from megatron.config.arguments import resolve_arguments
from tests.unit.checkpoint.formats.huggingface.family_settings import (
    COHERE2,
    DEEPSEEK,
    FALCON,
    GEMMA,
    GPT_OSS,
    GPTJ,
    LLAMA,
    LLAMA31_SCALING,
    NEO,
    QWEN,
    QWEN3_NEXT,
    YARN,
    config_of,
)

HELP = "docs/how_to_add.md#a-family-of-hugging-face-models shows how to add a family"


def explain(folder: Path, values: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(values))
    place, *rest = explain_family(folder)
    return [place.removeprefix(f"{folder / 'config.json'}: "), *rest]


def test_an_unknown_model_type_is_compared_with_the_most_similar_architecture(tmp_path: Path) -> None:
    values = QWEN | {"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9", "mixing": [3], "eos_token_id": 5}
    del values["rms_norm_eps"]
    weights = {"model.embed_tokens.weight", "model.layers.0.mixer.gain", "model.layers.1.mixer.gain"}
    save_file({name: torch.zeros(2) for name in weights}, tmp_path / "model.safetensors")
    first, same, unknown, missing, of_folder, of_family, last = explain(tmp_path, values)
    assert first == "Qwen9ForCausalLM is not supported; the most similar supported architecture is Qwen2ForCausalLM"
    assert same == (
        '  same: hidden_act "silu", hidden_size 48, intermediate_size 88, max_position_embeddings 512, '
        "num_attention_heads 6, num_hidden_layers 3, num_key_value_heads 2, vocab_size 101"
    )
    assert unknown == "  unknown to Qwen2ForCausalLM: mixing [3]"
    assert missing.startswith("  missing, Qwen2ForCausalLM would assume: attention_dropout 0.0, ")
    assert "rms_norm_eps 1e-06" in missing
    assert of_folder == "  tensors that only the folder has: layers.N.mixer.gain"
    assert of_family.startswith("  tensors that only Qwen2ForCausalLM has: layers.N.input_layernorm.weight, ")
    assert last == HELP


def test_a_setting_that_the_most_similar_architecture_needs_is_missing(tmp_path: Path) -> None:
    values = LLAMA | {"architectures": ["NewForCausalLM"], "model_type": "llama9"}
    del values["vocab_size"]
    assert "  missing: vocab_size" in explain(tmp_path, values)


def test_unsupported_settings_of_a_supported_architecture_are_those_that_reading_rejects(tmp_path: Path) -> None:
    changes = {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "mixing": 3}
    first, same, *others = explain(tmp_path, LLAMA | changes)
    assert first == "LlamaForCausalLM is supported, but not with these settings"
    assert "partial_rotary_factor" not in same
    assert others == [
        "  differs: partial_rotary_factor is 0.5, but only 1.0 is supported: partial rotary embeddings are not "
        "supported",
        "  differs: rope_scaling: rope_type 'dynamic' is not supported; supported types are default, linear, llama3, "
        "yarn, longrope",
        "  unknown to LlamaForCausalLM: mixing 3",
    ]


SUPPORTED = [
    LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA31_SCALING},
    NEO,
    GPTJ | {"n_embd": 88, "n_head": 2, "rotary_dim": 30},
    DEEPSEEK | {"rope_scaling": YARN},
    GPT_OSS,
    COHERE2,
    QWEN3_NEXT,
]


@pytest.mark.parametrize("values", SUPPORTED, ids=lambda values: values["model_type"])
def test_the_flags_of_a_supported_folder_make_the_same_model(tmp_path: Path, values: dict[str, Any]) -> None:
    first, *_, flags = explain(tmp_path, values)
    assert first == f"{values['architectures'][0]} is supported (family {values['model_type']})"
    assert flags.startswith("flags: ")
    config = config_of(tmp_path, values)
    words = shlex.split(flags.removeprefix("flags: "))
    assert words == shlex.split(" ".join(model_flags(config)))
    run = f"--mock-data --train-iters 4 --lr 1e-4 --micro-batch-size 1 --seq-length {config.max_position_embeddings}"
    model = resolve_arguments([*words, *run.split()], 1, needs_files=False).config.model
    assert model_features(dataclasses.replace(model, vocab_size=config.vocab_size)) == model_features(config)


def test_settings_that_a_supported_architecture_does_not_have_are_told(tmp_path: Path) -> None:
    lines = explain(tmp_path, GPTJ | {"mixing": 3})
    assert lines[1] == "  ignored, since GPTJForCausalLM has no such setting: mixing 3"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_family_reads_only_settings_that_it_names(family: Any) -> None:
    """A family that copies all settings would seem to know all of them."""
    for base in (LLAMA, GEMMA | {"rope_scaling": None}, FALCON):
        values = ObservedValues(base | {"mixing": 3})
        read_as(family, Settings(values, "config.json"))
        assert "mixing" not in values.read
        assert "vocab_size" in values.read


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{", "", "config.json is not valid JSON"),
        ("[1]", "", "config.json contains a JSON list; an object is expected"),
        (None, "", "it has no config.json"),
        ("{}", "--save-dir x", "--explain-family converts nothing and takes no other flag; omit --save-dir"),
    ],
)
def test_a_damaged_folder_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    try:
        status = convert.main(["--explain-family", str(tmp_path), *words.split()])
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1)
    assert message in said.err


def test_the_command_prints_the_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert convert.main([f"--explain-family={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines() == explain_family(tmp_path)
