"""Weights that are sharded over the data-parallel ranks: which are gathered together, and how often."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planning.chunk_parameters import chunk_parameters

FIRST, REST = -1, -2
"""Labels of what is in no layer: of an embedding that is used once, and of everything else."""


def gathered_units(model: GPTConfig, chunk: StageContents) -> list[int]:
    """Return a label for each of a chunk's parameters, in the order of the model: its layer's number, or one beside."""
    begin = StageContents((), has_embedding=chunk.has_embedding, has_loss=False)
    is_shared = chunk.has_loss and (not model.untie_embeddings_and_output_weights or model.num_further_tokens > 0)
    labels = [REST if is_shared else FIRST] * len(chunk_parameters(model, begin))
    for number in chunk.layer_numbers:
        layer = StageContents((number,), has_embedding=False, has_loss=False)
        labels += [number] * len(chunk_parameters(model, layer))
    return labels + [REST] * (len(chunk_parameters(model, chunk)) - len(labels))


def num_gathers(label: int) -> int:
    """Return how often a unit's weights are gathered in the passes of one micro-batch.

    A layer's are freed between its passes, an embedding's are not needed in the backward pass, and the rest's stay.
    """
    return 2 if label >= 0 else 1
