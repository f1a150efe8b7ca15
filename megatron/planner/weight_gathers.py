"""Weights that are sharded over the data-parallel ranks: which are gathered together, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.distributed.param_layout import ParamLayout
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters, gathered_units
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents

FIRST, REST = -1, -2
"""Labels of `gathered_units` outside the layers: of an embedding that is used once, and of everything else."""


def parameters_of_buffers(
    model: GPTConfig, chunks: Sequence[StageContents], is_sharded: bool
) -> Iterator[tuple[list[ChunkParameter], list[int]]]:
    """Yield the trained parameters of each chunk: experts, and those that travel in fp8 where they are sharded, apart.

    With them go the labels of what is gathered together where weights are sharded.
    """
    for chunk in chunks:
        by_kind: dict[tuple[bool, bool], tuple[list[ChunkParameter], list[int]]] = {}
        for parameter, unit in zip(chunk_parameters(model, chunk), gathered_units(model, chunk), strict=True):
            if parameter.is_trained:
                kind = parameter.is_expert, is_sharded and parameter.is_sent_in_float8
                of_kind, units = by_kind.setdefault(kind, ([], []))
                of_kind.append(parameter)
                units.append(unit)
        yield from by_kind.values()


@dataclass(frozen=True)
class WholeWeights:
    """Hold how much of sharded weights is there whole: at any time, in a layer's backward pass, and when it begins.

    ``rest`` is in no layer and stays; beside it are ``layers``, one that runs and one that comes, or ``first``, the
    embedding that is used once and the layer behind it.
    """

    rest: int = 0
    layers: int = 0
    first: int = 0

    def beside(self, other: WholeWeights) -> WholeWeights:
        """Return these and others of the same layers."""
        return WholeWeights(self.rest + other.rest, self.layers + other.layers, self.first + other.first)

    def after(self, other: WholeWeights) -> WholeWeights:
        """Return these and those of another chunk, whose layers run at other times."""
        return WholeWeights(self.rest + other.rest, max(self.layers, other.layers), max(self.first, other.first))

    def times(self, size: int) -> WholeWeights:
        """Return so many times as much."""
        return WholeWeights(size * self.rest, size * self.layers, size * self.first)


def whole_weights(units: Sequence[int], layout: ParamLayout) -> WholeWeights:
    """Return the elements of a chunk's weights that are there whole; ``units`` has a label for each parameter."""
    sizes: dict[int, int] = {}
    for bucket in layout.buckets:
        label = units[bucket.slots[0].index]
        sizes[label] = sizes.get(label, 0) + bucket.num_elements
    layers = sorted((size for label, size in sizes.items() if label >= 0), reverse=True)
    first = sizes.get(FIRST, 0)
    return WholeWeights(sizes.get(REST, 0), sum(layers[:2]), first + sum(layers[:1]) if first else 0)


def num_gathers(label: int) -> int:
    """Return how often a unit's weights are gathered in the passes of one micro-batch.

    A layer's are freed between its passes, an embedding's are not needed in the backward pass, and the rest's stay.
    """
    return 2 if label >= 0 else 1
