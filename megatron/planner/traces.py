"""Traces of pieces of a model: operations, saved activations and messages of a layer or an end per micro-batch.

A tracer builds a piece, and runs it forward and backward on fake tensors. A micro-batch of one sample has its own
trace, since its tensors need no transposed copies. Traces of all larger sizes follow from traces of two and three
samples, since every number is affine in the number of samples. If these two traces have different operations, each size
has its own trace.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.core.config_base import config_to_dict, field_specs, field_value, from_fields
from megatron.core.models.gpt import GPTConfig
from megatron.core.pipeline_parallel import StageContents

PHASES = ("forward", "backward", "weights")
"""Passes of a piece; ``weights`` has the weight gradients if a schedule defers them."""
GEMM, ATTENTION, MEMORY = range(3)
"""Limit of an operation: matmul FLOPs, attention FLOPs, or the bytes that it moves."""
OPERATION_FIELDS = (
    *("phase", "kind", "itemsize", "batch", "rows", "inner", "columns", "num_bytes", "flops", "is_recomputed"),
    "is_expert",
)
LAUNCH_KINDS = ("operators", "triton_kernels", "autograd_functions")
"""Kinds of launches by the host."""
_OF_PIPELINE = (
    *("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    *("pipeline_model_parallel_layout", "pipeline_schedule", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "microbatch_group_size_per_virtual_pipeline_stage",
)
"""Fields on which no piece depends."""
FEWEST_SAMPLES = (2, 3)
"""Samples per micro-batch of the two traces from which the traces of all larger sizes follow."""


@dataclass(frozen=True)
class Sent:
    """One communication of a piece in one of its passes."""

    phase: int
    operation: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int


@dataclass(frozen=True)
class PieceMemory:
    """Device memory of a piece per micro-batch in bytes, without weights and weight gradients.

    ``kept`` are the saved activations, with the piece's input if it is saved. ``forward_peak`` and ``backward_peak``
    are the peaks while the piece runs forward and backward, with its input and its incoming gradient. ``deferred`` is
    kept after the backward pass for deferred weight gradients. ``logits`` is the part of the peaks that logits take.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    deferred: int = 0
    logits: int = 0


@dataclass(frozen=True, eq=False)
class PieceTrace:
    """Operations, communications and memory of a piece per micro-batch. ``prices`` caches its times.

    ``launches`` has the numbers of `LAUNCH_KINDS` for each pass; an autograd function counts in the pass that applies
    it.
    """

    operations: np.ndarray
    sent: tuple[Sent, ...]
    memory: PieceMemory
    launches: tuple[tuple[int, ...], ...]
    prices: dict[Any, Any] = field(default_factory=dict)

    def column(self, name: str) -> np.ndarray:
        """Return one field of all operations."""
        column: np.ndarray = self.operations[:, OPERATION_FIELDS.index(name)]
        return column

    @property
    def quantized_weight_bytes(self) -> int:
        """Return the bytes of the weights that the forward pass multiplies in FP8, or in NVFP4 with its scales."""
        sizes = self.column("batch") * self.column("inner") * self.column("columns")
        is_forward, itemsize = self.column("phase") == PHASES.index("forward"), self.column("itemsize")
        chosen = is_forward & (self.column("kind") == GEMM) & (itemsize <= 1)
        return int((sizes * np.where(itemsize < 1, itemsize + 1 / 16, itemsize))[chosen].sum())


@dataclass(frozen=True)
class TraceRequest:
    """A piece to trace, for ``micro_batch_size`` samples of ``seq_length`` tokens on a GPU with a compute capability.

    ``splits_backward`` defers weight gradients. ``fuses_accumulation`` accumulates them within the matmul, in float32
    (``reduces_in_float32``) or in the model's dtype.
    """

    model: GPTConfig
    contents: StageContents
    seq_length: int
    micro_batch_size: int
    capability: tuple[int, int]
    splits_backward: bool = False
    fuses_accumulation: bool = True
    reduces_in_float32: bool = True

    @property
    def traced(self) -> tuple[TraceRequest, ...]:
        """Return the requests of the micro-batch sizes from which this trace follows."""
        if self.micro_batch_size <= max(FEWEST_SAMPLES):
            return (self,)
        return tuple(dataclasses.replace(self, micro_batch_size=size) for size in FEWEST_SAMPLES)

    @functools.cached_property
    def key(self) -> str:
        """Return a hash of everything on which the trace depends."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["model"]
        return hashlib.sha256(repr((_structure(self.model), sorted(fields.items()))).encode()).hexdigest()[:24]


def request_to_json(request: TraceRequest) -> dict[str, Any]:
    return config_to_dict(request)


def request_from_json(values: Mapping[str, Any]) -> TraceRequest:
    """Return a request from the values that `request_to_json` wrote."""
    given = {name: _as_tuples(value) for name, value in values.items()}
    model = from_fields(GPTConfig, **{name: _as_tuples(value) for name, value in values["model"].items()})
    contents = StageContents(**{name: _as_tuples(value) for name, value in values["contents"].items()})
    return TraceRequest(**given | {"model": model, "contents": contents})


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value


# A search repeats the same configurations thousands of times.
@functools.lru_cache(maxsize=4096)
def _structure(model: GPTConfig) -> tuple[Any, ...]:
    """Return the fields of a configuration on which a piece depends."""
    names = (spec.name for spec in field_specs(GPTConfig))
    return tuple(field_value(model, name) for name in names if name not in _OF_PIPELINE)
