"""Export a checkpoint of any format to a Hugging Face model folder, atomically."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import CheckpointSource
from megatron.checkpoint.formats.huggingface.families import FAMILIES, family_for, read_model
from megatron.checkpoint.formats.huggingface.family import (
    Family,
    TensorLink,
    model_features,
    names_in_files,
    shapes_of,
)
from megatron.checkpoint.formats.huggingface.model_record import (
    ModelRecord,
    decode_record,
    index_text,
    recorded_model_type,
)
from megatron.checkpoint.formats.huggingface.settings import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    dump_settings,
    parse_settings,
    replace_dtype,
)
from megatron.checkpoint.formats.huggingface.tokenizer_files import (
    complete_model_folder,
    copy_into_model_folder,
    end_of_text,
    write_chat_template,
)
from megatron.checkpoint.formats.huggingface.weight_files import (
    OUTPUT_LAYER,
    WeightInfo,
    plan_files,
    write_weights,
)
from megatron.core.config_base import config_from_dict
from megatron.core.dist_checkpointing import MAX_SHARD_BYTES, dtype_name, sync_folder, write_text
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.object_store import local_copy
from megatron.core.sharding import Box, split_box

_WEIGHTS = "model."


class ModelExport:
    """Export plan of a checkpoint: its architecture, tensors and files.

    Raises:
        CheckpointError: the checkpoint's tensors do not match the model that its configuration describes.
        ConfigurationError: no supported architecture can express the model.
    """

    def __init__(self, source: CheckpointSource, max_file_bytes: int) -> None:
        self._source = source
        self._config = config_from_dict(GPTConfig, source.common["config"]["model"])
        self._family, self._record = choose_family(self._config, source.common)
        links = list(self._family.links(self._config))
        _check_tensors(source, links)
        self._links: dict[str, list[TensorLink]] = {}
        for link in links:
            self._links.setdefault(link.foreign, []).append(link)
        names = {name: name for name in self._links}
        if self._record is not None:
            names = self._recorded_names(self._record)
        shapes = shapes_of((link.foreign, link.foreign_box) for link in links)
        self._origins = names
        self._weights = {
            stored: WeightInfo(shapes[name], source.tensors[self._links[name][0].native].dtype)
            for stored, name in names.items()
        }
        self._files = plan_files(self._weights, max_file_bytes) if self._record is None else self._record.files

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._weights.values())

    def write(self, folder: Path) -> None:
        """Write all files into an empty folder and flush them to disk."""
        for name, file in self._files.items():
            write_weights(folder / name, file.tensors, file.metadata, self._weights, self._values)
        recorded = None if self._record is None else self._record.index
        if len(self._files) > 1 or recorded is not None:
            weight_map = {tensor: name for name, file in self._files.items() for tensor in file.tensors}
            write_text(folder / INDEX_FILE, index_text(weight_map, self.num_bytes, recorded))
        write_text(folder / CONFIG_FILE, self._config_text())
        if self._record is not None and self._record.generation is not None:
            write_text(folder / GENERATION_FILE, self._record.generation)
        tokenizer = self._tokenizer_folder()
        if tokenizer is not None:
            copy_into_model_folder(tokenizer, folder)
            if self._record is None:
                complete_model_folder(tokenizer, folder, self._family.model_type)
            write_chat_template(tokenizer, folder, self._source.common["config"].get("data", {}))

    def _values(self, stored: str) -> torch.Tensor:
        weight = self._weights[stored]
        result = torch.empty(weight.shape, dtype=weight.dtype)
        for link in self._links[self._origins[stored]]:
            for part in split_box(link.native_box, weight.dtype.itemsize, MAX_SHARD_BYTES):
                values = self._source.read(link.native, part)
                result[link.foreign_slices(part)].copy_(link.to_foreign(values))
        return result

    def _recorded_names(self, record: ModelRecord) -> dict[str, str]:
        """Map each recorded tensor to the name of the architecture.

        Files may omit a prefix, or hold a tied output layer in addition to the embedding.
        """
        stored = [tensor for file in record.files.values() for tensor in file.tensors]
        known = {other: name for name in self._links for other in names_in_files(self._family, name)}
        names = {name: name if name in self._links else known.get(name, name) for name in stored}
        if OUTPUT_LAYER in names and not self._config.untie_embeddings_and_output_weights:
            names[OUTPUT_LAYER] = next(iter(self._links))
        copies = {name for name, links in self._links.items() if links[0].is_copy}
        if set(names.values()) | copies != set(self._links):
            raise CheckpointError(
                f"checkpoint {self._source.folder}: its record of a Hugging Face folder does not list the tensors of "
                "its model"
            )
        return names

    def _config_text(self) -> str:
        if self._record is None:
            end = end_of_text(self._tokenizer_folder())
            begin = end if self._family.model_type == "gpt2" else None
            settings = self._family.write_settings(self._config)
            return dump_settings(
                settings | {"bos_token_id": begin, "eos_token_id": end, "torch_dtype": self._main_dtype()}
            )
        recorded = parse_settings(self._record.config, CONFIG_FILE).dtype()
        if recorded is None or any(dtype_name(weight.dtype) == recorded for weight in self._weights.values()):
            return self._record.config
        return dump_settings(replace_dtype(json.loads(self._record.config), self._main_dtype()))

    def _main_dtype(self) -> str:
        """Return the dtype with the most bytes."""
        sizes: dict[str, int] = {}
        for weight in self._weights.values():
            name = dtype_name(weight.dtype)
            sizes[name] = sizes.get(name, 0) + weight.num_bytes
        return max(sizes, key=lambda name: sizes[name])

    def _tokenizer_folder(self) -> Path | None:
        name, folder = self._source.common["tokenizer"], self._source.folder
        if name is None:
            return folder if (folder / CONFIG_FILE).is_file() else None  # A model folder contains its tokenizer.
        return local_copy(folder / name)


class ExportedView:
    """View of a source with the values that a Hugging Face folder of it has; implements `CheckpointSource`.

    They differ from the source's values only in tensors that the folder stores with an offset, by the rounding of that
    sum.
    """

    def __init__(self, source: CheckpointSource, family: Family, config: GPTConfig) -> None:
        self._source, self.tensors, self.common = source, source.tensors, source.common
        self._moved = {link.native: link for link in family.links(config) if link.foreign_offset}

    @property
    def folder(self) -> Path:
        return self._source.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: the source has no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        values, link = self._source.read(name, box), self._moved.get(name)
        return values if link is None else link.to_native(link.to_foreign(values))

    def close(self) -> None:
        self._source.close()


def choose_family(config: GPTConfig, common: Mapping[str, Any]) -> tuple[Family, ModelRecord | None]:
    """Return a model's architecture, if possible its source folder's, and the folder's record for an unchanged model.

    ``common`` is the section of the checkpoint that may contain the record.

    Raises:
        CheckpointError: the record is damaged.
        ConfigurationError: no supported architecture can express the model.
    """
    record = decode_record(common)
    preferred = recorded_model_type(common)
    family = next((each for each in FAMILIES if each.model_type == preferred), None)
    if record is not None:
        tensors = [name for file in record.files.values() for name in file.tensors]
        family, recorded = read_model(parse_settings(record.config, CONFIG_FILE, lambda: tensors))
        if model_features(recorded) == model_features(config):
            return family, record
    return family_for(config, family), None


def _check_tensors(source: CheckpointSource, links: Iterable[TensorLink]) -> None:
    wanted = shapes_of((link.native, link.native_box) for link in links)
    found: Mapping[str, tuple[int, ...]] = {
        name: info.global_shape for name, info in source.tensors.items() if name.startswith(_WEIGHTS)
    }
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} does not belong to the model" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        raise CheckpointError(f"checkpoint {source.folder} does not match its configuration: {'; '.join(problems)}")


MAX_FILE_BYTES = 5_000_000_000


def write_hugging_face(
    source: CheckpointSource,
    folder: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model folder, which a single rename publishes.

    A model imported from such a folder keeps its config.json, generation_config.json, file layout and names. Any other
    model gets a config.json of an architecture that can express it, and files of at most ``max_file_bytes``. ``check``
    receives the finished folder under its temporary name; if it raises, the folder is not published.

    Raises:
        CheckpointError: the folder exists and is not empty, it cannot be written, or the source lacks a tensor.
        ConfigurationError: no supported architecture can express the model.
    """
    export = ModelExport(source, max_file_bytes)
    publish_folder(folder, export.write, export.num_bytes, check, "the Hugging Face model")


def publish_folder(
    folder: str | Path,
    write: Callable[[Path], None],
    num_bytes: int,
    check: Callable[[Path], None] | None,
    content: str,
) -> None:
    """Write and check a folder under a temporary name, then rename it; ``content`` is named in errors.

    Raises:
        CheckpointError: the folder exists and is not empty, or it cannot be written.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; use a new folder for {content}")
    temporary = folder.parent / f".{folder.name}.saving"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        if check is not None:
            check(temporary)
        sync_folder(temporary)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        need = f"; the weights need {num_bytes} bytes" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}{need}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
