"""Read Megatron-LM's ``torch_dist`` format at any layout, as global tensors under native names.

The distributed optimizer's state may be stored per bucket (``dp_reshardable``, formerly ``fully_sharded_bucket_space``)
or gathered into one object per model-parallel rank (``dp_zero_gather_scatter``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import COMMON_FILE, TensorInfo, refuse_misfits
from megatron.checkpoint.formats.megatron.arguments import check_arguments, check_hybrid, config_of_arguments
from megatron.checkpoint.formats.megatron.common_state import real_vocab_size, shared_state
from megatron.checkpoint.formats.megatron.parameter_keys import ParameterKey, native_branch_key, parse_key
from megatron.checkpoint.formats.megatron.rank_planner import FLOAT8_SCALING
from megatron.checkpoint.formats.megatron.stage_parameters import (
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    LocalParameter,
    StageDescriber,
    in_fused_order,
)
from megatron.checkpoint.formats.megatron.stored_optimizer import (
    FLAT_STATES,
    FlatBuffer,
    alone_in_bucket,
    flat_bucket_size,
    is_weight_of,
    may_be_in_float8,
    optimized_apart,
    plan_flat_buffer,
    scalars_of,
)
from megatron.checkpoint.formats.megatron.torch_dist_metadata import (
    BoxReader,
    Segment,
    StoredBox,
    StoredEntry,
    StoredMetadata,
    chunk_boxes,
    read_metadata,
)
from megatron.checkpoint.formats.megatron.torch_file_reader import NAMESPACE, LazyTensor, Record, TorchFile
from megatron.core.config_base import config_from_dict
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megatron.core.models.gpt import GPTConfig, padded_vocab_size
from megatron.core.parallel_config import ONE_RANK
from megatron.core.pipeline_parallel import plan_stage_layout
from megatron.core.sharding import Box, Shard, flat_range_boxes

GROUP_PREFIX = "optimizer.distributed.dp_group_idx_"
_PART = r"(?:chained_(\d+)\.)?"
"""Number of the optimizer: with expert parallelism the experts' optimizer is the second."""
_BUCKET = re.compile(
    _PART + re.escape(GROUP_PREFIX) + r"(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
_GATHERED = re.compile(_PART + re.escape(GROUP_PREFIX) + r"(\d+)\.param_state/shard_0_1")
_UNPADDED = "per_bucket_numel_unpadded/shard_0_1"

ReadWeight = Callable[[str, Box], torch.Tensor]
"""Reads a box of a weight by its native name."""


@dataclass(frozen=True)
class _Run:
    """Elements ``[start, end)`` of a buffer, stored as an entry's values from its first on."""

    start: int
    end: int
    segment: Segment
    fields: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Buffer:
    """Stored runs of one kind of state in one buffer, and the length of the buffer in elements."""

    runs: tuple[_Run, ...]
    length: int


_Buffers = dict[tuple[int, int, int], dict[str, _Buffer]]
"""Buffers of each kind of state, by optimizer, model-parallel rank and buffer number."""


class BucketStates:
    """Locate the boxes of the optimizer state in its buffers.

    The positions of parameters follow from the model and the saved layout. They are verified with the copies of the
    weights in the state.
    """

    def __init__(
        self,
        metadata: StoredMetadata,
        model: GPTConfig,
        padded_vocab_size: int,
        arguments: Mapping[str, Any],
        read_weight: ReadWeight,
    ) -> None:
        self.metadata = metadata
        self.model = model
        self.arguments = arguments
        self._read_weight = read_weight
        self._reader = BoxReader()
        self._describer = StageDescriber(model, padded_vocab_size)

    def boxes(self) -> Iterator[tuple[str, LocalParameter, StoredBox]]:
        """Yield (kind of state, parameter, box) of all stored state.

        Raises:
            CheckpointError: the buffers do not match the model.
            DamagedCheckpointError: an entry is missing or damaged.
        """
        try:
            yield from self._boxes(self._buffers())
        finally:
            self._reader.close()

    def _boxes(self, buffers: _Buffers) -> Iterator[tuple[str, LocalParameter, StoredBox]]:
        stages = plan_stage_layout(self.model, self.model.num_layers, self.model.pipeline_model_parallel_layout)
        for part, pp_rank, tp_rank, ep_rank, group in self._groups():
            for number, contents in enumerate(stages.chunks(pp_rank)):
                described = self._describer.parameters(
                    tp_rank,
                    contents.layer_numbers,
                    has_embedding=contents.has_embedding,
                    has_loss=contents.has_loss,
                    ep_rank=ep_rank,
                )
                ((parameters,), *of_experts) = optimized_apart([described], self._has_experts_apart)
                if part:
                    ((parameters,),) = of_experts
                states = buffers.get((part, group, number))
                if not parameters and states is None:
                    continue  # no experts
                if states is None or states.keys() != FLAT_STATES.keys():
                    raise CheckpointError(
                        f"{self.metadata.path}: the optimizer's buffer {number} of tensor-parallel rank {tp_rank}, "
                        f"pipeline rank {pp_rank} is missing or incomplete"
                    )
                for parameter, start in self._placed(parameters, states["param"], pp_rank, number):
                    for kind, buffer in states.items():
                        for box in _parameter_boxes(parameter, start, buffer.runs):
                            yield FLAT_STATES[kind], parameter, box

    @property
    def _has_experts_apart(self) -> bool:
        return self.model.expert_model_parallel_size > 1

    def _groups(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (optimizer, PP rank, TP rank, EP rank, model-parallel rank) of every group of buffers."""
        tp, ep, etp = (
            self.model.tensor_model_parallel_size,
            self.model.expert_model_parallel_size,
            self.model.parallel_sizes.expert_tp,
        )
        for pp_rank in range(self.model.pipeline_model_parallel_size):
            for tp_rank in range(tp):
                yield 0, pp_rank, tp_rank, 0, pp_rank * tp + tp_rank
            for ep_rank in range(ep) if self._has_experts_apart else ():
                for tp_rank in range(etp):
                    yield 1, pp_rank, tp_rank, ep_rank, (pp_rank * ep + ep_rank) * etp + tp_rank

    def _placed(
        self, parameters: Sequence[LocalParameter], buffer: _Buffer, pp_rank: int, number: int
    ) -> list[tuple[LocalParameter, int]]:
        """Return each parameter with its first element in the buffer."""
        layouts = [
            list(zip(ordered, layout.starts))
            for ordered in (parameters, in_fused_order(parameters))
            for layout in self._layouts(ordered, pp_rank, number)
            if layout.num_elements == buffer.length
        ]
        for in_float8 in (False, True) if may_be_in_float8(self.arguments) else (False,):
            for placed in layouts:
                if all(self._is_weight(p, start, buffer.runs, in_float8=in_float8) for p, start in placed):
                    return placed
        needed = sum(parameter.num_elements for parameter in parameters)
        raise CheckpointError(
            f"{self.metadata.path}: the optimizer's buffer {number} of pipeline rank {pp_rank} has {buffer.length} "
            f"elements, which does not match Megatron's layout of its {needed} parameter elements"
        )

    def _layouts(self, parameters: Sequence[LocalParameter], pp_rank: int, number: int) -> Iterator[FlatBuffer]:
        sizes = [parameter.num_elements for parameter in parameters]
        by_arguments = flat_bucket_size(self.arguments, pp_rank, number, sum(sizes))
        alone = alone_in_bucket(parameters)
        for bucket_size, own_bucket in ((by_arguments, alone), (None, alone), (by_arguments, set()), (None, set())):
            yield plan_flat_buffer(sizes, bucket_size, own_bucket)

    def _is_weight(self, parameter: LocalParameter, start: int, runs: Sequence[_Run], *, in_float8: bool) -> bool:
        """Return whether the first and last element of a parameter in the buffer match the weight.

        Replicas are not checked, since the files hold each weight only once.
        """
        boxes = [] if parameter.is_replica else list(_parameter_boxes(parameter, start, runs))
        for box, is_end in ((boxes[0], False), (boxes[-1], True)) if boxes else ():
            shape = box.box.shape
            corner = tuple(o + (size - 1 if is_end else 0) for o, size in zip(box.box.offset, shape, strict=True))
            one = Box(corner, (1,) * len(shape))
            weight = self._read_weight(f"model.{parameter.name}", one)
            main = self._reader.read(parameter.name, one, torch.float32, [box])
            whole = self._reader.read(parameter.name, box.box, torch.float32, [box]) if in_float8 else None
            if not is_weight_of(main, weight, whole):
                return False
        return True

    def _buffers(self) -> _Buffers:
        found: _Buffers = {}
        buckets: dict[tuple[int, int, int, str], dict[int, str]] = {}
        for key in self.metadata.tensors:
            match = _BUCKET.fullmatch(key)
            if match is not None:
                part, group, number, _, bucket, kind = match.groups()
                buckets.setdefault((int(part or 0), int(group), int(number), kind), {})[int(bucket)] = key
        for (part, group, number, kind), keys in buckets.items():
            prefix = next(iter(keys.values())).partition(".gbuf_idx_")[0]
            lengths = self._unpadded(prefix, number)
            runs: list[_Run] = []
            base = 0
            for bucket in range(len(keys)):
                if bucket not in keys:
                    raise CheckpointError(f"{self.metadata.path}: bucket {bucket} of {kind} is missing")
                size = math.prod(self.metadata.tensors[keys[bucket]].shape)
                length = size if lengths is None else min(lengths[bucket], size)
                runs += self._bucket_runs(keys[bucket], base, length)
                base += length
            found.setdefault((part, group, number), {})[kind] = _Buffer(tuple(runs), base)
        for key, segment in self.metadata.objects.items():
            match = _GATHERED.fullmatch(key)
            if match is not None:
                for number, kind, run in self._gathered_runs(segment):
                    found.setdefault((int(match[1] or 0), int(match[2]), number), {})[kind] = _Buffer((run,), run.end)
        return found

    def _bucket_runs(self, key: str, base: int, length: int) -> Iterator[_Run]:
        """Yield the runs of a bucket's first ``length`` elements; the bucket starts at element ``base`` of the buffer.

        Shapes: a bucket is ``[elements]``, or ``[data-parallel ranks, elements per rank]``.
        """
        entry = self.metadata.tensors[key]
        for chunk in entry.chunks:
            place = chunk.box.offset[-1] + (chunk.box.offset[0] * entry.shape[1] if len(entry.shape) == 2 else 0)
            end = min(place + chunk.box.num_elements, length)
            if end > place:
                yield _Run(base + place, base + end, chunk.segment)

    def _unpadded(self, prefix: str, number: int) -> Sequence[int] | None:
        """Return the number of elements of each bucket without its padding, if it is stored."""
        segment = self.metadata.objects.get(f"{prefix}.{_UNPADDED}")
        if segment is None:
            return None
        (lengths,) = self._reader.open(segment).value[0][number].values()
        return [int(length) for length in lengths]

    def _gathered_runs(self, segment: Segment) -> Iterator[tuple[int, str, _Run]]:
        """Yield (buffer, kind, run) of the state that one rank gathered."""
        value = self._reader.open(segment).value[0]
        if not isinstance(value, Mapping) or not value.get("buckets_coalesced"):
            raise CheckpointError(f"{segment.path}: the layout of the optimizer state is not supported")
        for number in (key for key in value if isinstance(key, int)):
            ((dtypes, tensors),) = value[number].items()
            for kind in FLAT_STATES:
                if isinstance(tensors.get(kind), LazyTensor):
                    run = _Run(0, tensors[kind].num_elements, segment, (0, number, dtypes, kind))
                    yield number, kind, run


def _parameter_boxes(parameter: LocalParameter, start: int, runs: Sequence[_Run]) -> Iterator[StoredBox]:
    """Yield the boxes of a parameter's global tensor that are stored in runs of a buffer."""
    end = start + parameter.num_elements
    for run in runs:
        low, high = max(start, run.start), min(end, run.end)
        first = low - run.start
        for local in flat_range_boxes(parameter.local_shape, low - start, high - start):
            for shard in parameter.shards:
                common = shard.local_box.intersect(local)
                if common is not None:
                    box, frame = _moved(common, shard), _moved(local, shard)
                    yield StoredBox(box, frame, run.segment, first, run.fields)
            first += local.num_elements


def _moved(box: Box, shard: Shard) -> Box:
    """Convert a box of the local tensor to a box of the global tensor."""
    offset = zip(box.offset, shard.local_offset, shard.global_box.offset, strict=True)
    return replace(box, offset=tuple(o - local + own for o, local, own in offset))


Complete = Callable[[Any, TorchFile], Any]
"""Converts a file's value to one that remains valid after the file is closed."""

_FIRST_GROUP = re.compile(r"(?:chained_0\.)?" + re.escape(GROUP_PREFIX) + r"0\.(optimizer|grad_scaler)/shard_0_1")
_RNG_STATE = re.compile(r"rng_state/shard_(\d+)\.(\d+)_\d+\.\d+")


def read_common(folder: Path) -> dict[str, Any]:
    """Read ``common.pt``, including its tensors.

    Raises:
        DamagedCheckpointError: the file is missing or damaged.
        CheckpointError: the file is not a supported ``common.pt``, or has no ``args``.
    """
    file = TorchFile(folder / COMMON_FILE)
    try:
        values = file.with_tensors(file.value)
    finally:
        file.close()
    if not isinstance(values, dict) or not isinstance(values.get("args"), Record) or values["args"].kind != NAMESPACE:
        raise CheckpointError(f"{file.path} contains no args, so the model configuration is unknown")
    return values


def recorded_torch_dist_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the configuration sections from a folder's ``args``.

    Raises:
        CheckpointError: the file is damaged, or is not a supported ``common.pt``.
    """
    return config_of_arguments(read_common(folder)["args"].attributes)


def number(value: Any) -> Any:
    """Return the number in a tensor of one element; other values are returned unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def with_optimizer_objects(common: Mapping[str, Any], metadata: StoredMetadata) -> dict[str, Any]:
    """Merge the distributed optimizer's separately stored objects into the shared values.

    The step and the loss scale are equal on all model-parallel ranks; the first rank's values are used.
    """
    values = dict(common)
    if isinstance(values.get("optimizer"), Mapping) and 0 in values["optimizer"]:
        values["optimizer"] = values["optimizer"][0]  # experts have a second optimizer
    for key in metadata.objects:
        match = _FIRST_GROUP.fullmatch(key)
        if match is not None:
            values["optimizer"] = {**(values.get("optimizer") or {}), match[1]: read_object(metadata, key)}
    return values


def _with_tensors(value: Any, file: TorchFile) -> Any:
    return file.with_tensors(value)


def read_random_states(metadata: StoredMetadata, complete: Complete = _with_tensors) -> dict[tuple[int, int], Any]:
    """Read each model-parallel rank's random number streams, by (TP rank, PP rank).

    ``complete`` converts a file's value to the returned value; by default it reads the tensors.

    Raises:
        DamagedCheckpointError: an entry is damaged.
    """
    found = {}
    for key in metadata.objects:
        match = _RNG_STATE.fullmatch(key)
        if match is not None:
            found[int(match[2]), int(match[1])] = read_object(metadata, key, complete)
    return found


def read_object(metadata: StoredMetadata, key: str, complete: Complete = _with_tensors) -> Any:
    """Read a stored object with ``complete``, which by default reads its tensors.

    Raises:
        DamagedCheckpointError: the entry is missing or damaged.
    """
    file = metadata.objects[key].open()
    try:
        value = complete(file.value, file)
    finally:
        file.close()
    if not isinstance(value, list) or len(value) != 1:
        raise DamagedCheckpointError(f"{file.path}: the entry of {key} contains no object")
    return value[0]


_STATES = ("main_param", "exp_avg", "exp_avg_sq", "momentum_buffer")
_HALVES = (torch.float16, torch.bfloat16)


class TorchDistSource:
    """Tensors of a ``torch_dist`` iteration folder; implements `CheckpointSource`.

    ``vocab_size`` is the tokenizer's vocabulary size; further rows are padding. By default it comes from ``args`` (see
    `real_vocab_size`).

    Raises:
        CheckpointError: the files do not hold a GPT model, or are inconsistent.
        DamagedCheckpointError: a file is missing or damaged.
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
        self._rows_of_parts: dict[tuple[str, int | None], int] = {}
        self.config = config_of_arguments(self.arguments)
        for key, entry in self._stored():
            self._add_entry(key, entry)
        self.padded_vocab_size = self._shapes.get(f"model.{WORD_EMBEDDING}", (0,))[0]
        self.config["model"]["vocab_size"] = vocab_size or real_vocab_size(
            self.arguments, self.padded_vocab_size, self.folder
        )
        tokenizer = self.config["tokenizer"]
        if tokenizer.get("tokenizer_type") == "NullTokenizer" and tokenizer.get("vocab_size") == self.padded_vocab_size:
            # The size includes the end-of-document id, which otherwise would have no row.
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
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor; only the needed pages are read."""
        info = self.tensors[name]
        return self._reader.read(name, info.whole if box is None else box, info.dtype, self._boxes[name])

    @refuse_misfits
    def random_states(self) -> Mapping[tuple[int, int], Any]:
        """Return the stored random number streams by (TP rank, PP rank)."""
        return read_random_states(self.metadata)

    @refuse_misfits
    def float8_scaling(self) -> Mapping[str, torch.Tensor]:
        """Return the state of FP8 delayed scaling by name; usually empty."""
        return self._float8_scaling

    def check_storages(self, index: int = 0, count: int = 1) -> None:
        """Verify the checksums of every ``count``-th entry, starting at ``index``.

        Raises:
            DamagedCheckpointError: an entry does not match its stored checksum; the message names the tensor.
        """
        self.metadata.check_storages(None, index, count)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
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
                f"{self.metadata.path} contains tensors of an unsupported kind of model or optimizer: {names}"
            )
        return found

    def _stored(self) -> Iterator[tuple[ParameterKey, StoredEntry]]:
        """Yield every tensor; the parts of a parameter that is stored in parts come in their order."""
        keys = sorted(self._keys.items(), key=lambda item: item[1].part or 0)
        return ((key, self.metadata.tensors[stored]) for stored, key in keys)

    def _add_entry(self, key: ParameterKey, entry: StoredEntry) -> None:
        whole = entry.shape if entry.original_shape is None else entry.original_shape
        shape = whole[1:] if key.is_stacked else whole
        if not shape:
            raise CheckpointError(f"{self.metadata.path}: {key.name(0)} has the unexpected shape {list(whole)}")
        start = 0
        if key.part is not None:
            parameter = self._name(key, 0), key.expert
            start = self._rows_of_parts.get(parameter, 0)
            self._rows_of_parts[parameter] = start + shape[0]
            shape = (start + shape[0], *shape[1:])
        if key.expert is not None:
            shape = (int(self.arguments["num_experts"]), *shape)
        for layer, box in chunk_boxes(entry, key.is_stacked):
            name = self._name(key, layer)
            if start:
                box = _below(box, start)
            if key.expert is not None:
                box = _of_expert(box, key.expert)
            self._boxes.setdefault(name, []).append(box)
            self._shapes[name] = shape
            if self._dtypes.setdefault(name, entry.dtype) != entry.dtype:
                raise CheckpointError(
                    f"{self.metadata.path}: {name} has two dtypes, {entry.dtype} and {self._dtypes[name]}"
                )

    def _name(self, key: ParameterKey, layer: int) -> str:
        name = key.name(layer)
        return native_branch_key(name) if "hybrid_override_pattern" in self.config["model"] else name

    def _model_config(self) -> GPTConfig:
        names = [name.split(".") for name in self._shapes if name.startswith("model.decoder.layers.")]
        numbers = {int(words[3]) for words in names}
        wanted = self.config["model"].get("num_layers")
        if wanted != len(numbers) or numbers != set(range(len(numbers))):
            raise CheckpointError(f"{self.metadata.path} contains {len(numbers)} layers, but its args say {wanted}")
        path = self.folder / COMMON_FILE
        try:
            model = config_from_dict(GPTConfig, self.config["model"])
        except ConfigurationError as error:
            problems = "; ".join(error.problems)
            raise CheckpointError(f"{path}: args do not describe a valid model: {problems}") from error
        check_hybrid(model, path)
        return model

    def _check_vocabulary(self, vocab_size: int | None) -> None:
        """Reject files whose vocabulary is too small for the caller's or was padded from a different size."""
        expected, divisor = self.model.vocab_size, self.config["model"].get("make_vocab_size_divisible_by")
        if vocab_size is not None and divisor is not None:
            expected = padded_vocab_size(vocab_size, divisor, self.model.tensor_model_parallel_size)
        is_other = vocab_size is not None and divisor is not None and expected != self.padded_vocab_size
        if is_other or expected > self.padded_vocab_size:
            raise CheckpointError(
                f"checkpoint {self.folder} has a padded vocabulary of {self.padded_vocab_size} rows, but the "
                f"{self.model.vocab_size} tokens of this run's tokenizer are padded to {expected}; use the "
                "checkpoint's tokenizer"
            )

    def _add_parameters(self) -> None:
        """Register the weights after checking their names and shapes against the model."""
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
            f"{name}: shape {list(self._shapes[name])} in the files, but {list(shape)} according to its args"
            for name, shape in wanted.items()
            if name in stored and not self._is_of_shape(name, shape)
        ]
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise CheckpointError(f"{self.folder} does not match its args: {'; '.join(problems[:4])}{more}")
        self._untrained = {f"model.{parameter.name}" for parameter in parameters if not parameter.is_trained}
        for name, shape in wanted.items():
            self._take_in(name, shape)

    def _is_of_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        stored = self._shapes[name]
        if name.endswith((WORD_EMBEDDING, OUTPUT_LAYER)):
            return len(stored) == len(shape) and stored[0] >= shape[0] and stored[1:] == shape[1:]
        return stored == shape

    def _add_states(self) -> bool:
        """Register the optimizer state, and return whether there is any."""
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
                    found = f"has shape {list(self._shapes[name])}" if name in self._shapes else "is missing"
                    raise CheckpointError(
                        f"{self.folder}: the optimizer tensor {name} {found}, but its weight has shape "
                        f"{list(info.global_shape)}"
                    )
                self._take_in(name, info.global_shape)
        return bool(kinds) or any(key.startswith("optimizer.") for key in self.metadata.objects)

    def _take_in(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.tensors[name] = TensorInfo(shape, self._dtypes[name])
        cut = ((stored, stored.box.intersect(info.whole)) for stored in self._boxes[name])
        self._boxes[name] = [dataclasses.replace(stored, box=box) for stored, box in cut if box is not None]
        found = sum(stored.box.num_elements for stored in self._boxes[name])
        if found != info.num_elements:
            raise DamagedCheckpointError(
                f"{self.folder}: only {found} of the {info.num_elements} elements of {name} are in the checkpoint"
            )


def _of_expert(stored: StoredBox, number: int) -> StoredBox:
    """Convert an expert's box to a box of the tensor that stacks all experts."""
    box, frame = (Box((number, *b.offset), (1, *b.shape)) for b in (stored.box, stored.frame))
    return dataclasses.replace(stored, box=box, frame=frame)


def _below(stored: StoredBox, rows: int) -> StoredBox:
    """Shift a box down by ``rows`` rows."""
    box, frame = (Box((b.offset[0] + rows, *b.offset[1:]), b.shape) for b in (stored.box, stored.frame))
    return dataclasses.replace(stored, box=box, frame=frame)
