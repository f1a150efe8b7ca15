"""Checkpoints of Megatron-LM in the ``torch`` and ``torch_dist`` formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.checkpoint.formats.megatron.common_state import recorded_torch_config
    from megatron.checkpoint.formats.megatron.rank_planner import CHECKPOINT_VERSION, FLOAT8_SCALING
    from megatron.checkpoint.formats.megatron.run_checkpoint import (
        SourceCheckpoint,
        TorchDistShare,
        TorchShare,
        index_of,
        open_torch_checkpoint,
        plan_torch_dist_share,
        plan_torch_share,
    )
    from megatron.checkpoint.formats.megatron.torch_dist_metadata import (
        BoxReader,
        StoredBox,
        StoredEntry,
        StoredMetadata,
        chunk_boxes,
        read_metadata,
    )
    from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource, recorded_torch_dist_config
    from megatron.checkpoint.formats.megatron.torch_dist_writer import carried_values, write_torch_dist
    from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch

__getattr__ = lazy_exports(
    __name__,
    {
        "common_state": "recorded_torch_config",
        "rank_planner": "CHECKPOINT_VERSION FLOAT8_SCALING",
        "run_checkpoint": (
            "SourceCheckpoint TorchDistShare TorchShare index_of open_torch_checkpoint plan_torch_dist_share "
            "plan_torch_share"
        ),
        "torch_dist_metadata": "BoxReader StoredBox StoredEntry StoredMetadata chunk_boxes read_metadata",
        "torch_dist_source": "TorchDistSource recorded_torch_dist_config",
        "torch_dist_writer": "carried_values write_torch_dist",
        "torch_format": "MegatronTorchSource write_megatron_torch",
    },
)
