"""GPT models: GPT-2, Llama, Qwen and related families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.models.gpt.chunk_parameters import ChunkParameter, gathered_units
    from megatron.core.models.gpt.gpt_config import (
        HYBRID_FIELDS,
        STRETCH_FIELDS,
        GPTConfig,
        flags_without_argument,
        hybrid_flags_without_argument,
        padded_vocab_size,
    )
    from megatron.core.models.gpt.gpt_model import GPTEmbedding, GPTModel

__getattr__ = lazy_exports(
    __name__,
    {
        "chunk_parameters": "ChunkParameter gathered_units",
        "gpt_config": (
            "GPTConfig HYBRID_FIELDS STRETCH_FIELDS flags_without_argument hybrid_flags_without_argument "
            "padded_vocab_size"
        ),
        "gpt_model": "GPTEmbedding GPTModel",
    },
)
