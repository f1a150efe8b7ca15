"""A checkpoint folder as loading sees it, whatever its format: what is in it, and how a run's tensors are filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.load import LoadedTensors, load_index, load_tensors
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strictness import STRICT, Strictness
from megatron.core.parallel_state import ParallelState
from megatron.interop.checkpoint_format import detect_format
from megatron.training.checkpointing.folder import RELEASE
from megatron.training.checkpointing.torch_format import open_hugging_face, open_torch_checkpoint


class StoredCheckpoint(Protocol):
    """Offer a checkpoint to a run that loads it; every rank holds one of the same folder."""

    @property
    def index(self) -> CheckpointIndex:
        """Return what the checkpoint holds: names, shapes and dtypes of tensors, and what all ranks share."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return what the checkpoint records of its run's configuration; other fields are unknown."""

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place; see `load_tensors`."""


@dataclass(frozen=True, eq=False)
class NativeCheckpoint:
    """Offer a folder of the native format."""

    folder: Path
    index: CheckpointIndex
    state: ParallelState
    verify: bool

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the configuration of the run that saved it."""
        config: Mapping[str, Any] = self.index.common["config"]
        return config

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place."""
        world = self.state.world
        return load_tensors(self.folder, self.index, tensors, namespaces, world, self.verify, allow_cast, strictness)


def is_release(folder: Path) -> bool:
    """Return whether a folder holds a model and no run that could go on."""
    return folder.name == RELEASE or detect_format(folder) == "hf"


def open_stored(
    folder: Path, state: ParallelState, verify: bool = True, model: Mapping[str, Any] | None = None
) -> StoredCheckpoint:
    """Open a folder of any format, collectively.

    ``model`` is the run's configuration of it: files of Megatron hold padding beside the vocabulary and do not say how
    much, and the oldest say nothing but shapes.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint that can be loaded. On every rank alike.
    """
    found = detect_format(folder)
    if found in ("torch", "torch_dist"):
        return open_torch_checkpoint(folder, state, verify, model)
    if found == "hf":
        return open_hugging_face(folder, state)
    return NativeCheckpoint(folder, load_index(folder, state.world, verify), state, verify)
