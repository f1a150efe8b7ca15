"""OLMo 3's rotary positions, which differ between layers with a window and without, in both forms of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import ConfigurationError
from tests.unit.interop.huggingface.family_settings import OLMO3, YARN, config_of
from tests.unit.interop.huggingface.memory_source import MemorySource, copy_of
from tests.unit.interop.huggingface.tiny_models import import_transformers, save_model, their_logits, tokens_of

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
        ({"rope_theta": 10000.0}, "give rope_parameters with a rope_theta for sliding_attention"),
        ({"rope_parameters": PLAIN}, "it has neither full_attention nor sliding_attention"),
        ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": SCALED}}, 'rope_type is "yarn"'),
        ({"attention_bias": True}, "attention has no biases"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 layers, but there are 5"),
    ],
)
def test_settings_that_mean_another_model_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(tmp_path, OLMO3 | changes)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


VARIANTS: dict[str, dict[str, Any]] = {
    "tied, heads of their own": {"tie_word_embeddings": True, "num_key_value_heads": 6, "head_dim": 10},
    "two bases": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }
    },
    "windows alone": {"layer_types": ["sliding_attention"] * 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_unusual_models_come_and_go(name: str, tmp_path: Path) -> None:
    model = save_model("olmo3", tmp_path / "model", **VARIANTS[name])
    tokens = tokens_of("olmo3", 2, 200)
    expected, source = their_logits(model, tokens), copy_of(HuggingFaceSource(tmp_path / "model"))
    ours = streamed_logits(source, tokens)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    common = {name: value for name, value in source.common.items() if name != "hugging_face"}
    write_hugging_face(MemorySource(source.values, common, source.folder), tmp_path / "anew")
    again = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "anew")
    assert torch.equal(their_logits(again, tokens), expected)
