"""Open a checkpoint folder of any format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.core.object_store import as_path
from megatron.interop.adapters.peft_settings import base_of
from megatron.interop.adapters.peft_source import PeftSource
from megatron.interop.checkpoint_format import FORMAT_MARKS, detect_format, refuse_objects
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.huggingface.source import HuggingFaceSource
from megatron.interop.megatron_torch.megatron_torch_source import MegatronTorchSource
from megatron.interop.native.native_source import NativeSource
from megatron.interop.torch_dist.torch_dist_source import TorchDistSource
from megatron.interop.torchtitan.torchtitan_source import TorchtitanSource


def open_checkpoint(
    folder: str | Path,
    verify: bool = True,
    vocab_size: int | None = None,
    told: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> CheckpointSource:
    """Open a folder that holds the files of one checkpoint, of any format; without ``verify`` checksums are ignored.

    ``vocab_size`` is the number of tokens without padding, for a torch file that does not tell it; ``told`` is what a
    torchtitan folder does not say of its model; ``base`` is the folder of the model that adapters of peft are of, where
    it is not the one that they name.

    Raises:
        CheckpointError: there is no checkpoint in it, or it is damaged.
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
    raise CheckpointError(f"{folder} holds no checkpoint: no {', '.join(mark for mark, _ in FORMAT_MARKS)} is in it")


def _checked(source: MegatronTorchSource | TorchDistSource | TorchtitanSource, verify: bool) -> CheckpointSource:
    try:
        if verify:
            source.check_storages()
    except CheckpointError:
        source.close()
        raise
    return source
