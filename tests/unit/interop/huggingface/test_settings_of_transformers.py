"""Settings that transformers honours are honoured here too, or rejected: each is changed, and logits are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.core.errors import CheckpointError, ConfigurationError
from tests.unit.interop.huggingface.tiny_models import (
    KINDS,
    import_transformers,
    make_model,
    save_model,
    their_logits,
    tokens_of,
)

ONE_OF_EACH = list({settings["class"]: kind for kind, settings in reversed(KINDS.items())}.values())
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
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu")
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
    for name, values in UNSAID.items():
        yield from ((name, value) for value in values if config.get(name) != value)


def outcome_of(kind: str, config: dict[str, Any], name: str, value: Any, folder: Path) -> str:
    """Return ``same``, ``rejected``, ``invalid`` where transformers cannot take it, or how far logits are apart."""
    import transformers

    changed = json.dumps(config | {name: value})
    try:
        # What reads settings changes objects within them.
        model = make_model(kind, config=type(make_model(kind).config).from_dict(json.loads(changed)))
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
@pytest.mark.parametrize("kind", ONE_OF_EACH)
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
