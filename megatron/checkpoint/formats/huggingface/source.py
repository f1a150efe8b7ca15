"""Hugging Face models, in a folder or in memory, as checkpoint sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from megatron.checkpoint import TensorInfo, untrained_common
from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.families import language_part, read_model
from megatron.checkpoint.formats.huggingface.hub import hub_origin
from megatron.checkpoint.formats.huggingface.linked_tensors import LinkedTensors, StoredWeights
from megatron.checkpoint.formats.huggingface.model_record import HUB, MODEL_RECORD, MODEL_TYPE, FileRecord, record_model
from megatron.checkpoint.formats.huggingface.separate_experts import with_separate_experts
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
    """Return the dequantized weights of files."""
    match quantization:
        case BlockFloat8():
            return BlockFloat8Weights(files, quantization)
        case BlockFloat4():
            return BlockFloat4Weights(files, quantization)
    return files


class HuggingFaceSource:
    """Native view of a Hugging Face model folder; implements `CheckpointSource`.

    Only headers are read before the first box is requested.

    Raises:
        CheckpointError: the folder lacks files, or its tensors do not match the model that config.json describes.
        ConfigurationError: the model in config.json is not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        settings = read_settings(self.folder)
        self.family, self.config = read_model(settings)
        self.files = WeightFiles(self.folder)
        quantization = read_quantization(settings)
        weights = _plain_weights(self.files, quantization)
        if isinstance(self.family, RotaryDecoderFamily) and self.family.expert_names is not None:
            weights = with_separate_experts(weights, self.family.expert_names)
        self._linked = LinkedTensors(self.family, self.config, weights)
        self.tensors: Mapping[str, TensorInfo] = self._linked.tensors
        tokenizer = tokenizer_settings(self.folder, self.config.vocab_size)
        self.common: Mapping[str, Any] = untrained_common(self.config, tokenizer)
        # Neither quantized weights nor stacked experts are written back in that form, and a vision part is not read.
        if weights is self.files and language_part(settings) is settings:
            files = {name: FileRecord(self.files.names_in(name), texts) for name, texts in self.files.metadata.items()}
            is_dropped = partial(self.family.is_buffer, config=self.config)
            record = record_model(self.folder, self.files.index_text, files, is_dropped)
            self.common |= {MODEL_RECORD: record.encode()}
        else:
            origin = hub_origin(self.folder)
            record_of_origin = {} if origin is None else {HUB: origin}
            self.common |= {MODEL_RECORD: {MODEL_TYPE: self.family.model_type, **record_of_origin}}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        return self._linked.read(name, box)

    def write_tokenizer(self, checkpoint: Path) -> bool:
        """Write the tokenizer's record and files to ``checkpoint/tokenizer``; return whether the model has a tokenizer.

        Raises:
            TokenizerError: the tokenizer cannot be built.
        """
        return copy_into_checkpoint(self.folder, self.common["config"]["tokenizer"], checkpoint)

    def close(self) -> None:
        self.files.close()


_OUTPUT_LAYER_IN_FILES = "embed_out.weight"


class LoadedConfig(Protocol):
    """Required interface of a loaded model's configuration."""

    def to_json_string(self) -> str:
        """Return the text of its config.json."""


@runtime_checkable
class LoadedModel(Protocol):
    """Required interface of a loaded model, which ``PreTrainedModel`` of transformers provides."""

    config: LoadedConfig

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by name."""


class LoadedWeights:
    """Weights of a model in memory, on any device."""

    def __init__(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        self.folder = Path(name)
        self._weights = weights
        self.entries = {
            key: WeightEntry("", tuple(weight.shape), weight.dtype, start=0) for key, weight in weights.items()
        }
        if empty := next((key for key, weight in weights.items() if weight.is_meta), None):
            raise CheckpointError(f"{name}: {empty} has no values (it is on the meta device); load the model's weights")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a slice of a tensor."""
        weight = self._weights[name]
        return weight[box.slices] if box.shape else weight


class LoadedModelSource:
    """Native view of a transformers model in memory; implements `CheckpointSource`.

    Raises:
        CheckpointError: the weights have no values, or do not match the model that its configuration describes.
        ConfigurationError: the model is not supported.
    """

    def __init__(self, model: LoadedModel) -> None:
        name = type(model).__name__
        self.folder = Path(name)
        weights = model.state_dict()
        settings: dict[str, Any] = json.loads(model.config.to_json_string())
        # transformers sets both only when it writes a folder; a model in memory may have been built or cast since.
        settings["architectures"] = [name]
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        if settings.get("quantization_config") is not None:
            raise CheckpointError(f"{name}: the loaded weights are quantized; pass the model's folder instead")
        self.family, self.config = read_model(Settings(settings, name, tensor_names=lambda: weights))
        if _OUTPUT_LAYER_IN_FILES in {link.foreign for link in self.family.links(self.config)}:
            # In memory transformers 5 uses one name for every model's output layer, and renames it when it writes a
            # folder.
            names = {OUTPUT_LAYER: _OUTPUT_LAYER_IN_FILES}
            weights = {names.get(key, key): weight for key, weight in weights.items()}
        if isinstance(self.family, RotaryDecoderFamily):
            weights = self.family.as_in_files(self.config, weights)
        self._linked = LinkedTensors(self.family, self.config, LoadedWeights(name, weights))
        self.tensors: Mapping[str, TensorInfo] = self._linked.tensors
        self.common: Mapping[str, Any] = untrained_common(self.config, {})

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor.

        Raises:
            KeyError: there is no tensor with this name.
        """
        return self._linked.read(name, box)

    def close(self) -> None:
        """Do nothing, since nothing was opened."""
