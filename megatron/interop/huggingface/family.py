"""What one family of Hugging Face models is: its names, its settings and where its values lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink


class Family(Protocol):
    """Translate the settings and the tensor names of one kind of model."""

    @property
    def model_type(self) -> str:
        """Return the family's name in config.json."""

    @property
    def architecture(self) -> str:
        """Return the class of the language model in config.json."""

    @property
    def base_prefix(self) -> str:
        """Return what all tensor names but the output layer's begin with; files of the bare model leave it out."""

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe; what is not supported is noted in the settings."""

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of such a model, as far as the family can express them; ids of tokens are left out."""

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in the family's own model; a tied output layer has none."""

    def is_buffer(self, name: str) -> bool:
        """Tell whether older files hold this tensor although it is no weight."""


def model_features(config: GPTConfig) -> dict[str, Any]:
    """Return everything of a configuration that decides which tensors a model has and what it computes.

    Two models are the same exactly where these are; dropout, initialization, layout and dtype do not count.
    """
    names = [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "kv_channels",
        "normalization",
        "norm_epsilon",
        "apply_layernorm_1p",
        "qk_layernorm",
        "activation",
        "add_bias_linear",
        "has_qkv_bias",
        "vocab_size",
        "max_position_embeddings",
        "position_embedding_type",
        "untie_embeddings_and_output_weights",
    ]
    if config.position_embedding_type == "rope":
        names += ["rotary_dim", "rotary_base", "rotary_interleaved", "rotary_seq_len_interpolation_factor"]
        names += ["use_rope_scaling"]
        if config.use_rope_scaling:
            names += [
                "rope_scaling_factor",
                "rope_scaling_low_freq_factor",
                "rope_scaling_high_freq_factor",
                "rope_scaling_original_max_position_embeddings",
            ]
    return {name: getattr(config, name) for name in names}


def dtype_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of a GPTConfig that say what the weights are stored in; float32 where nothing is said."""
    dtype = settings.dtype() or "float32"
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
