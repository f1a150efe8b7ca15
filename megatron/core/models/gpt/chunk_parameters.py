"""The parameters of a model chunk in any layout, read from the model built on torch's meta device.

The parameters are built once per structure: for the model's ends, and for one layer of each kind. A parameter that is
added to a layer is therefore counted everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.config_base import field_specs, field_value
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel import StageContents

if TYPE_CHECKING:
    from megatron.core.sharding import ParamSpec
    from megatron.core.transformer import LayerParts

# Torch is imported in the function that builds layers, so that an invalid command line is rejected before.


@dataclass(frozen=True)
class ChunkParameter:
    """A parameter's local size and, if its gradient is a partial sum, the number of tensor-parallel ranks with a copy.

    ``is_tied`` means that the other end of the pipeline holds it too, ``is_trained`` that it has a gradient,
    ``is_sent_in_float8`` that it is all-gathered in FP8, with ``num_scales``, and ``is_matrix`` that it is a weight
    between the embeddings and the output layer. ``is_expert`` means that it is replicated over the expert-data-parallel
    group instead of the data-parallel group. ``reads`` and ``writes`` are the numbers of elements that a matrix reads
    and writes on this rank per token of the tensor-parallel group, 0 for other parameters. ``name`` is the parameter's
    name within its layer, or in the model if it is outside of the layers. ``quantized_bytes`` are the bytes of its
    codes and scales if it is quantized.
    """

    size: int
    copies_to_sum: int = 0
    is_tied: bool = False
    is_trained: bool = True
    is_sent_in_float8: bool = False
    num_scales: int = 1
    is_matrix: bool = False
    is_expert: bool = False
    reads: int = field(default=0, compare=False)
    writes: int = field(default=0, compare=False)
    name: str = field(default="", compare=False)
    quantized_bytes: int | None = None

    def num_bytes(self, element: int) -> int:
        """Return the bytes of its values; ``element`` is the number of bytes of the model's dtype."""
        return self.size * element if self.quantized_bytes is None else self.quantized_bytes


@dataclass(frozen=True)
class _LayerParameters:
    """Parameters of the model's ends or of one layer: those before a chunk's layers, and the others.

    ``labels`` are those of `unit_labels`.
    """

    front: tuple[ChunkParameter, ...]
    back: tuple[ChunkParameter, ...]
    front_labels: tuple[int, ...]
    back_labels: tuple[int, ...]


