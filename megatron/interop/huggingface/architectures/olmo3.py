"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary positions are never scaled."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.olmo2 import Olmo2Family
from megatron.interop.huggingface.decoder_parts.layer_types import (
    FULL,
    SLIDING,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.interop.huggingface.decoder_parts.rope import read_frequencies, whole_base, write_rope
from megatron.interop.huggingface.settings import Settings


class Olmo3Family(Olmo2Family):
    """Translate OLMo 3 (``Olmo3ForCausalLM``)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    default_rotary_base = 500000.0

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the fields of the rotary positions of layers without a window; note those of the others.

        The newer form is an object for each kind of layer. The older one has one base, and its ``rope_scaling`` is of
        the layers without a window.
        """
        both = settings.inner("rope_parameters")
        if both is not None and not {FULL, SLIDING} & set(both.values):
            both.refuse(f"it has neither {FULL} nor {SLIDING}; give an object for each kind of layer")
        of_full = _merged(settings, both)
        if of_full is not None:
            of_full.require("partial_rotary_factor", 1.0, 1.0, "every channel of a head is rotated")
        return read_frequencies(settings, of_full, positions, settings.number("rope_theta", self.default_rotary_base))

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return what OLMo 2 has, the windows, and the base of the layers that have one."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        has_window = read_layer_types(settings, [(layer + 1) % 4 != 0 for layer in range(layers)])
        fields = super().own_fields(settings) | window_fields(settings, has_window, 4096)
        if "window_size" not in fields:
            return fields
        both, usual = settings.inner("rope_parameters"), self.default_rotary_base
        of_windows = None if both is None else both.inner(SLIDING)
        base = settings.number("rope_theta", usual)
        if of_windows is not None:
            of_windows.require("rope_type", "default", "default", "layers with a window have plain frequencies")
            of_windows.require("partial_rotary_factor", 1.0, 1.0, "every channel of a head is rotated")
        if of_windows is not None and of_windows.values.get("rope_theta") is not None:
            base = of_windows.number("rope_theta")
        elif base != usual:
            settings.refuse(
                f"rope_theta is {base}, which releases of transformers read differently for layers with a window; "
                f"give rope_parameters with a rope_theta for {SLIDING}"
            )
        full = Olmo3Family.read_rope(self, Settings(settings.values, settings.place), layers)
        whole = whole_base(settings, base, "the rope_theta of layers with a window")
        is_common = full == {"rotary_base": whole}
        return fields | {"rotary_base_local": None if is_common else whole}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model, with its rotary positions in both forms."""
        rope = write_rope(config)
        base = rope["rope_theta"]
        own = config.rotary_base if config.rotary_base_local is None else config.rotary_base_local
        return (
            super().write_settings(config)
            | written_layer_types(config)
            | {
                "rope_parameters": {
                    FULL: {"rope_theta": base, **(rope["rope_scaling"] or {"rope_type": "default"})},
                    SLIDING: {"rope_theta": float(own), "rope_type": "default"},
                }
            }
        )


def _merged(settings: Settings, both: Settings | None) -> Settings | None:
    """Return the rotary positions of layers without a window, to which an older object adds its values."""
    newer, older = None if both is None else both.inner(FULL), settings.inner("rope_scaling")
    if newer is None or older is None:
        return newer or older
    return Settings({**newer.values, **older.values}, newer.place, settings.problems)
