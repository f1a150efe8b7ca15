"""What one family of Hugging Face models is: its names, its settings and where its values lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from megatron.core.config_base import IDENTITY, FieldSpec, field_specs
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
    config_class: type = type(config)
    specs = {spec.name: spec for spec in field_specs(config_class)}

    unused = _unused_features(config)

    def counts(spec: FieldSpec) -> bool:
        if spec.options.where is None or spec.options.role == "shape":  # a shape is the model's, used or not
            return True
        name, value = spec.options.where
        return getattr(config, name) == value and counts(specs[name])

    found = (spec for spec in specs.values() if spec.options.role in IDENTITY and counts(spec))
    names = (spec.options.seen_as or spec.name for spec in found)
    features = {name: getattr(config, name) for name in names if name not in unused}
    if config.multi_latent_attention:
        # Scores of latent attention grow beside plain positions too.
        features["mscale_all_dim"] = config.mscale_all_dim if config.scales_latent_scores else 0.0
    return features


_YARN = frozenset(
    (
        "rope_type",
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "yarn_correction_range_round_to_int",
    )
)


def _unused_features(config: GPTConfig) -> set[str]:
    """Return the features that make no difference to a model: shapes of layers that it has none of, and precision."""
    unused = {"moe_router_dtype"}
    if config.multi_latent_attention:
        unused |= {"kv_channels", "rotary_dim", "score_scalar", "rotary_interleaved"}
    # A factor of 1 leaves positions as they are; latent attention stretches them unless it is told not to.
    unused |= {"rope_type"} if config.stretches_positions else _YARN
    if config.num_experts is not None and all(config.moe_layers):
        unused.add("ffn_hidden_size")
    return unused


def dtype_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of a GPTConfig that say what the weights are stored in; float32 where nothing is said."""
    dtype = settings.dtype() or "float32"
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
