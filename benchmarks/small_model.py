"""The model that benchmarks of single steps train: Llama's layers, small enough for two cores."""

from __future__ import annotations

from typing import Any

LENGTH, VOCABULARY = 512, 4096
SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "kv_channels": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "untie_embeddings_and_output_weights": True,
}
