"""LoRA adapters of checkpoints: read and write PEFT folders, and merge adapters into the weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.checkpoint import CheckpointSource, TensorInfo
from megatron.checkpoint.formats.huggingface import (
    Family,
    WeightInfo,
    choose_family,
    publish_folder,
    query_key_value_rows,
    write_weights,
)
from megatron.checkpoint.formats.peft_settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_settings
from megatron.core.config_base import config_from_dict
from megatron.core.dist_checkpointing import OPTIMIZER_PREFIX, dtype_of, write_text
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box
from megatron.core.transformer import ADAPTERS, GATE_UP, LINEAR_LAYERS, PART_OF, QUERY_KEY_VALUE, WHOLE, plain_names

_DOWN = re.compile(r"(model\..+)\.adapters\.(\w+)\.lora_A")
NO_ADAPTERS: dict[str, Any] = {
    "lora_rank": 0,
    "lora_alpha": 16.0,
    "lora_target_modules": [],
    "lora_dropout": 0.0,
    "lora_base_quantization": None,
    "lora_double_quantization": True,
}
"""Model configuration without adapters."""


@dataclass(frozen=True)
class RowRange:
    """Correspondence of ``count`` rows of one tensor with the same number of rows of another."""

    first: int
    second: int
    count: int


@dataclass(frozen=True)
class StoredAdapter:
    """Adapter of a weight or of a part of its rows.

    If the weight stacks experts, so do the adapter's tensors. ``rows`` maps rows of the weight to rows of ``B``.
    """

    weight: str
    part: str
    rows: tuple[RowRange, ...]

    @property
    def down(self) -> str:
        """Return the name of ``A``."""
        return tensor_name(self.weight, self.part, "lora_A")

    @property
    def up(self) -> str:
        """Return the name of ``B``."""
        return tensor_name(self.weight, self.part, "lora_B")


def model_config(source: CheckpointSource) -> GPTConfig:
    """Return the model configuration of a checkpoint.

    Raises:
        ConfigurationError: the checkpoint's configuration does not describe a model.
    """
    return config_from_dict(GPTConfig, source.common["config"]["model"])


def tensor_name(weight: str, part: str, tensor: str) -> str:
    return f"{weight.removesuffix('.weight')}.adapters.{part}.{tensor}"


_LAYER = re.compile(r"model\.decoder\.layers\.(\d+)\.")


def part_rows(config: GPTConfig, weight: str, part: str, num_rows: int) -> tuple[RowRange, ...]:
    """Map the rows of a named weight with ``num_rows`` that form a part to the rows of the part."""
    if part == WHOLE:
        return (RowRange(0, 0, num_rows),)
    if part in GATE_UP:
        width = num_rows // len(GATE_UP)
        return (RowRange(GATE_UP.index(part) * width, 0, width),)
    assert part in QUERY_KEY_VALUE, f"a linear layer has no part {part}"
    # A layer of a multi-token prediction (MTP) module has the shape of the last layer.
    layer = _LAYER.match(weight)
    own = config.of_layer(int(layer[1]) if layer else config.num_layers)
    heads, groups, has_values = config.num_attention_heads, own.num_query_groups, not own.attention_k_eq_v
    fused = query_key_value_rows(heads, groups, own.kv_channels, has_values=has_values)
    return tuple(RowRange(start, part_start, count) for kind, start, part_start, count in fused if kind == part)


def stored_adapters(source: CheckpointSource, config: GPTConfig) -> Iterator[StoredAdapter]:
    """Yield the adapters of a checkpoint in the order of its tensor names."""
    for name in source.tensors:
        match = _DOWN.fullmatch(name)
        if match is not None:
            weight = f"{match[1]}.weight"
            # Weights of experts are stacked, and their rows are counted per expert.
            num_rows = source.tensors[weight].global_shape[-2]
            yield StoredAdapter(weight, match[2], part_rows(config, weight, match[2], num_rows))


_DIMS = 2
"""Number of dims of a linear layer's weight."""
PEFT_PREFIX = "base_model.model."
"""Prefix of layer names in PEFT's files."""


@dataclass(frozen=True)
class ForeignModule:
    """Linear layer of the Hugging Face model; ``rows`` maps rows of our weight to rows of the layer's output.

    ``expert`` is the layer's expert number if our weight stacks experts, else None.
    """

    name: str
    weight: str
    rows: tuple[RowRange, ...]
    expert: int | None = None

    def tensor(self, letter: str) -> str:
        """Return the name of ``A`` or ``B`` in PEFT's files."""
        return f"{PEFT_PREFIX}{self.name}.lora_{letter}.weight"

    @property
    def num_rows(self) -> int:
        return sum(rows.count for rows in self.rows)


