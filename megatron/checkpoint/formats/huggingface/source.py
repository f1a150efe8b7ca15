"""A Hugging Face model, in a folder or in memory, as a checkpoint source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from megatron.checkpoint import TensorInfo, untrained_common
from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily, weights_as_in_files
from megatron.checkpoint.formats.huggingface.families import read_model
from megatron.checkpoint.formats.huggingface.linked_tensors import LinkedTensors, StoredWeights
from megatron.checkpoint.formats.huggingface.model_record import MODEL_RECORD, FileRecord, record_model
from megatron.checkpoint.formats.huggingface.settings import (
    BlockFloat4,
    BlockFloat8,
    Settings,
    read_quantization,
    read_settings,
)
from megatron.checkpoint.formats.huggingface.tokenizer_files import copy_into_checkpoint, tokenizer_settings
from megatron.checkpoint.formats.huggingface.weight_files import (
    OUTPUT_LAYER,
    BlockFloat4Weights,
    BlockFloat8Weights,
    WeightEntry,
    WeightFiles,
)
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box


def _plain_weights(files: WeightFiles, quantization: BlockFloat8 | BlockFloat4 | None) -> StoredWeights:
    """Return the weights of files as the values that they stand for."""
    match quantization:
        case BlockFloat8():
            return BlockFloat8Weights(files, quantization)
        case BlockFloat4():
            return BlockFloat4Weights(files, quantization)
    return files


class HuggingFaceSource:
    """Read a Hugging Face model as the native format sees it (see `CheckpointSource`).

    Nothing but headers is read before a box is asked for.

    Raises:
        CheckpointError: the folder lacks files, or its tensors are not those of the model that config.json describes.
        ConfigurationError: config.json describes a model that is not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.family, self.config = read_model(settings)
        self.files = WeightFiles(self.folder)
        quantization = read_quantization(settings)
        self._linked = LinkedTensors(self.family, self.config, _plain_weights(self.files, quantization))
        self.tensors: Mapping[str, TensorInfo] = self._linked.tensors
        tokenizer = tokenizer_settings(self.folder, self.config.vocab_size)
        self.common: Mapping[str, Any] = untrained_common(self.config, tokenizer)
        if quantization is None:  # What was quantized is not written so again.
            files = {name: FileRecord(self.files.names_in(name), texts) for name, texts in self.files.metadata.items()}
            record = record_model(self.folder, self.files.index_text, files, self.family.is_buffer)
            self.common |= {MODEL_RECORD: record.encode()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: the file that holds it is missing or damaged.
        """
        return self._linked.read(name, box)

    def write_tokenizer(self, checkpoint: Path) -> bool:
        """Leave the tokenizer's record and files in ``checkpoint/tokenizer``; return whether the model has one.

        Raises:
            TokenizerError: it cannot be built.
        """
        return copy_into_checkpoint(self.folder, self.common["config"]["tokenizer"], checkpoint)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


_OUTPUT_LAYER_IN_FILES = "embed_out.weight"


class LoadedConfig(Protocol):
    """What is asked of a loaded model's configuration."""

    def to_json_string(self) -> str:
        """Return the text of its config.json."""


@runtime_checkable
class LoadedModel(Protocol):
    """What is asked of a loaded model: a ``PreTrainedModel`` of transformers has it."""

    config: LoadedConfig

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names."""


class LoadedWeights:
    """Hold the weights of a model in memory, on any device."""

    def __init__(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        self.folder = Path(name)
        self._weights = weights
        self.entries = {
            key: WeightEntry("", tuple(weight.shape), weight.dtype, start=0) for key, weight in weights.items()
        }
        if empty := next((key for key, weight in weights.items() if weight.is_meta), None):
            raise CheckpointError(f"{name}: {empty} has no values (it is on the meta device); load the model's weights")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor."""
        weight = self._weights[name]
        return weight[box.slices] if box.shape else weight


class LoadedModelSource:
    """Read a transformers model in memory as the native format sees it (see `CheckpointSource`).

    Raises:
        CheckpointError: the weights have no values, or are not those of the model that its configuration describes.
        ConfigurationError: the model is not supported.
    """

    def __init__(self, model: LoadedModel) -> None:
        name = type(model).__name__
        self.folder = Path(name)
        weights = model.state_dict()
        settings: dict[str, Any] = json.loads(model.config.to_json_string())
        # Both are told when transformers writes a folder; a model in memory may have been built or cast since.
        settings["architectures"] = [name]
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        if settings.get("quantization_config") is not None:
            raise CheckpointError(f"{name}: the loaded weights are quantized; name the model's folder instead")
        self.family, self.config = read_model(Settings(settings, name, tensor_names=lambda: weights))
        if _OUTPUT_LAYER_IN_FILES in {link.foreign for link in self.family.links(self.config)}:
            # transformers 5 calls every model's output layer alike in memory, and renames it when it writes a folder.
            names = {OUTPUT_LAYER: _OUTPUT_LAYER_IN_FILES}
            weights = {names.get(key, key): weight for key, weight in weights.items()}
        names_of_experts = self.family.expert_names if isinstance(self.family, RotaryDecoderFamily) else None
        if self.config.moe.num_experts is not None and names_of_experts is not None:
            weights = weights_as_in_files(weights, names_of_experts)
        self._linked = LinkedTensors(self.family, self.config, LoadedWeights(name, weights))
        self.tensors: Mapping[str, TensorInfo] = self._linked.tensors
        self.common: Mapping[str, Any] = untrained_common(self.config, {})

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU.

        Raises:
            KeyError: there is no tensor of this name.
        """
        return self._linked.read(name, box)

    def close(self) -> None:
        """Leave the model as it is: nothing was opened."""
