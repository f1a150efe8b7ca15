"""Read a checkpoint of Megatron's ``torch_dist`` format as global tensors under native names, whatever its layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.config_base import config_from_dict
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig, padded_vocab_size
from megatron.core.parallel_sizes import ONE_RANK
from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import TensorInfo
from megatron.interop.megatron_torch.common_state import real_vocab_size, shared_state
from megatron.interop.megatron_torch.megatron_arguments import check_arguments, config_of_arguments
from megatron.interop.megatron_torch.rank_tree import FLOAT8_SCALING
from megatron.interop.megatron_torch.stage_parameters import OUTPUT_LAYER, WORD_EMBEDDING, StageDescriber
from megatron.interop.megatron_torch.stored_optimizer import scalars_of
from megatron.interop.misfits import refuse_misfits
from megatron.interop.torch_dist.bucket_states import GROUP_PREFIX, BucketStates
from megatron.interop.torch_dist.folder_files import COMMON_FILE
from megatron.interop.torch_dist.parameter_keys import ParameterKey, parse_key
from megatron.interop.torch_dist.shared_values import number, read_common, read_random_states, with_optimizer_objects
from megatron.interop.torch_dist.stored_boxes import BoxReader, StoredBox, chunk_boxes
from megatron.interop.torch_dist.stored_metadata import StoredEntry, read_metadata

_STATES = ("main_param", "exp_avg", "exp_avg_sq", "momentum_buffer")
_HALVES = (torch.float16, torch.bfloat16)


class TorchDistSource:
    """Offer the tensors of an iteration's folder; see `CheckpointSource`.

    ``vocab_size`` is the tokenizer's real size: rows beyond it are padding. Without it the size is the one that
    ``args`` tell (see `real_vocab_size`).

    Raises:
        CheckpointError: the files hold something else than a GPT, or do not fit together.
        DamagedCheckpointError: one is missing or damaged.
    """

    @refuse_misfits
    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder)
        common = read_common(folder)
        self.arguments: Mapping[str, Any] = common["args"].attributes
        check_arguments(self.arguments, folder / COMMON_FILE)
        self._float8_scaling: Mapping[str, torch.Tensor] = common.get(FLOAT8_SCALING) or {}
        self._keys = self._parsed_keys()
        self._reader = BoxReader()
        self._boxes: dict[str, list[StoredBox]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for key, entry in self._stored():
            self._add_entry(key, entry)
        self.config = config_of_arguments(self.arguments)
        self.padded_vocab_size = self._shapes.get(f"model.{WORD_EMBEDDING}", (0,))[0]
        self.config["model"]["vocab_size"] = vocab_size or real_vocab_size(
            self.arguments, self.padded_vocab_size, self.folder
        )
        tokenizer = self.config["tokenizer"]
        if tokenizer.get("tokenizer_type") == "NullTokenizer" and tokenizer.get("vocab_size") == self.padded_vocab_size:
            # Counted with the end-of-document id, for which there would be no row otherwise.
            tokenizer["vocab_size"] = self.padded_vocab_size - 1
        self.model = self._model_config()
        self._check_vocabulary(vocab_size)
        self.tensors: dict[str, TensorInfo] = {}
        self._add_parameters()
        has_optimizer = isinstance(common.get("optimizer"), Mapping) and self._add_states()
        values = with_optimizer_objects(common, self.metadata)
        scalars = scalars_of(values, number) if has_optimizer else None
        self.common: Mapping[str, Any] = shared_state(
            folder, self.arguments, values, scalars, self.config, self.model, self.model.parallel_sizes.world_size
        )

    @refuse_misfits
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU; only the pages that it needs are read."""
        info = self.tensors[name]
        return self._reader.read(name, info.whole if box is None else box, info.dtype, self._boxes[name])

    @refuse_misfits
    def random_states(self) -> Mapping[tuple[int, int], Any]:
        """Return what each (tensor, pipeline) rank stored of its streams of random numbers."""
        return read_random_states(self.metadata)

    @refuse_misfits
    def float8_scaling(self) -> Mapping[str, torch.Tensor]:
        """Return by name what fp8's delayed scaling remembers; often nothing."""
        return self._float8_scaling

    def check_storages(self, index: int = 0, count: int = 1) -> None:
        """Compare the checksums of every ``count``-th entry, from number ``index`` on.

        Raises:
            DamagedCheckpointError: an entry does not match the checksum beside it; the tensor is named.
        """
        self.metadata.check_storages(None, index, count)

    def close(self) -> None:
        """Close the files; the source cannot be read afterwards."""
        self._reader.close()

    def _parsed_keys(self) -> dict[str, ParameterKey]:
        found, unknown = {}, []
        for stored in self.metadata.tensors:
            if GROUP_PREFIX in stored:
                continue
            try:
                key = parse_key(stored)
            except KeyError:
                unknown.append(stored)
                continue
            if key is not None and key.kind not in ("model", *_STATES):
                unknown.append(stored)
            elif key is not None:
                found[stored] = key
        if unknown:
            names = f"{', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}"
            raise CheckpointError(
                f"{self.metadata.path} names tensors of another kind of model, or of its optimizer: {names}"
            )
        return found

    def _stored(self) -> Iterator[tuple[ParameterKey, StoredEntry]]:
        """Yield every tensor; the gate's half of two before the other."""
        keys = sorted(self._keys.items(), key=lambda item: item[1].half or 0)
        return ((key, self.metadata.tensors[stored]) for stored, key in keys)

    def _add_entry(self, key: ParameterKey, entry: StoredEntry) -> None:
        whole = entry.shape if entry.original_shape is None else entry.original_shape
        shape = whole[1:] if key.is_stacked else whole
        if not shape:
            raise CheckpointError(f"{self.metadata.path}: {key.name(0)} has the shape {list(whole)}")
        for layer, box in chunk_boxes(entry, key.is_stacked):
            name = key.name(layer)
            if key.half == 1:
                box = _below(box, shape[0])
            whole_shape = shape if key.half is None else (2 * shape[0], *shape[1:])
            if key.expert is not None:
                box, whole_shape = _of_expert(box, key.expert), (int(self.arguments["num_experts"]), *whole_shape)
            self._boxes.setdefault(name, []).append(box)
            self._shapes[name] = whole_shape
            if self._dtypes.setdefault(name, entry.dtype) != entry.dtype:
                raise CheckpointError(f"{self.metadata.path}: {name} is {entry.dtype} and {self._dtypes[name]}")

    def _model_config(self) -> GPTConfig:
        names = [name.split(".") for name in self._shapes if name.startswith("model.decoder.layers.")]
        numbers = {int(words[3]) for words in names}
        wanted = self.config["model"].get("num_layers")
        if wanted != len(numbers) or numbers != set(range(len(numbers))):
            raise CheckpointError(f"{self.metadata.path} names {len(numbers)} layers; its args say {wanted}")
        try:
            return config_from_dict(GPTConfig, self.config["model"])
        except ConfigurationError as error:
            problems = "; ".join(error.problems)
            raise CheckpointError(f"{self.folder / COMMON_FILE}: args do not describe a model: {problems}") from error

    def _check_vocabulary(self, vocab_size: int | None) -> None:
        """Refuse files whose vocabulary has no room for the caller's, or was padded from another."""
        expected, divisor = self.model.vocab_size, self.config["model"].get("make_vocab_size_divisible_by")
        if vocab_size is not None and divisor is not None:
            expected = padded_vocab_size(vocab_size, divisor, self.model.tensor_model_parallel_size)
        is_other = vocab_size is not None and divisor is not None and expected != self.padded_vocab_size
        if is_other or expected > self.padded_vocab_size:
            raise CheckpointError(
                f"checkpoint {self.folder} has a vocabulary of {self.padded_vocab_size} rows, padding included; "
                f"{self.model.vocab_size} tokens would have been padded to {expected}: it is of another tokenizer"
            )

    def _add_parameters(self) -> None:
        """Take in the weights, once the name and the shape of each are known to be the model's."""
        whole = dataclasses.replace(
            self.model,
            **ONE_RANK.model_fields(),
            sequence_parallel=False,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
        describer = StageDescriber(whole, self.padded_vocab_size)
        parameters = describer.parameters(0, range(whole.num_layers), has_embedding=True, has_loss=True)
        wanted = {f"model.{parameter.name}": parameter.global_shape for parameter in parameters}
        stored = {name for name in self._shapes if name.startswith("model.")}
        problems = [f"missing: {name}" for name in sorted(wanted.keys() - stored)]
        problems += [f"unexpected: {name}" for name in sorted(stored - wanted.keys())]
        problems += [
            f"{name}: shape {list(self._shapes[name])} in the files, {list(shape)} by its args"
            for name, shape in wanted.items()
            if name in stored and not self._is_of_shape(name, shape)
        ]
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise CheckpointError(
                f"{self.folder} is not the model that its args describe: {'; '.join(problems[:4])}{more}"
            )
        self._untrained = {f"model.{parameter.name}" for parameter in parameters if not parameter.is_trained}
        for name, shape in wanted.items():
            self._take_in(name, shape)

    def _is_of_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        stored = self._shapes[name]
        if name.endswith((WORD_EMBEDDING, OUTPUT_LAYER)):
            return len(stored) == len(shape) and stored[0] >= shape[0] and stored[1:] == shape[1:]
        return stored == shape

    def _add_states(self) -> bool:
        """Take in the optimizer's state; return whether there is any."""
        weights = {
            name.removeprefix("model."): info for name, info in self.tensors.items() if name not in self._untrained
        }
        is_half = any(info.dtype in _HALVES for info in weights.values())
        if any(GROUP_PREFIX in key for key in (*self.metadata.tensors, *self.metadata.objects)):
            states = BucketStates(self.metadata, self.model, self.padded_vocab_size, self.arguments, self.read)
            for kind, parameter, box in states.boxes():
                name = f"optimizer.{kind}.{parameter.name}"
                self._shapes[name], self._dtypes[name] = parameter.global_shape, torch.float32
                if not parameter.is_replica:
                    self._boxes.setdefault(name, []).append(box)
        kinds = {name.split(".")[1] for name in self._shapes if name.startswith("optimizer.")}
        if not is_half:
            kinds.discard("main_param")  # the weights themselves
        for kind in sorted(kinds):
            for weight, info in weights.items():
                name = f"optimizer.{kind}.{weight}"
                if name not in self._shapes or not self._is_of_shape(name, info.global_shape):
                    found = list(self._shapes[name]) if name in self._shapes else "not there"
                    raise CheckpointError(f"{self.folder}: {name} is {found}, the weight {list(info.global_shape)}")
                self._take_in(name, info.global_shape)
        return bool(kinds) or any(key.startswith("optimizer.") for key in self.metadata.objects)

    def _take_in(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.tensors[name] = TensorInfo(shape, self._dtypes[name])
        cut = ((stored, stored.box.intersect(info.whole)) for stored in self._boxes[name])
        self._boxes[name] = [dataclasses.replace(stored, box=box) for stored, box in cut if box is not None]
        found = sum(stored.box.num_elements for stored in self._boxes[name])
        if found != info.num_elements:
            raise DamagedCheckpointError(
                f"{self.folder}: {found} of the {info.num_elements} elements of {name} are there"
            )


def _of_expert(stored: StoredBox, number: int) -> StoredBox:
    """Return the box in the tensor that stacks experts, of which it is one."""
    box, frame = (Box((number, *b.offset), (1, *b.shape)) for b in (stored.box, stored.frame))
    return dataclasses.replace(stored, box=box, frame=frame)


def _below(stored: StoredBox, rows: int) -> StoredBox:
    """Return the box that lies so many rows further down."""
    box, frame = (Box((b.offset[0] + rows, *b.offset[1:]), b.shape) for b in (stored.box, stored.frame))
    return dataclasses.replace(stored, box=box, frame=frame)