def foreign_modules(family: Family, config: GPTConfig) -> list[ForeignModule]:
    """Return every linear layer of the transformer layers, in the order of the Hugging Face model.

    Experts that the model fuses in one tensor are not linear layers and are left out.
    """
    found: dict[tuple[str, str, int | None], list[RowRange]] = {}
    for link in family.links(config):
        native = link.native.removesuffix(".weight")
        is_linear = native != link.native and native.rpartition(".")[2] in LINEAR_LAYERS
        if is_linear and len(link.foreign_box.shape) == _DIMS:
            start = link.foreign_box.offset[1 if link.is_transposed else 0]
            rows = RowRange(link.native_box.offset[-2], start, link.native_box.shape[-2])
            expert = link.native_box.offset[0] if len(link.native_box.shape) > _DIMS else None
            found.setdefault((link.foreign.removesuffix(".weight"), link.native, expert), []).append(rows)
    return [ForeignModule(name, weight, tuple(rows), expert) for (name, weight, expert), rows in found.items()]


def paired_rows(first: Iterable[RowRange], second: Iterable[RowRange]) -> list[RowRange]:
    """Join two row maps on their first tensor, and return the map between their second tensors."""
    pairs = []
    seconds = list(second)
    for rows in first:
        for others in seconds:
            start = max(rows.first, others.first)
            end = min(rows.first + rows.count, others.first + others.count)
            if start < end:
                pairs.append(
                    RowRange(rows.second + start - rows.first, others.second + start - others.first, end - start)
                )
    return pairs


class MergedSource:
    """Merged weights ``W + (alpha / rank) B A`` of a checkpoint with adapters; implements `CheckpointSource`.

    The sum is computed in at least float32 and rounded once to the weight's dtype. The optimizer state, which belongs
    to the adapters, is left out.

    Raises:
        ConfigurationError: the checkpoint has no adapters.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.base = source
        config = model_config(source)
        self._scale = config.lora_alpha / max(config.lora_rank, 1)
        self._adapters: dict[str, list[StoredAdapter]] = {}
        for adapter in stored_adapters(source, config):
            self._adapters.setdefault(adapter.weight, []).append(adapter)
        if not self._adapters:
            raise ConfigurationError(f"--merge-lora: {source.folder} contains no LoRA adapters; omit it")
        values = source.common["config"]
        self.common: Mapping[str, Any] = {
            **source.common,
            "config": {**values, "model": {**values["model"], **NO_ADAPTERS}},
            "optimizer": None,
            "scheduler": None,
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: info
            for name, info in source.tensors.items()
            if ADAPTERS not in name and not name.startswith(OPTIMIZER_PREFIX)
        }

    @property
    def folder(self) -> Path:
        return self.base.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: a file that holds a part of the tensor is missing or damaged.
        """
        info = self.tensors[name]
        values = self.base.read(name, box)
        if name not in self._adapters:
            return values
        box = info.whole if box is None else box
        merged = values.to(torch.promote_types(info.dtype, torch.float32))
        # If the weight stacks experts, the expert number precedes rows and columns.
        (*place, first_row, first_column), (*count, num_rows, num_columns) = box.offset, box.shape
        for adapter in self._adapters[name]:
            rank = self.base.tensors[adapter.down].global_shape[-2]
            of_down = Box((*place, 0, first_column), (*count, rank, num_columns))
            down = self.base.read(adapter.down, of_down).to(merged.dtype)
            for rows in adapter.rows:
                start, end = max(rows.first, first_row), min(rows.first + rows.count, first_row + num_rows)
                if start < end:
                    of_up = Box((*place, rows.second + start - rows.first, 0), (*count, end - start, rank))
                    up = self.base.read(adapter.up, of_up).to(merged.dtype)
                    merged[..., start - first_row : end - first_row, :] += self._scale * (up @ down)
        return merged.to(info.dtype)

    def close(self) -> None:
        self.base.close()


_MOST_NAMED = 4


