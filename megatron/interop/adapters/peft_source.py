"""Adapters of the peft package and the model that they are of, as a checkpoint with low-rank adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.core.dist_checkpointing.mapping import dtype_of
from megatron.core.dist_checkpointing.state_dict import OPTIMIZER_PREFIX
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from megatron.core.transformer.lora_targets import ADAPTERS, GATE_UP, PART_OF, WHOLE, plain_names
from megatron.interop.adapters.foreign_module import ForeignModule, foreign_modules, paired_rows
from megatron.interop.adapters.peft_settings import ADAPTER_WEIGHTS, read_settings
from megatron.interop.adapters.stored_adapter import RowRange, model_config, part_rows, tensor_name
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo
from megatron.interop.huggingface.model_export import choose_family
from megatron.interop.huggingface.model_record import decode_record

_MOST_NAMED = 4


class PeftSource:
    """Offer a model with the adapters of a folder of peft's; a `CheckpointSource`.

    ``base`` is the model, a checkpoint of any format. The adapters get the type of its weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapters are not of layers of this model.
    """

    def __init__(self, folder: str | Path, base: CheckpointSource) -> None:
        self.folder, self.base = Path(folder), base
        settings = read_settings(self.folder)
        try:
            # Closed by close().
            self._file: Any = safe_open(self.folder / ADAPTER_WEIGHTS, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
        config = model_config(base)
        dtype, rank = dtype_of(config.params_dtype), int(settings["r"])
        tensors = {name: info for name, info in base.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
        family, _ = choose_family(config, decode_record(base.common))
        modules = foreign_modules(family, config)
        stored = set(self._file.keys())  # type: ignore[no-untyped-call]
        self._origins: dict[str, dict[int | None, tuple[str, list[RowRange]]]] = {}
        parts_of: dict[str, set[str]] = {}
        for module in modules:
            names = {module.tensor("A"), module.tensor("B")}
            if not names <= stored:
                continue
            stored -= names
            *stacked, out_features, in_features = base.tensors[module.weight].global_shape
            part = _part_of(module, out_features)
            parts_of.setdefault(module.weight, set()).add(part)
            rows = paired_rows(module.rows, part_rows(config, part, out_features))
            for letter, shape in (("A", (rank, in_features)), ("B", (module.num_rows, rank))):
                own_name = tensor_name(module.weight, part, f"lora_{letter}")
                origin = module.tensor(letter), rows if letter == "B" else []
                self._origins.setdefault(own_name, {})[module.expert] = origin
                tensors[own_name] = TensorInfo((*stacked, *shape), dtype)
                self._check_shape(module.tensor(letter), shape)
        if stored:
            more = " ..." if len(stored) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{self.folder / ADAPTER_WEIGHTS}: {', '.join(sorted(stored)[:_MOST_NAMED])}{more} are no adapters of "
                f"the linear layers of {base.folder} ({family.architecture})"
            )
        self._refuse_missing_experts(base)
        num_weights = Counter(weight.split(".")[-2] for weight in {module.weight for module in modules})
        self.tensors: Mapping[str, TensorInfo] = tensors
        values = base.common["config"]
        adapters = {
            "lora_rank": rank,
            "lora_alpha": float(settings["lora_alpha"]),
            "lora_target_modules": list(plain_names(self._common_parts(parts_of, num_weights))),
            "lora_dropout": float(settings.get("lora_dropout", 0.0)),
        }
        self.common: Mapping[str, Any] = {
            **base.common,
            "config": {**values, "model": {**values["model"], **adapters}},
            "optimizer": None,
            "scheduler": None,
        }

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: the file that holds it is missing or damaged.
        """
        if name not in self._origins:
            return self.base.read(name, box)
        origins = self._origins[name]
        if None in origins:
            values = self._read(name, *origins[None])
            return values if box is None else values[box.slices].contiguous()
        box = self.tensors[name].whole if box is None else box
        experts = range(box.offset[0], box.offset[0] + box.shape[0])
        return torch.stack([self._read(name, *origins[expert])[box.slices[1:]] for expert in experts])

    def _read(self, name: str, foreign: str, rows: list[RowRange]) -> torch.Tensor:
        values: torch.Tensor = self._file.get_tensor(foreign).to(self.tensors[name].dtype)
        if rows:
            ordered = torch.empty_like(values)
            for pair in rows:
                ordered[pair.second : pair.second + pair.count] = values[pair.first : pair.first + pair.count]
            values = ordered
        return values

    def close(self) -> None:
        """Close the files."""
        self.base.close()

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._file.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.folder}: {name} is {list(found)}, the model and the rank make it {list(shape)}"
            )

    def _refuse_missing_experts(self, base: CheckpointSource) -> None:
        for name, origins in self._origins.items():
            weight = base.tensors[name.partition(ADAPTERS)[0] + ".weight"]
            if None not in origins and len(origins) < weight.global_shape[0]:
                missing = min(set(range(weight.global_shape[0])) - set(origins.keys()))
                raise CheckpointError(
                    f"{self.folder}: expert {missing} lacks what other experts have of {name}; all experts of a layer "
                    "have the same here: merge them with the peft package"
                )

    def _common_parts(
        self, parts_of: Mapping[str, set[str]], num_weights: Mapping[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Return the parts of each linear layer that have adapters in all layers.

        Raises:
            CheckpointError: some layers have others.
        """
        by_linear: dict[str, list[set[str]]] = {}
        for weight, parts in parts_of.items():
            by_linear.setdefault(weight.split(".")[-2], []).append(parts)
        for linear, found in by_linear.items():
            if len(found) != num_weights[linear] or any(parts != found[0] for parts in found):
                raise CheckpointError(
                    f"{self.folder}: some layers have adapters of {linear} that others lack; all layers have the same "
                    "here: merge them with the peft package"
                )
        return {
            linear: tuple(part for part in (WHOLE, *PART_OF.get(linear, ())) if part in found[0])
            for linear, found in by_linear.items()
        }


def _part_of(module: ForeignModule, num_rows: int) -> str:
    """Return the part of a weight that a layer of theirs is."""
    if module.num_rows == num_rows:
        return WHOLE
    if module.weight.endswith(".linear_fc1.weight"):
        return GATE_UP[module.rows[0].first * len(GATE_UP) // num_rows]
    name = module.name.rpartition(".")[2]
    return name.removesuffix("_proj")
