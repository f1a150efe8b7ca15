"""Tell the formats of checkpoint folders apart.

Importing this module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing.index import INDEX_FILE
from megatron.core.errors import CheckpointError
from megatron.core.object_store import ObjectPath, as_path
from megatron.interop.torch_dist.folder_files import BACKEND_FILE, COMMON_FILE, METADATA_FILE

CheckpointFormat = Literal["native", "torch", "torch_dist", "torchtitan", "peft", "hf"]

FORMAT_MARKS: tuple[tuple[str, CheckpointFormat], ...] = (
    (INDEX_FILE, "native"),
    ("mp_rank_*", "torch"),
    (COMMON_FILE, "torch_dist"),
    (METADATA_FILE, "torchtitan"),
    ("adapter_config.json", "peft"),
    ("config.json", "hf"),
)
"""Names of files, as patterns, and the format whose folders have them; the first that is there decides."""
FORMAT_NAMES: dict[CheckpointFormat, str] = {
    "native": "the native format",
    "torch": "Megatron's torch format",
    "torch_dist": "Megatron's torch_dist format",
    "torchtitan": "torchtitan's format",
    "peft": "peft's format",
    "hf": "Hugging Face's format",
}


def detect_format(folder: str | Path) -> CheckpointFormat | None:
    """Return the format of a folder that holds the files of one checkpoint, or None where there are none."""
    folder = as_path(folder)
    for pattern, name in FORMAT_MARKS:
        if next(folder.glob(pattern), None) is not None:
            # Both are written by torch.distributed.checkpoint; the one of Megatron has another file that says so.
            return "torch_dist" if name == "torchtitan" and (folder / BACKEND_FILE).exists() else name
    return None


def refuse_objects(folder: Path, found: CheckpointFormat | None) -> None:
    """Refuse a folder of an object store that is in another format than the native one.

    Raises:
        CheckpointError: it is.
    """
    if isinstance(folder, ObjectPath) and found not in ("native", None):
        raise CheckpointError(
            f"{folder} is in {FORMAT_NAMES[found]}, and only {FORMAT_NAMES['native']} is read from an object store; "
            "copy the folder to a file system first"
        )