class PeftSource:
    """Model with the adapters of a PEFT folder; implements `CheckpointSource`.

    ``base`` is the model, a checkpoint of any format. The adapters are converted to the dtype of its weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapters do not belong to layers of this model.
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
        family, _ = choose_family(config, base.common)
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
            if module.weight.endswith(".in_proj.weight") and module.num_rows < out_features:
                raise CheckpointError(
                    f"{self.folder}: {module.name} is a part of the input projection of a recurrent layer, which has "
                    "one adapter for all of its rows here: merge it with the peft package"
                )
            part = _part_of(module, out_features)
            parts_of.setdefault(module.weight, set()).add(part)
            rows = paired_rows(module.rows, part_rows(config, module.weight, part, out_features))
            for letter, shape in (("A", (rank, in_features)), ("B", (module.num_rows, rank))):
                own_name = tensor_name(module.weight, part, f"lora_{letter}")
                origin = module.tensor(letter), rows if letter == "B" else []
                self._origins.setdefault(own_name, {})[module.expert] = origin
                tensors[own_name] = TensorInfo((*stacked, *shape), dtype)
                self._check_shape(module.tensor(letter), shape)
        if stored:
            more = " ..." if len(stored) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{self.folder / ADAPTER_WEIGHTS}: {', '.join(sorted(stored)[:_MOST_NAMED])}{more} are not adapters of "
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
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
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
        self.base.close()

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._file.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(found)}, but the model and the LoRA rank require {list(shape)}"
            )

    def _refuse_missing_experts(self, base: CheckpointSource) -> None:
        for name, origins in self._origins.items():
            weight = base.tensors[name.partition(ADAPTERS)[0] + ".weight"]
            if None not in origins and len(origins) < weight.global_shape[0]:
                missing = min(set(range(weight.global_shape[0])) - set(origins.keys()))
                raise CheckpointError(
                    f"{self.folder}: expert {missing} lacks {name}, which other experts have; all experts of a layer "
                    "must have the same adapters: merge them with the peft package"
                )

    def _common_parts(
        self, parts_of: Mapping[str, set[str]], num_weights: Mapping[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Return the parts of each linear layer that have adapters in all transformer layers.

        Raises:
            CheckpointError: the parts differ between layers.
        """
        by_linear: dict[str, list[set[str]]] = {}
        for weight, parts in parts_of.items():
            by_linear.setdefault(weight.split(".")[-2], []).append(parts)
        for linear, found in by_linear.items():
            if len(found) != num_weights[linear] or any(parts != found[0] for parts in found):
                raise CheckpointError(
                    f"{self.folder}: some layers have adapters of {linear} that others lack; all layers must have the "
                    "same adapters: merge them with the peft package"
                )
        return {
            linear: tuple(part for part in (WHOLE, *PART_OF.get(linear, ())) if part in found[0])
            for linear, found in by_linear.items()
        }


def _part_of(module: ForeignModule, num_rows: int) -> str:
    """Return the part of a weight that corresponds to a Hugging Face layer."""
    if module.num_rows == num_rows:
        return WHOLE
    if module.weight.endswith(".linear_fc1.weight"):
        return GATE_UP[module.rows[0].first * len(GATE_UP) // num_rows]
    name = module.name.rpartition(".")[2]
    return name.removesuffix("_proj")


class AdapterExport:
    """Export plan of a checkpoint's adapters for the layers of the Hugging Face model.

    An adapter of fused rows becomes several adapters with the same ``A`` if the rows are several Hugging Face layers.

    Raises:
        ConfigurationError: there are no adapters, no supported architecture can express the model, or an adapter has no
            matching linear layer.
    """

    def __init__(self, source: CheckpointSource, base_model: str | None) -> None:
        self._source, self._base_model = source, base_model
        self._config = model_config(source)
        self._family, _ = choose_family(self._config, source.common)
        adapters = list(stored_adapters(source, self._config))
        if not adapters:
            raise ConfigurationError(f"--saver peft: {source.folder} contains no LoRA adapters; use --saver hf")
        modules = foreign_modules(self._family, self._config)
        without = {adapter.weight for adapter in adapters}.difference(module.weight for module in modules)
        if without:
            raise ConfigurationError(
                f"--saver peft: {self._family.architecture} stores the experts of {min(without)} in one tensor, but "
                "PEFT stores adapters of linear layers only; use --merge-lora --saver hf"
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
        return sum(weight.num_bytes for weight in self._weights.values())

    def settings(self) -> dict[str, Any]:
        """Return the content of adapter_config.json."""
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
        """Write both files into an empty folder and flush them to disk."""
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
        """Read a tensor, or one expert's part of a stacked tensor."""
        if expert is None:
            return self._source.read(name)
        return self._source.read(name, Box((expert, 0, 0), (1, *self._source.tensors[name].global_shape[1:])))[0]

    def _targets(self) -> list[str]:
        """Return name suffixes by which PEFT finds exactly the layers with adapters."""
        others = [module.name for module in self._all_modules if module not in self._adapters]
        targets = []
        for module in self._adapters:
            words = module.name.split(".")
            lengths = (n for n in range(1, len(words)) if not any(o.split(".")[-n:] == words[-n:] for o in others))
            targets.append(".".join(words[-next(lengths) :]))
        return list(dict.fromkeys(targets))


def _adapter_of(module: ForeignModule, adapters: list[StoredAdapter]) -> StoredAdapter | None:
    """Return the adapter of a Hugging Face layer, or None if it has none.

    Raises:
        ConfigurationError: parts of the layer have separate adapters.
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
            f"--saver peft: {module.name} is one layer of the Hugging Face model, but {parts} have separate adapters "
            f"here; train with {linear} in --lora-target-modules, or use --merge-lora --saver hf"
        )
    return found[0]


def write_peft(
    source: CheckpointSource,
    folder: str | Path,
    *,
    base_model: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of a checkpoint as a PEFT folder, which a single rename publishes.

    ``base_model`` is the base model's name in the folder. ``check`` receives the finished folder under its temporary
    name; if it raises, the folder is not published.

    Raises:
        CheckpointError: the folder exists and is not empty, or it cannot be written.
        ConfigurationError: as for `AdapterExport`.
    """
    export = AdapterExport(source, base_model)
    publish_folder(folder, export.write, export.num_bytes, check, "the adapters")
