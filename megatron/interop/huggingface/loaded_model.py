"""A transformers model that is in memory, as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import TensorInfo
from megatron.interop.huggingface.decoder_parts.experts import weights_as_in_files
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.families import read_model
from megatron.interop.huggingface.linked_tensors import LinkedTensors
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.weight_files import OUTPUT_LAYER, WeightEntry
from megatron.interop.untrained_model import untrained_common

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
            raise CheckpointError(f"{name}: the loaded weights are quantised; name the model's folder instead")
        self.family, self.config = read_model(Settings(settings, name, tensor_names=lambda: weights))
        if _OUTPUT_LAYER_IN_FILES in {link.foreign for link in self.family.links(self.config)}:
            # transformers 5 calls every model's output layer alike in memory, and renames it when it writes a folder.
            names = {OUTPUT_LAYER: _OUTPUT_LAYER_IN_FILES}
            weights = {names.get(key, key): weight for key, weight in weights.items()}
        names_of_experts = self.family.expert_names if isinstance(self.family, RotaryDecoderFamily) else None
        if self.config.num_experts is not None and names_of_experts is not None:
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
