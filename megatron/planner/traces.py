"""Traces of pieces of a model: what a layer or an end computes, keeps and sends for a micro-batch.

A tracer builds a piece, and runs it forward and backward on fake tensors. One sample per micro-batch is traced
itself, since tensors need no transposed copies then. Two and three samples are traced for all other sizes: every
number is affine in the number of samples. If these two have other operations, each size is traced itself.
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
"""The passes of a piece; ``weights`` has the weight gradients where a schedule defers them."""
GEMM, ATTENTION, MEMORY = range(3)
"""What limits an operation: matmul FLOPs, attention FLOPs, or the bytes that it moves."""
OPERATION_FIELDS = (
    *("phase", "kind", "itemsize", "batch", "rows", "inner", "columns", "num_bytes", "flops", "is_recomputed"),
    "is_expert",
)
LAUNCH_KINDS = ("operators", "triton_kernels", "autograd_functions")
"""What the host launches."""
_OF_PIPELINE = (
    *("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    *("pipeline_model_parallel_layout", "pipeline_schedule", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "microbatch_group_size_per_virtual_pipeline_stage",
)
"""Fields that no piece depends on."""
FEWEST_SAMPLES = (2, 3)
"""Samples per micro-batch at which a piece is traced for every larger size."""


@dataclass(frozen=True)
class Sent:
    """Describe communications of a piece that are alike: their pass, and how many there are of so many bytes."""

    phase: int
    operation: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int


@dataclass(frozen=True)
class PieceMemory:
    """Hold bytes of a piece and micro-batch on the device, weights and gradients of weights left out.

    ``kept`` is what the backward pass needs, the piece's input included where it is saved. ``forward_peak`` and
    ``backward_peak`` are the most that is live while the piece runs forward and backward, of which the input and the
    incoming gradient are a part. ``deferred`` is what deferred weight gradients keep after the backward pass, and
    ``logits`` the part of the peaks that logits are.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    deferred: int = 0
    logits: int = 0


@dataclass(frozen=True, eq=False)
class PieceTrace:
    """Hold the operations, communications and memory of a piece for a micro-batch. ``prices`` caches its times.

    ``launches`` has for each pass the numbers of `LAUNCH_KINDS`; an autograd function counts in the forward pass.
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
    def float8_weights(self) -> int:
        """Return the elements of weights that the forward pass multiplies in fp8."""
        sizes = self.column("batch") * self.column("inner") * self.column("columns")
        is_forward = self.column("phase") == PHASES.index("forward")
        chosen = is_forward & (self.column("kind") == GEMM) & (self.column("itemsize") == 1)
        return int(sizes[chosen].sum())


@dataclass(frozen=True)
class TraceRequest:
    """Name the piece to trace, and how: ``micro_batch_size`` samples of ``seq_length`` tokens on a GPU of a capability.

    ``splits_backward`` defers weight gradients. ``fuses_accumulation`` adds them in the matmul to gradients in float32
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
        """Return the requests of the micro-batch sizes from which the trace follows."""
        if self.micro_batch_size <= max(FEWEST_SAMPLES):
            return (self,)
        return tuple(dataclasses.replace(self, micro_batch_size=size) for size in FEWEST_SAMPLES)

    @functools.cached_property
    def key(self) -> str:
        """Return a hash of everything that the trace depends on."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["model"]
        return hashlib.sha256(repr((_structure(self.model), sorted(fields.items()))).encode()).hexdigest()[:24]


def request_to_json(request: TraceRequest) -> dict[str, Any]:
    return config_to_dict(request)


def request_from_json(values: Mapping[str, Any]) -> TraceRequest:
    """Return the request that `request_to_json` has written."""
    given = {name: _as_tuples(value) for name, value in values.items()}
    model = from_fields(GPTConfig, **{name: _as_tuples(value) for name, value in values["model"].items()})
    contents = StageContents(**{name: _as_tuples(value) for name, value in values["contents"].items()})
    return TraceRequest(**given | {"model": model, "contents": contents})


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value


# A search asks for the same configurations thousands of times.
@functools.lru_cache(maxsize=4096)
def _structure(model: GPTConfig) -> tuple[Any, ...]:
    """Return the fields of a configuration that a piece depends on."""
    names = (spec.name for spec in field_specs(GPTConfig))
    return tuple(field_value(model, name) for name in names if name not in _OF_PIPELINE)
