"""Record the Hugging Face folder that a checkpoint was imported from, so that the same folder can be written again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.hub import hub_origin
from megatron.checkpoint.formats.huggingface.settings import CONFIG_FILE, GENERATION_FILE, read_model_text
from megatron.core.errors import CheckpointError

MODEL_RECORD = "hugging_face"
"""Key of the record in a checkpoint's ``common`` section."""
HUB = "hub"
"""Key in the record of the name and the commit of a model from the Hub."""
MODEL_TYPE = "model_type"
"""Key of the architecture in the record of a folder that is not written again in its form."""


@dataclass(frozen=True)
class FileRecord:
    """Tensors of one safetensors file in the order of their bytes, and the metadata in its header."""

    tensors: tuple[str, ...]
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class ModelRecord:
    """Text of the small files of a model folder, and the tensors of each safetensors file.

    ``index`` and ``generation`` are None if the folder had no such file. ``hub`` is the name and the commit of a model
    from the Hub.
    """

    config: str
    generation: str | None
    index: str | None
    files: Mapping[str, FileRecord]
    hub: Mapping[str, str] | None = None

    def encode(self) -> dict[str, Any]:
        """Convert the record to JSON values."""
        return {
            "config": self.config,
            "generation_config": self.generation,
            "index": self.index,
            "files": {
                name: {
                    "metadata": None if file.metadata is None else dict(file.metadata),
                    "tensors": list(file.tensors),
                }
                for name, file in self.files.items()
            },
            **({} if self.hub is None else {HUB: dict(self.hub)}),
        }


def decode_record(common: Mapping[str, Any]) -> ModelRecord | None:
    """Decode the record in a ``common`` section; return None if the model was not imported from such a folder.

    Raises:
        CheckpointError: the record is not a result of `ModelRecord.encode`.
    """
    content = common.get(MODEL_RECORD)
    if content is None:
        return None
    if isinstance(content, Mapping) and content.keys() <= {HUB, MODEL_TYPE}:
        return None
    try:
        files = {
            str(name): FileRecord(tuple(file["tensors"]), file["metadata"]) for name, file in content["files"].items()
        }
        return ModelRecord(
            str(content["config"]), content["generation_config"], content["index"], files, content.get(HUB)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's record of its Hugging Face folder is damaged: {error!r}") from error


def recorded_model_type(common: Mapping[str, Any]) -> str | None:
    """Return the architecture in the record of a folder that is not written again in its form, if there is one."""
    content = common.get(MODEL_RECORD)
    found = content.get(MODEL_TYPE) if isinstance(content, Mapping) else None
    return found if isinstance(found, str) else None


def record_model(
    folder: Path, index: str | None, files: Mapping[str, FileRecord], is_dropped: Callable[[str], bool]
) -> ModelRecord:
    """Describe a model folder, without tensors that are not weights, since these are not written again.

    Raises:
        CheckpointError: a file cannot be read.
    """
    has_generation = (folder / GENERATION_FILE).is_file()
    kept = {
        name: FileRecord(tuple(tensor for tensor in file.tensors if not is_dropped(tensor)), file.metadata)
        for name, file in files.items()
    }
    return ModelRecord(
        config=read_model_text(folder, CONFIG_FILE),
        generation=read_model_text(folder, GENERATION_FILE) if has_generation else None,
        index=index,
        files=kept,
        hub=hub_origin(folder),
    )


def index_text(weight_map: Mapping[str, str], total_bytes: int, recorded: str | None) -> str:
    """Return the recorded index if its content is unchanged, otherwise a new one."""
    if recorded is not None:
        content = json.loads(recorded)
        size = (content.get("metadata") or {}).get("total_size", total_bytes)
        if content["weight_map"] == dict(weight_map) and size == total_bytes:
            return recorded
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
