"""Write the low-rank adapters of a checkpoint as a folder that the peft package loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.disk import write_text
from megatron.core.errors import ConfigurationError
from megatron.core.sharding import Box
from megatron.interop.adapters.foreign_module import ForeignModule, foreign_modules, paired_rows
from megatron.interop.adapters.peft_settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron.interop.adapters.stored_adapter import StoredAdapter, model_config, stored_adapters
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.huggingface.model_export import choose_family, publish_folder
from megatron.interop.huggingface.model_record import decode_record
from megatron.interop.huggingface.weight_writer import WeightInfo, write_weights


class AdapterExport:
    """Hold what a checkpoint's adapters become: the layers of the Hugging Face model that each is of.

    One adapter of fused rows that are several layers there becomes as many, with the same ``A``.

    Raises:
        ConfigurationError: there are no adapters, no supported architecture is the model's, or its layers are not
            those that have adapters here.
    """

    def __init__(self, source: CheckpointSource, base_model: str | None) -> None:
        self._source, self._base_model = source, base_model
        self._config = model_config(source)
        self._family, _ = choose_family(self._config, decode_record(source.common))
        adapters = list(stored_adapters(source, self._config))
        if not adapters:
            raise ConfigurationError(f"--saver peft: {source.folder} holds no low-rank adapters; use --saver hf")
        modules = foreign_modules(self._family, self._config)
        without = {adapter.weight for adapter in adapters}.difference(module.weight for module in modules)
        if without:
            raise ConfigurationError(
                f"--saver peft: {self._family.architecture} has the experts of {min(without)} in one tensor, for which "
                "the format of linear layers has no place; use --merge-lora --saver hf"
            )
        self._adapters = {module: adapter for module in modules if (adapter := _adapter_of(module, adapters))}
        self._all_modules = modules
        self._weights: dict[str, WeightInfo] = {}
        self._origins: dict[str, tuple[ForeignModule, StoredAdapter]] = {}
        for module, adapter in self._adapters.items():
            down = source.tensors[adapter.down]
            rank, in_features = down.global_shape[-2:]
            for letter, shape in (("A", (rank, in_features)), ("B", (module.num_rows, rank))):
                self._weights[module.tensor(letter)] = WeightInfo(shape, down.dtype)
                self._origins[module.tensor(letter)] = module, adapter

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(weight.num_bytes for weight in self._weights.values())

    def settings(self) -> dict[str, Any]:
        """Return what adapter_config.json says."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base_model,
            "inference_mode": True,
            "r": self._config.lora_rank,
            "lora_alpha": self._config.lora_alpha,
            "lora_dropout": self._config.lora_dropout,
            "target_modules": self._targets(),
            "bias": "none",
            "fan_in_fan_out": self._family.model_type == "gpt2",
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    def write(self, folder: Path) -> None:
        """Write both files into an empty folder and force them to disk."""
        names = sorted(self._weights)
        write_weights(folder / ADAPTER_WEIGHTS, names, {"format": "pt"}, self._weights, self._values)
        write_text(folder / ADAPTER_CONFIG, json.dumps(self.settings(), indent=2) + "\n")

    def _values(self, name: str) -> torch.Tensor:
        module, adapter = self._origins[name]
        if name == module.tensor("A"):
            return self._read(adapter.down, module.expert)
        up = self._read(adapter.up, module.expert)
        result = torch.empty(self._weights[name].shape, dtype=up.dtype)
        for rows in paired_rows(module.rows, adapter.rows):
            result[rows.first : rows.first + rows.count] = up[rows.second : rows.second + rows.count]
        return result

    def _read(self, name: str, expert: int | None) -> torch.Tensor:
        """Return a tensor of ours, of those that stack experts' one expert's."""
        if expert is None:
            return self._source.read(name)
        return self._source.read(name, Box((expert, 0, 0), (1, *self._source.tensors[name].global_shape[1:])))[0]

    def _targets(self) -> list[str]:
        """Return the ends of layers' names by which peft finds those with adapters and no others."""
        others = [module.name for module in self._all_modules if module not in self._adapters]
        targets = []
        for module in self._adapters:
            words = module.name.split(".")
            lengths = (n for n in range(1, len(words)) if not any(o.split(".")[-n:] == words[-n:] for o in others))
            targets.append(".".join(words[-next(lengths) :]))
        return list(dict.fromkeys(targets))


def _adapter_of(module: ForeignModule, adapters: list[StoredAdapter]) -> StoredAdapter | None:
    """Return the adapter of a layer of theirs, None where it has none.

    Raises:
        ConfigurationError: parts of it have adapters of their own.
    """
    shared = {
        adapter: sum(rows.count for rows in paired_rows(module.rows, adapter.rows))
        for adapter in adapters
        if adapter.weight == module.weight
    }
    found = [adapter for adapter, count in shared.items() if count]
    if not found:
        return None
    if len(found) > 1 or shared[found[0]] < module.num_rows:
        linear = module.weight.split(".")[-2]
        parts = " ".join(f"{adapter.part}_proj" for adapter in found)
        raise ConfigurationError(
            f"--saver peft: {module.name} is one layer of the Hugging Face model, and {parts} have adapters of their "
            f"own here; train with {linear} in --lora-target-modules, or use --merge-lora --saver hf"
        )
    return found[0]


def write_peft(
    source: CheckpointSource,
    folder: str | Path,
    *,
    base_model: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of a checkpoint as a folder of peft's, which appears whole, by one rename, or not.

    ``base_model`` is what the folder says of the model that they are of. ``check`` is given the finished folder under
    its temporary name: what it raises keeps it from appearing.

    Raises:
        CheckpointError: the folder exists and is not empty, or it cannot be written.
        ConfigurationError: as `AdapterExport` does.
    """
    export = AdapterExport(source, base_model)
    publish_folder(folder, export.write, export.num_bytes, check, "the adapters")
