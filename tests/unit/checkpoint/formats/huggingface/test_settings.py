"""Presets are the models that were published, and settings of transformers are honored or rejected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.huggingface.families import family_for, read_model
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.config.arguments import resolve_arguments
from megatron.core.config_base import with_fields
from megatron.core.errors import CheckpointError, ConfigurationError
from tests.unit.checkpoint.formats.huggingface.family_settings import GPT_OSS, MIXTRAL, OLMO3, OLMOE, QWEN3_MOE
from tests.unit.checkpoint.formats.huggingface.published_models import MODELS
from tests.unit.checkpoint.formats.huggingface.tiny_models import (
    KINDS,
    import_transformers,
    make_model,
    save_model,
    their_logits,
    tokens_of,
)

PUBLISHED_GPT_OSS = GPT_OSS | {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PUBLISHED = MODELS | {
    "mixtral-8x7b": MIXTRAL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": QWEN3_MOE
    | {
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 151936,
    },
    "olmoe-7b": OLMOE
    | {
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt-oss-20b": PUBLISHED_GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "gpt-oss-120b": PUBLISHED_GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
    "olmo3-7b": OLMO3
    | {
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
}
"""What decides the published models, as far as the presets have it too."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_model(preset: str) -> None:
    words = f"--model-preset {preset} --mock-data --train-iters 4 --lr 1e-4 --global-batch-size 96"
    model = resolve_arguments(words.split(), 1, needs_files=False).config.model
    family, published = read_model(Settings(PUBLISHED[preset], preset))
    lengths = {name: getattr(published, name) for name in ("vocab_size", "max_position_embeddings")}
    model = dataclasses.replace(model, **lengths)
    assert family_for(model, family) is family
    if preset == "deepseek-v2-lite":
        published = with_fields(published, rope_type="rope", rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    if preset == "deepseek-v3":
        # Its positions were stretched after pretraining, and Settings without files have no layer of MTP modules.
        published = with_fields(published, rope_type="rope", rotary_scaling_factor=1.0, mtp_num_layers=1)
    if preset in ("deepseek-v3.2", "glm-5"):
        published = with_fields(published, mtp_num_layers=1)
    if preset == "olmo3-7b":
        published = with_fields(published, rope_type=None, rotary_scaling_factor=1.0, rotary_base_local=None)
    assert model_features(model) == model_features(published)


ONE_OF_EACH = list({settings["class"]: kind for kind, settings in reversed(KINDS.items())}.values())
WITH_MORE_SETTINGS = (
    *("deepseek_v2_groups", "phi3_longrope", "gemma4_values", "gemma4_moe", "gemma4_e2b"),
    "nemotron_h_latent",
)
"""Kinds with settings that the first of their class does not use."""
UNSAID: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 16),
    "partial_rotary_factor": (0.5,),
    "rotary_pct": (0.5,),
    "rotary_emb_base": (500.0,),
    "rope_theta": (500.0,),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    "rope_parameters": ({"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},),
    "sliding_window": (7,),
    "use_sliding_window": (True,),
    "layer_types": (["full_attention", "sliding_attention", "full_attention"],),
    "query_pre_attn_scalar": (100,),
    "attn_logit_softcapping": (1.0,),
    "final_logit_softcapping": (1.0,),
    "attention_bias": (True,),
    "qkv_bias": (True,),
    "mlp_bias": (True,),
    "num_key_value_heads": (1,),
    "attention_multiplier": (0.5,),
    "logits_scaling": (2.0,),
    "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,),
    "scale_attn_weights": (False,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "clip_qkv": (0.1,),
    "tie_word_embeddings": (True, False),
}
"""Settings that a folder may have whether or not its own class names them."""
LISTS: dict[str, list[Any]] = {
    "attn_layer_indices": [0, 2],
    "layers_block_type": ["full_attention", "mlp", "linear_attention", "moe"],
    "mlp_multipliers": [0.5, 2.0],
    "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 0.8],
    "time_step_limit": [0.05, 0.2],
}
"""Other values of lists that a folder has."""
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu")
INVISIBLE = frozenset(
    (
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "_name_or_path"),
        *("quantization_config", "id2label", "label2id", "vocab_size"),
    )
)


def changes_of(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings with other values than they have: those of a folder, and some that it does not name."""
    for name, value in config.items():
        if name in INVISIBLE or name in UNSAID:
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int):
            yield from ((name, other) for other in (2 * value, value // 2) if other != value)
        elif isinstance(value, float):
            yield from ((name, other) for other in (value * 4, 0.5) if other != value)
        elif isinstance(value, str) and "act" in name:
            yield from ((name, other) for other in ACTIVATIONS if other != value)
        elif name in LISTS:
            yield name, LISTS[name]
        elif isinstance(value, list) and value:
            yield from ((name, other) for other in (value[::-1], value[:1] * len(value)) if other != value)
        elif value is None:
            yield from ((name, other) for other in (True, 8, 0.5))
    for name, values in UNSAID.items():
        yield from ((name, value) for value in values if config.get(name) != value)
    for name, value in config.items():
        if isinstance(value, dict) and name not in INVISIBLE:
            inner = {key: number for key, number in value.items() if isinstance(number, (int, float))}
            yield from ((name, {**value, key: other}) for key, number in inner.items() for other in (0, 2 * number))


def outcome_of(kind: str, config: dict[str, Any], name: str, value: Any, folder: Path) -> str:
    """Return ``same``, ``rejected``, ``invalid`` where transformers cannot take it, or how far logits are apart."""
    import transformers

    changed = json.dumps(config | {name: value})
    try:
        # What reads settings changes objects within them.
        folder.mkdir()
        (folder / "config.json").write_text(changed)
        model = make_model(kind, config=type(make_model(kind).config).from_pretrained(folder))
        model.save_pretrained(folder)
        (folder / "config.json").write_text(changed)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = tokens_of(kind, 2, 24) % model.config.vocab_size
        expected = their_logits(theirs, tokens)
    except Exception:  # noqa: BLE001 whatever transformers raises at a value that it cannot take
        return "invalid"
    if not expected.isfinite().all():
        return "invalid"
    try:
        ours = streamed_logits(HuggingFaceSource(folder), tokens)
    except (CheckpointError, ConfigurationError):
        return "rejected"
    apart = float((ours - expected).abs().max() / expected.abs().max())
    return "same" if apart <= 1e-4 else f"{apart:.2g} apart"


@pytest.mark.long
@pytest.mark.parametrize("kind", [*ONE_OF_EACH, *WITH_MORE_SETTINGS])
def test_a_changed_setting_changes_logits_as_in_transformers_or_is_rejected(kind: str, tmp_path: Path) -> None:
    import_transformers()
    save_model(kind, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    outcomes = {}
    for number, (name, value) in enumerate(changes_of(config)):
        folder = tmp_path / str(number)
        outcomes[f"{name}={json.dumps(value)}"] = outcome_of(kind, config, name, value, folder)
    assert {change: outcome for change, outcome in outcomes.items() if "apart" in outcome} == {}
    found = list(outcomes.values())
    assert found.count("same") > 5
    assert found.count("rejected") > 0