_OTHER_FIELDS = (
    *("num_layers", "pipeline_model_parallel_size", "context_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    *("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout", "pipeline_schedule"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
)
"""Fields that a search varies and that do not affect parameters, or affect them only through a layer's kind."""
_FIELDS = tuple(spec.name for spec in field_specs(GPTConfig) if spec.name not in _OTHER_FIELDS)
_built: dict[Hashable, dict[Hashable, _LayerParameters]] = {}


def chunk_parameters(model: GPTConfig, chunk: StageContents) -> list[ChunkParameter]:
    """Return a chunk's parameters in model order."""
    known = _known_parameters(model)
    ends = _ends(known, model, chunk)
    layers = (_layer(known, model, number) for number in chunk.layer_numbers)
    return [*ends.front, *(parameter for layer in layers for parameter in layer.back), *ends.back]


def gathered_units(model: GPTConfig, chunk: StageContents) -> list[int]:
    """Return a label for each of a chunk's parameters, in model order.

    With FSDP weights with the same label are gathered together. A layer's label is its number. Outside the layers
    labels are those of `unit_labels`.
    """
    known = _known_parameters(model)
    ends = _ends(known, model, chunk)
    layers = [number for number in chunk.layer_numbers for _ in _layer(known, model, number).back]
    return [*ends.front_labels, *layers, *ends.back_labels]


def _ends(known: dict[Hashable, _LayerParameters], model: GPTConfig, chunk: StageContents) -> _LayerParameters:
    contents = StageContents((), has_embedding=chunk.has_embedding, has_loss=chunk.has_loss)
    # The layers of MTP modules have the kind of the model's last layer.
    kind = (chunk.has_embedding, chunk.has_loss, _kind(model, model.num_layers - 1), _kind(model, model.num_layers))
    return _layer_parameters(known, model, contents, kind)


def _layer(known: dict[Hashable, _LayerParameters], model: GPTConfig, number: int) -> _LayerParameters:
    contents = StageContents((number,), has_embedding=False, has_loss=False)
    return _layer_parameters(known, model, contents, _kind(model, number))


def _kind(model: GPTConfig, number: int) -> tuple[LayerParts, bool, bool, bool, bool]:
    """Return the properties of a layer that determine its parameters, apart from fields that all layers share."""
    parts, in_float8 = model.parts_of(number), model.fp8.is_in_float8(number, model.num_layers)
    has_keys = model.key_value_sources[model.kind_of(number)] is None
    return parts, in_float8, model.is_global(number), model.has_indexer(number), has_keys


def _layer_parameters(
    known: dict[Hashable, _LayerParameters], model: GPTConfig, contents: StageContents, kind: Hashable
) -> _LayerParameters:
    if kind not in known:
        known[kind] = _build(model, contents)
    return known[kind]


def _known_parameters(model: GPTConfig) -> dict[Hashable, _LayerParameters]:
    """Return the cache of layers for all configurations with the same parameter-relevant fields."""
    # A search evaluates the same configurations thousands of times.
    known = _built.get(model)
    if known is None:
        known = _built[model] = _built.setdefault(tuple(field_value(model, name) for name in _FIELDS), {})
    return known


def _build(model: GPTConfig, contents: StageContents) -> _LayerParameters:
    """Build a chunk on the meta device and describe its parameters."""
    from megatron.core.device import Device
    from megatron.core.distributed import is_sent_in_float8, num_float8_scales, unit_labels
    from megatron.core.models import compute_in_float8
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import is_orthogonalized
    from megatron.core.parallel_state import ExpertGroups, describe_parallel_state
    from megatron.core.sharding import held_of, quantized_of, spec_of
    from megatron.core.tensor_parallel import RngStreams

    sizes = model.parallel_sizes
    alone = ParallelSizes(tp=sizes.tp, ep=sizes.ep, etp=sizes.etp)
    state = describe_parallel_state(0, math.lcm(sizes.tp, sizes.ep * sizes.expert_tp), alone)
    chunk = GPTModel(
        model,
        state.tp,
        RngStreams(Device("cpu"), None, state.place),
        seed=None,
        device="meta",
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
        experts=ExpertGroups.of(state) if model.moe.num_experts is not None else None,
    )
    compute_in_float8((chunk,), model, "meta")
    layers = [layer for block in chunk.blocks for layer in block.layers.values()]
    labels = unit_labels(chunk, layers, chunk.first_alone)
    front: list[tuple[ChunkParameter, int]] = []
    back: list[tuple[ChunkParameter, int]] = []
    for name, parameter in chunk.named_parameters():
        if contents.layer_numbers and labels[id(parameter)] < 0:
            continue  # Outside the layers, so that it belongs to the ends.
        described = ChunkParameter(
            parameter.numel(), is_trained=parameter.requires_grad, name=_name_in_layer(name, contents)
        )
        # A parameter that was just added may have no `ParamSpec` yet.
        if hasattr(parameter, "spec"):
            spec, in_float8 = spec_of(parameter), is_sent_in_float8(parameter)
            writes, reads = _widths(model, spec, parameter.shape)
            described = dataclasses.replace(
                described,
                copies_to_sum=spec.num_replicas if "tp" in spec.gradient_sum_axes else 0,
                is_tied=spec.is_tied_over_pipeline,
                is_sent_in_float8=in_float8,
                num_scales=num_float8_scales(parameter) if in_float8 else 1,
                is_matrix=is_orthogonalized(spec),
                is_expert=spec.is_expert,
                reads=reads,
                writes=writes,
                quantized_bytes=None
                if quantized_of(parameter) is None
                else sum(held.nbytes for _, held in held_of(parameter)),
            )
        (front if name.startswith("embedding.") else back).append((described, labels[id(parameter)]))
    return _LayerParameters(
        tuple(parameter for parameter, _ in front),
        tuple(parameter for parameter, _ in back),
        tuple(label for _, label in front),
        tuple(label for _, label in back),
    )


def _name_in_layer(name: str, contents: StageContents) -> str:
    """Remove the name of a layer from a parameter's name."""
    for number in contents.layer_numbers:
        name = name.removeprefix(f"decoder.layers.{number}.")
    return name


def _widths(model: GPTConfig, spec: ParamSpec, local_shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of elements that a matrix writes and reads per token.

    Sequence parallelism shards the activations that are not sharded by feature.
    """
    if len(local_shape) < 2:
        return 0, 0
    is_sharded = model.sequence_parallel and not spec.is_expert
    shape, parts = (spec.global_shape, model.tensor_model_parallel_size) if is_sharded else (local_shape, 1)
    return shape[-2] // parts, shape[-1] // parts
