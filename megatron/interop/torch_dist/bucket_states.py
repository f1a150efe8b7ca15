"""The distributed optimizer's state where it was saved as its buffers are: by bucket, or gathered into one object.

Kinds ``dp_reshardable`` and, before it, ``fully_sharded_bucket_space`` (a tensor for each bucket), and
``dp_zero_gather_scatter`` (an object for each model-parallel rank).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import plan_stage_layout
from megatron.core.sharding import Box, Piece, flat_range_boxes
from megatron.interop.megatron_torch.stage_parameters import LocalParameter, StageDescriber, in_fused_order
from megatron.interop.megatron_torch.stored_optimizer import (
    FLAT_STATES,
    FlatBuffer,
    alone_in_bucket,
    flat_bucket_size,
    is_weight_of,
    may_be_in_float8,
    optimized_apart,
    plan_flat_buffer,
)
from megatron.interop.megatron_torch.stored_values import LazyTensor
from megatron.interop.torch_dist.stored_boxes import BoxReader, StoredBox
from megatron.interop.torch_dist.stored_metadata import Segment, StoredMetadata

GROUP_PREFIX = "optimizer.distributed.dp_group_idx_"
_PART = r"(?:chained_(\d+)\.)?"
"""The number of the optimizer: with expert parallelism that of the experts is the second."""
_BUCKET = re.compile(
    _PART + re.escape(GROUP_PREFIX) + r"(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
_GATHERED = re.compile(_PART + re.escape(GROUP_PREFIX) + r"(\d+)\.param_state/shard_0_1")
_UNPADDED = "per_bucket_numel_unpadded/shard_0_1"

ReadWeight = Callable[[str, Box], torch.Tensor]
"""Gives a box of a weight by its native name."""


@dataclass(frozen=True)
class _Run:
    """Say that elements ``[start, end)`` of a buffer are an entry's values from its first on."""

    start: int
    end: int
    segment: Segment
    fields: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Buffer:
    """Hold what is stored of one kind of state in one buffer, and the number of elements that the buffer has."""

    runs: tuple[_Run, ...]
    length: int


_Buffers = dict[tuple[int, int, int], dict[str, _Buffer]]
"""The buffers of each kind of state, by optimizer, model-parallel rank and number of the buffer."""


class BucketStates:
    """Find the boxes of the optimizer's state in its buffers.

    Which parameter lies where follows from the model and from the layout that saved it; the copies of the weights
    among the states show that it was understood.
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
        """Yield (kind of state, parameter, box) of everything that is stored.

        Raises:
            CheckpointError: the buffers do not fit the model.
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
                        f"pipeline rank {pp_rank} is missing, or a part of it is"
                    )
                for parameter, start in self._placed(parameters, states["param"], pp_rank, number):
                    for kind, buffer in states.items():
                        for box in _parameter_boxes(parameter, start, buffer.runs):
                            yield FLAT_STATES[kind], parameter, box

    @property
    def _has_experts_apart(self) -> bool:
        return self.model.expert_model_parallel_size > 1

    def _groups(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (optimizer, pipeline rank, tensor rank, expert rank, model-parallel rank) of every group of buffers."""
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
        """Return each parameter's first element in the buffer."""
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
            f"elements, which do not lie as Megatron lays out the {needed} of its parameters"
        )

    def _layouts(self, parameters: Sequence[LocalParameter], pp_rank: int, number: int) -> Iterator[FlatBuffer]:
        sizes = [parameter.num_elements for parameter in parameters]
        by_arguments = flat_bucket_size(self.arguments, pp_rank, number, sum(sizes))
        alone = alone_in_bucket(parameters)
        for bucket_size, own_bucket in ((by_arguments, alone), (None, alone), (by_arguments, set()), (None, set())):
            yield plan_flat_buffer(sizes, bucket_size, own_bucket)

    def _is_weight(self, parameter: LocalParameter, start: int, runs: Sequence[_Run], *, in_float8: bool) -> bool:
        """Return whether the first and the last real element of a parameter in the buffer are the weight's.

        A copy of a weight is taken for one: the files hold the weight once.
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
        """Yield the runs of a bucket's first ``length`` elements; it begins at element ``base`` of the buffer.

        Shapes: a bucket is ``[elements]``, or ``[data-parallel ranks, elements of each]``.
        """
        entry = self.metadata.tensors[key]
        for chunk in entry.chunks:
            place = chunk.box.offset[-1] + (chunk.box.offset[0] * entry.shape[1] if len(entry.shape) == 2 else 0)
            end = min(place + chunk.box.num_elements, length)
            if end > place:
                yield _Run(base + place, base + end, chunk.segment)

    def _unpadded(self, prefix: str, number: int) -> Sequence[int] | None:
        """Return the elements of each bucket without the padding after it, where they are stored."""
        segment = self.metadata.objects.get(f"{prefix}.{_UNPADDED}")
        if segment is None:
            return None
        (lengths,) = self._reader.open(segment).value[0][number].values()
        return [int(length) for length in lengths]

    def _gathered_runs(self, segment: Segment) -> Iterator[tuple[int, str, _Run]]:
        """Yield (buffer, kind, run) of the state that one rank gathered."""
        value = self._reader.open(segment).value[0]
        if not isinstance(value, Mapping) or not value.get("buckets_coalesced"):
            raise CheckpointError(f"{segment.path}: the optimizer's state is in a layout that is not supported")
        for number in (key for key in value if isinstance(key, int)):
            ((dtypes, tensors),) = value[number].items()
            for kind in FLAT_STATES:
                if isinstance(tensors.get(kind), LazyTensor):
                    run = _Run(0, tensors[kind].num_elements, segment, (0, number, dtypes, kind))
                    yield number, kind, run


def _parameter_boxes(parameter: LocalParameter, start: int, runs: Sequence[_Run]) -> Iterator[StoredBox]:
    """Yield the boxes of a parameter's global tensor that runs of a buffer hold."""
    end = start + parameter.num_elements
    for run in runs:
        low, high = max(start, run.start), min(end, run.end)
        first = low - run.start
        for local in flat_range_boxes(parameter.local_shape, low - start, high - start):
            for piece in parameter.pieces:
                common = piece.local_box.intersect(local)
                if common is not None:
                    box, frame = _moved(common, piece), _moved(local, piece)
                    yield StoredBox(box, frame, run.segment, first, run.fields)
            first += local.num_elements


def _moved(box: Box, piece: Piece) -> Box:
    """Return a box of the local tensor as one of the global tensor."""
    offset = zip(box.offset, piece.local_offset, piece.global_box.offset, strict=True)
    return replace(box, offset=tuple(o - local + own for o, local, own in offset))
