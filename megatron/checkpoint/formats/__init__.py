"""Checkpoint formats; each is read tensor by tensor as a `CheckpointSource`, and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.checkpoint.formats.adapters import NO_ADAPTERS, MergedSource, PeftSource, write_peft
    from megatron.checkpoint.formats.native import NativeSource, TokenizerWriter, write_native
    from megatron.checkpoint.formats.peft_settings import base_of, read_settings
    from megatron.checkpoint.formats.torchtitan import TorchtitanSource, recorded_torchtitan_config
    from megatron.checkpoint.formats.torchtitan_settings import describe_told, idle_lines, told_specs

__getattr__ = lazy_exports(
    __name__,
    {
        "adapters": "MergedSource NO_ADAPTERS PeftSource write_peft",
        "native": "NativeSource TokenizerWriter write_native",
        "peft_settings": "base_of read_settings",
        "torchtitan": "TorchtitanSource recorded_torchtitan_config",
        "torchtitan_settings": "describe_told idle_lines told_specs",
    },
)
