"""Model settings that a torchtitan checkpoint does not record, which the user must pass.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config_base import FieldSpec, field_specs
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig

NEEDED = ("num_attention_heads", "rotary_base", "norm_epsilon", "max_position_embeddings")
"""Required fields, which the shapes of weights do not determine."""
TOLD = (*NEEDED, "use_rope_scaling", "rope_scaling_factor", "rotary_interleaved")
"""Fields that the shapes of weights do not determine; those after ``NEEDED`` have defaults."""


def told_specs() -> tuple[FieldSpec, ...]:
    """Return the field specs of ``TOLD``, from which commands generate flags."""
    config_class: type = GPTConfig
    specs = {spec.name: spec for spec in field_specs(config_class)}
    return tuple(specs[name] for name in TOLD)


def require_told(values: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return the fields of ``TOLD`` that are set in ``values``.

    Raises:
        CheckpointError: a required field is missing; the message lists all missing flags.
    """
    told = {name: values[name] for name in TOLD if values is not None and values.get(name) is not None}
    missing = [spec.flags[0] for spec in told_specs() if spec.name in NEEDED and spec.name not in told]
    if missing:
        raise CheckpointError(
            f"{folder} is a torchtitan checkpoint, which does not record {', '.join(missing)}; pass the values used in "
            "training (Llama 3: --rotary-base 500000 --norm-epsilon 1e-5), and --use-rope-scaling if the model uses "
            "RoPE scaling"
        )
    wrong = [spec.typed(told[spec.name]) for spec in told_specs() if spec.name in NEEDED and not told[spec.name] > 0]
    if wrong:
        raise CheckpointError(f"{folder}: {', '.join(wrong)}: a number above 0 is expected")
    return told


def describe_told(values: Mapping[str, Any], folder: Path) -> str:
    """Return a line that lists the model settings taken from flags."""
    flags = " ".join(spec.typed(values[spec.name]) for spec in told_specs() if _is_said(spec, values[spec.name]))
    return f"checkpoint {folder} is a torchtitan checkpoint, which does not record all model settings; assumed {flags}"


def idle_lines(told: Mapping[str, Any]) -> list[str]:
    """Return a line for each of these flags that has no effect, because another checkpoint format records the value."""
    return [
        f"{spec.typed(told[spec.name])} has no effect: the checkpoint determines it"
        for spec in told_specs()
        if told.get(spec.name) is not None
    ]


def _is_said(spec: FieldSpec, value: Any) -> bool:
    return spec.name in NEEDED or value != spec.default
