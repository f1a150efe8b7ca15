"""Values of ``args`` that make a model which computes something else with the same tensors: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config_base import IDENTITY, field_specs
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig

SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "apply_residual_connection_post_layernorm": (),
    "multi_latent_attention": (),
    "num_experts": (),
    "quick_geglu": (),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (),
    "qk_l2_norm": (),
    "softmax_type": ("vanilla",),
    "no_rope_freq": (),
    "attention_output_gate": (),
    "experimental_attention_variant": (),
    "use_mup": (),
}
"""Arguments and their values that a model here can have; absent, None and False always are."""


_SPELLED_OTHERWISE = ("window_size", "window_attn_skip_freq")


def flags_without_argument(model: GPTConfig) -> list[str]:
    """Return, as they are typed, the flags that make a model which ``args`` cannot describe."""
    config_class: type = type(model)
    specs = (spec for spec in field_specs(config_class) if spec.options.role in IDENTITY and spec.options.cli)
    return [
        spec.typed(getattr(model, spec.name))
        for spec in specs
        if not spec.options.in_args
        and spec.name not in _SPELLED_OTHERWISE
        and getattr(model, spec.name) != spec.default
    ]


def check_arguments(arguments: Mapping[str, Any], path: Path) -> None:
    """Refuse the ``args`` of a model that cannot be expressed.

    Raises:
        CheckpointError: so they are; the message names every such argument and its value.
    """
    wrong = [
        f"{name} {arguments[name]}"
        for name, values in SUPPORTED.items()
        if arguments.get(name) not in (None, False, *values)
    ]
    if wrong:
        raise CheckpointError(f"{path}: its args describe a model that is not supported: {', '.join(wrong)}")
