"""A folder is opened as what its files make it, and answers for what it lacks of that format."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.stored_checkpoint import open_stored
from megatron.core.errors import DamagedCheckpointError
from megatron.core.parallel_state import describe_parallel_state


@pytest.mark.parametrize(
    ("there", "lacking"),
    [("mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt"), ("common.pt", ".metadata"), ("", "index.json")],
)
def test_a_folder_without_its_main_file_is_damaged_in_its_own_format(there: str, lacking: str, tmp_path: Path) -> None:
    if there:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).touch()
    with pytest.raises(DamagedCheckpointError, match=rf"{tmp_path / lacking}: No such file or directory"):
        open_stored(tmp_path, describe_parallel_state(0, 1))
