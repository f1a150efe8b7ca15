"""What a checkpoint of Megatron's own format records of its run, without its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.interop.megatron_torch.common_state import model_of_tensors
from megatron.interop.megatron_torch.megatron_arguments import config_of_arguments
from megatron.interop.megatron_torch.rank_files import open_rank_files


def recorded_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration that ``args`` tell, or that the shapes of tensors do without ``args``.

    Raises:
        CheckpointError: a file is damaged, or holds something else.
    """
    ranks = open_rank_files(folder)
    try:
        arguments = ranks[0, 0].arguments
        config = config_of_arguments(arguments)
        config["model"] |= model_of_tensors(ranks, bool(arguments))
        return config
    finally:
        for rank in ranks.values():
            rank.close()
