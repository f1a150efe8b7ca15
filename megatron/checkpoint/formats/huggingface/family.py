"""The interface of a model family: its names, its settings, and which Hugging Face tensors hold its weights.

One list of links serves both directions, and any box of a tensor of either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import IDENTITY, FieldSpec, field_specs, field_value
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box, full_shards

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorLink:
    """Link a box of our tensor ``native`` to the box of their tensor ``foreign`` that holds the same values.

    With ``is_transposed`` one box is the other with its last two dims exchanged. Where theirs has fewer dims, the first
    ones of ours are 1: it is one of the tensors that ours stacks. ``is_copy`` marks values that another of their
    tensors has too: they are written, and need not be there. With ``foreign_step`` every so manieth place of their
    last dim counts, from the box's first to its last.
    """

    native: str
    native_box: Box
    foreign: str
    foreign_box: Box
    is_transposed: bool = False
    is_copy: bool = False
    foreign_step: int = 1

    def foreign_part(self, native_part: Box) -> Box:
        """Return the box of their tensor that holds a part of this link's box of ours, and what lies between."""
        relative, dims = native_part.relative_to(self.native_box.offset), len(self.foreign_box.shape)
        stacked = len(relative.shape) - dims
        offset, shape = relative.offset[stacked:], relative.shape[stacked:]
        if self.is_transposed:
            offset, shape = _exchanged(offset), _exchanged(shape)
        if self.foreign_step > 1:
            offset = (*offset[:-1], offset[-1] * self.foreign_step)
            shape = (*shape[:-1], (shape[-1] - 1) * self.foreign_step + 1)
        return Box(tuple(o + base for o, base in zip(offset, self.foreign_box.offset, strict=True)), shape)

    def foreign_slices(self, native_part: Box) -> tuple[slice, ...]:
        """Return where in their tensor the values of a part of this link's box of ours are."""
        slices = self.foreign_part(native_part).slices
        if self.foreign_step == 1:
            return slices
        return (*slices[:-1], slice(slices[-1].start, slices[-1].stop, self.foreign_step))

    def to_native(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of theirs with our dims; those that we stack are broadcast over dims of 1."""
        if self.foreign_step > 1:
            values = values[..., :: self.foreign_step]
        return values.mT if self.is_transposed else values

    def to_foreign(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of ours with their dims."""
        values = values.reshape(values.shape[values.dim() - len(self.foreign_box.shape) :])
        return values.mT if self.is_transposed else values


def _exchanged(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def whole(native: str, foreign: str, shape: Sequence[int], *, is_transposed: bool = False) -> TensorLink:
    """Link two whole tensors; ``shape`` is ours."""
    box = full_shards(shape)[0].global_box
    foreign_box = full_shards(tuple(reversed(box.shape)))[0].global_box if is_transposed else box
    return TensorLink(native, box, foreign, foreign_box, is_transposed)


def rows(
    native: str,
    native_start: int,
    foreign: str,
    foreign_start: int,
    num_rows: int,
    trailing: tuple[int, ...],
    *,
    is_transposed: bool = False,
) -> TensorLink:
    """Link ``num_rows`` rows of our tensor to as many rows, or transposed columns, of theirs.

    ``trailing`` is the rest of our tensor's shape: one dim for a weight, none for a bias.
    """
    zeros = tuple(0 for _ in trailing)
    native_box = Box((native_start, *zeros), (num_rows, *trailing))
    foreign_box = Box((foreign_start, *zeros), (num_rows, *trailing))
    if is_transposed and trailing:
        foreign_box = Box(foreign_box.offset[::-1], foreign_box.shape[::-1])
    return TensorLink(native, native_box, foreign, foreign_box, is_transposed and bool(trailing))


def one_of(native: str, number: int, first_row: int, foreign: str, shape: tuple[int, ...]) -> TensorLink:
    """Link a whole tensor of theirs, of this shape, to the tensor of that number in the stack that ours is.

    There it begins at ``first_row``.
    """
    zeros = tuple(0 for _ in shape)
    native_box = Box((number, first_row, *zeros[1:]), (1, *shape))
    return TensorLink(native, native_box, foreign, Box(zeros, shape))


def query_key_value_rows(num_heads: int, num_groups: int, head_dim: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (``q``, ``k`` or ``v``; first row in our fused tensor; first row among all of that kind; number of rows).

    Our rows are ``[q ... q, k, v]`` for every key-value group; theirs are all queries, all keys, all values.
    """
    query_rows = num_heads // num_groups * head_dim
    for group in range(num_groups):
        start = group * (query_rows + 2 * head_dim)
        yield "q", start, group * query_rows, query_rows
        yield "k", start + query_rows, group * head_dim, head_dim
        yield "v", start + query_rows + head_dim, group * head_dim, head_dim


def shapes_of(boxes: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape: the corner of the furthest of its boxes. Names keep the order of the boxes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box in boxes:
        corner = tuple(o + n for o, n in zip(box.offset, box.shape, strict=True))
        known = shapes.get(name, corner)
        shapes[name] = tuple(max(pair) for pair in zip(known, corner, strict=True))
    return shapes


class Family(Protocol):
    """Translate the settings and the tensor names of one kind of model."""

    @property
    def model_type(self) -> str:
        """Return the family's name in config.json."""

    @property
    def architecture(self) -> str:
        """Return the class of the language model in config.json."""

    @property
    def base_prefix(self) -> str:
        """Return what all tensor names but the output layer's begin with; files of the bare model leave it out."""

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe; what is not supported is noted in the settings."""

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of such a model, as far as the family can express them; ids of tokens are left out."""

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in the family's own model; a tied output layer has none."""

    def is_buffer(self, name: str) -> bool:
        """Tell whether older files hold this tensor although it is no weight."""


def model_features(config: GPTConfig) -> dict[str, Any]:
    """Return everything of a configuration that decides which tensors a model has and what it computes.

    Two models are the same exactly where these are; dropout, initialization, layout and dtype do not count.
    """
    config_class: type = type(config)
    specs = {spec.name: spec for spec in field_specs(config_class)}

    unused = _unused_features(config)

    def counts(spec: FieldSpec) -> bool:
        if spec.options.where is None or spec.options.role == "shape":  # a shape is the model's, used or not
            return True
        name, value = spec.options.where
        return field_value(config, name) == value and counts(specs[name])

    found = (spec for spec in specs.values() if spec.options.role in IDENTITY and counts(spec))
    names = (spec.options.seen_as or spec.name for spec in found)
    features = {name: field_value(config, name) for name in names if name not in unused}
    if config.mla.multi_latent_attention:
        # Scores of latent attention grow beside plain positions too.
        features["mscale_all_dim"] = config.rope.mscale_all_dim if config.scales_latent_scores else 0.0
    return features


_YARN = frozenset(
    (
        "rope_type",
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "yarn_correction_range_round_to_int",
    )
)


def _unused_features(config: GPTConfig) -> set[str]:
    """Return the features that make no difference to a model: shapes of layers that it has none of, and precision."""
    unused = {"moe_router_dtype"}
    if config.mla.multi_latent_attention:
        unused |= {"kv_channels", "rotary_dim", "score_scalar", "rotary_interleaved"}
    # A factor of 1 leaves positions as they are; latent attention stretches them unless it is told not to.
    unused |= {"rope_type"} if config.stretches_positions else _YARN
    if config.moe.num_experts is not None and all(config.moe_layers):
        unused.add("ffn_hidden_size")
    return unused


def dtype_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of a GPTConfig that say what the weights are stored in; float32 where nothing is said."""
    dtype = settings.dtype() or "float32"
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
