"""Open a checkpoint folder of any format, as a source of tensors or to fill a run's tensors on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.checkpoint_folder import FORMAT_MARKS, RELEASE, detect_format, refuse_objects
from megatron.checkpoint.checkpoint_source import CheckpointSource
from megatron.checkpoint.formats import NO_ADAPTERS, NativeSource, PeftSource, TorchtitanSource, base_of
from megatron.checkpoint.formats.huggingface import HuggingFaceSource
from megatron.checkpoint.formats.megatron import (
    CHECKPOINT_VERSION,
    MegatronTorchSource,
    SourceCheckpoint,
    TorchDistSource,
    index_of,
    open_torch_checkpoint,
)
from megatron.config import with_current_fields
from megatron.core.collectives import run_on_all_ranks
from megatron.core.config_base import IDENTITY, field_specs
from megatron.core.dist_checkpointing import (
    STRICT,
    CheckpointIndex,
    LoadedTensors,
    Progress,
    ShardedTensor,
    Strictness,
    check_run_state,
    ignore_progress,
    load_index,
    load_tensors,
)
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.object_store import as_path
from megatron.core.parallel_state import ParallelState


def open_checkpoint(
    folder: str | Path,
    verify: bool = True,
    vocab_size: int | None = None,
    told: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> CheckpointSource:
    """Open a folder with the files of one checkpoint in any format; without ``verify`` checksums are ignored.

    ``vocab_size`` is the number of tokens without padding, for a torch file that does not record it. ``told`` are the
    model settings that a torchtitan folder does not record. ``base`` is the base model's folder for PEFT adapters, by
    default the one that they name.

    Raises:
        CheckpointError: the folder has no checkpoint, or it is damaged.
    """
    folder = as_path(folder)
    found = detect_format(folder)
    refuse_objects(folder, found)
    if found == "native":
        return NativeSource(folder, verify)
    if found in ("torch", "torch_dist"):
        megatron_source = MegatronTorchSource if found == "torch" else TorchDistSource
        return _checked(megatron_source(folder, vocab_size), verify)
    if found == "torchtitan":
        return _checked(TorchtitanSource(folder, told), verify)
    if found == "peft":
        return PeftSource(folder, open_checkpoint(base_of(folder) if base is None else base, verify))
    if found == "hf":
        return HuggingFaceSource(folder)
    raise CheckpointError(
        f"{folder} contains no checkpoint: it has none of {', '.join(mark for mark, _ in FORMAT_MARKS)}"
    )


def _checked(source: MegatronTorchSource | TorchDistSource | TorchtitanSource, verify: bool) -> CheckpointSource:
    try:
        if verify:
            source.check_storages()
    except CheckpointError:
        source.close()
        raise
    return source


class StoredCheckpoint(Protocol):
    """Checkpoint opened by a run to load it; every rank opens the same folder."""

    @property
    def index(self) -> CheckpointIndex:
        """Return the checkpoint's index: names, shapes and dtypes of tensors, and the state that all ranks share."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the recorded fields of the run's configuration."""

    @property
    def version(self) -> float:
        """Return the ``checkpoint_version`` of Megatron-LM's files that corresponds to the order of QKV rows."""
        ...

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
        progress: Progress = ignore_progress,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place; see `load_tensors`."""


@dataclass(frozen=True, eq=False)
class NativeCheckpoint:
    """Folder of the native format, opened by a run."""

    folder: Path
    index: CheckpointIndex
    state: ParallelState
    verify: bool

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the configuration of the run that saved the checkpoint."""
        return with_current_fields(self.index.common["config"])

    @property
    def version(self) -> float:
        return CHECKPOINT_VERSION

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
        progress: Progress = ignore_progress,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place."""
        wanted = (tensors, namespaces, self.state, self.verify, allow_cast, strictness)
        return load_tensors(self.folder, self.index, *wanted, progress)


def is_release(folder: Path) -> bool:
    """Return whether a folder holds only a model, from which no run can resume."""
    return folder.name == RELEASE or detect_format(folder) in ("hf", "peft", "torchtitan")


def open_stored(
    folder: Path,
    state: ParallelState,
    verify: bool = True,
    model: Mapping[str, Any] | None = None,
    needs_streams: bool = True,
) -> StoredCheckpoint:
    """Open a folder of any format; collective.

    Without ``needs_streams``, a file that holds only random number streams may be lost.

    ``model`` is the run's model configuration. It is needed for Megatron-LM's files, which contain vocabulary padding
    without recording its size, and the oldest of which record nothing but shapes.

    Raises:
        CheckpointError: the checkpoint is damaged, or cannot be loaded. Raised on every rank.
    """
    found = detect_format(folder)
    refuse_objects(folder, found)
    if found in ("torch", "torch_dist"):
        return open_torch_checkpoint(folder, state, verify, model)
    if found == "torchtitan":
        return _open_torchtitan(folder, state, verify, model)
    if found == "hf":
        return _open_hugging_face(folder, state)
    if found == "peft":
        return _offer_model(run_on_all_ranks(lambda: open_checkpoint(folder, verify), state.world), state)
    index = load_index(folder, state.world, verify, needs_streams)
    check_run_state(folder, index.common)
    return NativeCheckpoint(folder, index, state, verify)


def _open_hugging_face(folder: Path, state: ParallelState) -> SourceCheckpoint:
    """Open a Hugging Face folder on every rank.

    Raises:
        InputError: the folder lacks files, or the model is not supported. Raised on every rank.
    """
    return _offer_model(run_on_all_ranks(lambda: HuggingFaceSource(folder), state.world), state)


def _open_torchtitan(
    folder: Path, state: ParallelState, verify: bool, model: Mapping[str, Any] | None
) -> SourceCheckpoint:
    """Open a torchtitan folder on every rank, verified as in `open_torch_checkpoint`.

    ``model`` is the run's model configuration, which provides the settings that the files do not record.

    Raises:
        CheckpointError: a file is damaged, or holds another model. Raised on every rank.
    """
    source = run_on_all_ranks(lambda: TorchtitanSource(folder, model), state.world)
    if verify:
        run_on_all_ranks(lambda: source.check_storages(state.world.rank, state.world.size), state.world)
    return _offer_model(source, state)


def _offer_model(source: CheckpointSource, state: ParallelState) -> SourceCheckpoint:
    """Wrap a model from which no run can resume; only its model configuration is known."""
    model = source.common["config"]["model"]
    fields = [spec.name for spec in field_specs(GPTConfig) if spec.options.role in IDENTITY]
    if model["lora_rank"]:
        fields += NO_ADAPTERS
    config = {"model": {name: model[name] for name in fields}}
    return SourceCheckpoint(source, index_of(source, {}), {}, state, config)
