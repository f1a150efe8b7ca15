"""Interface of a model architecture: its names, its settings, and the mapping of its tensors to ours.

The same list of links serves import and export, for any box of a tensor on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import IDENTITY, FieldSpec, field_specs, field_value
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box, full_shards
from megatron.core.transformer import MOE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorLink:
    """Link between a box of our tensor ``native`` and the box of their tensor ``foreign`` with the same values.

    With ``is_transposed`` the last two dims of the boxes are swapped. If their tensor has fewer dims, the leading dims
    of our box are 1: our tensor stacks several of theirs. ``is_copy`` marks values that duplicate another of their
    tensors: they are written, but may be missing when read. With ``foreign_step`` only every ``foreign_step``-th
    element along the last dim of their box is used. Their values are ours plus ``foreign_offset``, rounded. Their
    tensor has ``foreign_ones`` dims of 1 before and after ours.
    """

    native: str
    native_box: Box
    foreign: str
    foreign_box: Box
    is_transposed: bool = False
    is_copy: bool = False
    foreign_step: int = 1
    foreign_offset: float = 0.0
    foreign_ones: tuple[int, int] = (0, 0)

    def foreign_part(self, native_part: Box) -> Box:
        """Return the bounding box in their tensor of a part of our box, including elements between strided values."""
        before, after = self.foreign_ones
        relative = native_part.relative_to(self.native_box.offset)
        dims = len(self.foreign_box.shape) - before - after
        stacked = len(relative.shape) - dims
        offset, shape = relative.offset[stacked:], relative.shape[stacked:]
        if self.is_transposed:
            offset, shape = _exchanged(offset), _exchanged(shape)
        if self.foreign_step > 1:
            offset = (*offset[:-1], offset[-1] * self.foreign_step)
            shape = (*shape[:-1], (shape[-1] - 1) * self.foreign_step + 1)
        offset, shape = (*(0,) * before, *offset, *(0,) * after), (*(1,) * before, *shape, *(1,) * after)
        return Box(tuple(o + base for o, base in zip(offset, self.foreign_box.offset, strict=True)), shape)

    def foreign_slices(self, native_part: Box) -> tuple[slice, ...]:
        """Return the slices of their tensor that select the values of a part of our box."""
        slices = self.foreign_part(native_part).slices
        if self.foreign_step == 1:
            return slices
        return (*slices[:-1], slice(slices[-1].start, slices[-1].stop, self.foreign_step))

    def to_native(self, values: torch.Tensor) -> torch.Tensor:
        """Convert their values to ours, with our dims; stacked tensors broadcast over leading dims of 1."""
        if self.foreign_step > 1:
            values = values[..., :: self.foreign_step]
        if self.foreign_offset:
            values = values - self.foreign_offset
        before, after = self.foreign_ones
        values = values.reshape(values.shape[before : values.dim() - after])
        return values.mT if self.is_transposed else values

    def to_foreign(self, values: torch.Tensor) -> torch.Tensor:
        """Convert our values to theirs, with their dims."""
        if self.foreign_offset:
            values = values + self.foreign_offset
        before, after = self.foreign_ones
        dims = len(self.foreign_box.shape) - before - after
        values = values.reshape(values.shape[values.dim() - dims :])
        values = values.mT if self.is_transposed else values
        return values.reshape((*(1,) * before, *values.shape, *(1,) * after))


def _exchanged(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def whole(native: str, foreign: str, shape: Sequence[int], *, is_transposed: bool = False) -> TensorLink:
    """Link two whole tensors; ``shape`` is the shape of ours."""
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
    """Link ``num_rows`` rows of our tensor to the same number of rows, or transposed columns, of theirs.

    ``trailing`` is the rest of our tensor's shape: one dim for a weight, none for a bias.
    """
    zeros = tuple(0 for _ in trailing)
    native_box = Box((native_start, *zeros), (num_rows, *trailing))
    foreign_box = Box((foreign_start, *zeros), (num_rows, *trailing))
    if is_transposed and trailing:
        foreign_box = Box(foreign_box.offset[::-1], foreign_box.shape[::-1])
    return TensorLink(native, native_box, foreign, foreign_box, is_transposed and bool(trailing))


def stacked_rows(native: str, parts: Iterable[tuple[str, int]], trailing: tuple[int, ...]) -> Iterator[TensorLink]:
    """Link our tensor to the tensors of theirs that it stacks, given by their names and numbers of rows."""
    start = 0
    for foreign, num_rows in parts:
        yield rows(native, start, foreign, 0, num_rows, trailing)
        start += num_rows


def rotated_rows(
    names: tuple[str, str],
    num_heads: int,
    channels: int,
    rotated: int,
    trailing: tuple[int, ...],
    *,
    has_pairs: bool,
) -> Iterator[TensorLink]:
    """Link the rows of heads, given our and their name; the first ``rotated`` of theirs are the last of ours.

    Ours are rotated in pairs of adjacent channels. Theirs are, too, if they have pairs, or else by halves.
    """
    native, foreign = names
    plain, half = channels - rotated, rotated // 2
    blocks = [(0, rotated, plain)] if plain else []
    if has_pairs:
        blocks.append((plain, 0, rotated))
    else:
        blocks += [(plain + 2 * pair + part, part * half + pair, 1) for pair in range(half) for part in (0, 1)]
    for first in range(0, num_heads * channels, channels):
        for start, their_start, count in blocks:
            yield rows(native, first + start, foreign, first + their_start, count, trailing)


def one_of(native: str, number: int, first_row: int, foreign: str, shape: tuple[int, ...]) -> TensorLink:
    """Link a whole tensor of theirs, of the given shape, to item ``number`` of our stacked tensor.

    There its values start at row ``first_row``.
    """
    zeros = tuple(0 for _ in shape)
    native_box = Box((number, first_row, *zeros[1:]), (1, *shape))
    return TensorLink(native, native_box, foreign, Box(zeros, shape))


def query_key_value_rows(
    num_heads: int, num_groups: int, head_dim: int, *, has_values: bool = True
) -> Iterator[tuple[str, int, int, int]]:
    """Yield (``q``, ``k`` or ``v``; first row in our fused tensor; first row among all of that kind; number of rows).

    Our rows are ``[q ... q, k, v]`` per key-value group, without values ``[q ... q, k]``; theirs are all queries, all
    keys, all values.
    """
    query_rows = num_heads // num_groups * head_dim
    for group in range(num_groups):
        start = group * (query_rows + (2 if has_values else 1) * head_dim)
        yield "q", start, group * query_rows, query_rows
        yield "k", start + query_rows, group * head_dim, head_dim
        if has_values:
            yield "v", start + query_rows + head_dim, group * head_dim, head_dim


def shapes_of(boxes: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape: the maximum end of its boxes in each dim. Names keep the order of the boxes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box in boxes:
        corner = tuple(o + n for o, n in zip(box.offset, box.shape, strict=True))
        known = shapes.get(name, corner)
        shapes[name] = tuple(max(pair) for pair in zip(known, corner, strict=True))
    return shapes


class Family(Protocol):
    """Conversion of the settings and tensor names of one model architecture."""

    @property
    def model_type(self) -> str:
        """Return the ``model_type`` in config.json."""

    @property
    def architecture(self) -> str:
        """Return the class name in ``architectures`` of config.json."""

    @property
    def base_prefix(self) -> str:
        """Return the prefix of all tensor names except the output layer's; files of the base model omit it."""

    @property
    def other_names(self) -> Sequence[tuple[str, str]]:
        """Return pairs of parts of tensor names: as in links, and as in some folders or in transformers' modules."""

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe; record unsupported settings in ``settings``."""

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model, as far as the architecture can express them, without token ids."""

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in the transformers model; a tied output layer has none."""

    def is_buffer(self, name: str, config: GPTConfig) -> bool:
        """Return whether a tensor is a buffer that older files contain, or otherwise no weight of the model."""


def names_in_files(family: Family, name: str) -> Iterator[str]:
    """Yield the names under which a folder or a model in memory may have a tensor of a link."""
    yield name
    yield name.removeprefix(family.base_prefix)
    for part, other in family.other_names:
        if part in name:
            yield name.replace(part, other)


def model_features(config: GPTConfig) -> dict[str, Any]:
    """Return all features of a configuration that determine which tensors a model has and what it computes.

    Two models are the same if and only if these are equal. Dropout, initialization, layout and dtype are not included.
    """
    config_class: type = type(config)
    specs = {spec.name: spec for spec in field_specs(config_class)}

    unused = _unused_features(config)

    def counts(spec: FieldSpec) -> bool:
        if spec.options.where is None or spec.options.role == "shape":  # a shape belongs to the model, used or not
            return True
        name, value = spec.options.where
        return field_value(config, name) == value and counts(specs[name])

    found = (spec for spec in specs.values() if spec.options.role in IDENTITY and counts(spec))
    names = (spec.options.seen_as or spec.name for spec in found)
    features = {name: field_value(config, name) for name in names if name not in unused}
    features["proportional_rope"] = (
        config.rope.rope_type == "proportional" and config.rotary_dim < config.of_global_layers.rotary_width
    )
    if config.moe.num_experts is not None:
        # Without a factor, the weights are as with a factor of 1.
        features["moe_router_topk_scaling_factor"] = config.moe.moe_router_topk_scaling_factor or 1.0
        features["routes_by_sinkhorn"] = config.moe.routes_by_sinkhorn
    if config.mla.multi_latent_attention:
        # mscale_all_dim scales MLA's attention scores even without YaRN.
        features["mscale_all_dim"] = config.rope.mscale_all_dim if config.scales_latent_scores else 0.0
    return features


_YARN = frozenset(
    (
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
    """Return the features without effect on a model: router precision, and fields of features that it does not use."""
    unused = {"moe_router_dtype", "rope_type"}
    if config.mla.multi_latent_attention:
        unused |= {"kv_channels", "rotary_dim", "score_scale", "rotary_interleaved"}
    # A factor of 1 leaves RoPE unchanged. MLA uses YaRN by default.
    if not config.stretches_positions:
        unused |= _YARN
    if config.moe.num_experts is not None and all(parts.feed_forward in (None, MOE) for parts in config.layer_parts):
        unused.add("ffn_hidden_size")
    return unused


def dropout_fields(settings: Settings, of_layers: str, of_embeddings: str, default: float) -> dict[str, Any]:
    """Return the fields of the dropout of layers and embeddings, given the names of their settings."""
    dropout, embedding = settings.number(of_layers, default), settings.number(of_embeddings, default)
    for name, value in ((of_layers, dropout), (of_embeddings, embedding)):
        if value >= 1:
            settings.refuse(f"{name} is {value}; a number below 1 is expected")
    return {"hidden_dropout": dropout, "embedding_dropout": None if embedding == dropout else embedding}


def dtype_fields(settings: Settings) -> dict[str, Any]:
    """Return the dtype fields of a GPTConfig, float32 by default."""
    dtype = settings.dtype() or "float32"
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
