"""Declaration of a kind of recurrent layer: its names, shapes, checks and FLOPs, and the class of its layers.

`RECURRENT_KINDS` in `hybrid_config.py` lists the kinds. Importing this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Generic, NamedTuple, TypeVar

from megatron.core.config_base import Config, field_specs
from megatron.core.context_parallel import copies_of_key_value_heads
from megatron.core.errors import choices, divisors
from megatron.core.parallel_config import ParallelConfig

Flags = TypeVar("Flags", bound=Config, contravariant=True)


class RecurrentHeads(NamedTuple):
    """Number of heads of a recurrent layer, the field with this number, and the number of groups that share inputs."""

    field: str
    number: int
    groups: int


class RecurrentKind(ABC, Generic[Flags]):
    """Kind of recurrent layer, as configuration, checks and planner know it.

    ``Flags`` is the class with the flags that set the shapes, which `HybridConfig` inherits. Other kinds may share it.
    """

    name: ClassVar[str]
    """Name in patterns, and value of --experimental-attention-variant for a `LinearAttentionKind`."""
    symbol: ClassVar[str]
    """Symbol in --hybrid-override-pattern."""
    title: ClassVar[str]
    """Name in messages."""
    layer: ClassVar[str]
    """Module and class of the layers, a subclass of `RecurrentMixer`, which needs torch and these declarations."""
    flags: ClassVar[type]
    """The class ``Flags``."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Fields of ``flags`` that the layers do not read."""
    module_name: ClassVar[str] = "self_attention"
    """Name of the layer's module in a layer without feed-forward."""
    num_linear_layers: ClassVar[int] = 2
    """Number of linear layers: the input projection, the output projection, and any others."""
    shares_groups: ClassVar[bool] = False
    """Whether several tensor-parallel ranks may share a group of heads."""

    def reads(self, field: str) -> bool:
        """Return whether the layers read a field of `HybridConfig`."""
        return field not in self.unread and any(field == spec.name for spec in field_specs(self.flags))

    @abstractmethod
    def projection_rows(self, hybrid: Flags, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of each tensor that the input projection stacks."""

    @abstractmethod
    def inner_size(self, hybrid: Flags, hidden_size: int) -> int:
        """Return the width of the input of the output projection."""

    @abstractmethod
    def heads(self, hybrid: Flags, hidden_size: int) -> RecurrentHeads:
        """Return the number of heads, which are sharded over tensor-parallel ranks."""

    @abstractmethod
    def recurrence_multiply_adds(self, hybrid: Flags, hidden_size: int) -> float:
        """Return the multiply-adds per token of the recurrence with its convolution."""

    def gemm_multiply_adds(self, hybrid: Flags, hidden_size: int) -> int:
        """Return the multiply-adds per token of the linear layers."""
        return hidden_size * (sum(self.projection_rows(hybrid, hidden_size)) + self.inner_size(hybrid, hidden_size))

    @abstractmethod
    def check_shapes(self, hybrid: Flags, hidden_size: int, layout: ParallelConfig) -> Iterator[str]:
        """Yield a problem for each size that is invalid, or that the layout cannot shard."""

    def check_quantized_widths(self, hybrid: Flags, tensor: int, multiple: int, needed: str) -> Iterator[str]:
        """Yield a problem for each linear layer that FP8 cannot compute, other than input and output projection.

        ``tensor`` is the number of tensor-parallel ranks. ``needed`` says in messages that widths on a rank must be a
        multiple of ``multiple``.
        """
        yield from ()

    @abstractmethod
    def input_widths(self, hybrid: Flags, hidden_size: int, tensor: int) -> Mapping[str, tuple[int, int]]:
        """Return the widths of the inputs of linear layers, other than the hidden size, by the flags that set them.

        Each has the number of ranks over which it is sharded.
        """


def check_sharding(flag: str, number: int, tensor: int) -> Iterator[str]:
    """Yield a problem if tensor-parallel ranks cannot share a number of heads or groups."""
    if number % tensor:
        yield (
            f"{flag} {number} is not divisible by --tensor-model-parallel-size {tensor}; sizes that work: "
            f"{divisors(number, number)}"
        )


def check_context(layout: ParallelConfig, flag: str, heads: int, flag_of_groups: str, groups: int) -> Iterator[str]:
    """Yield a problem if context-parallel ranks cannot share the heads of a recurrent layer."""
    tensor, context = max(layout.tensor_model_parallel_size, 1), layout.context_parallel_size
    is_exchanged = context > 1 and layout.recurrent_cp_comm_type == "a2a"
    if not is_exchanged or heads % groups or heads % tensor or groups % tensor:
        return
    own_heads, own_groups = heads // tensor, groups // tensor
    if copies_of_key_value_heads(own_heads, own_groups, context) is None:
        sizes = [size for size in range(1, own_heads + 1) if copies_of_key_value_heads(own_heads, own_groups, size)]
        yield (
            f"{flag} {heads} with {flag_of_groups} {groups}: the {own_heads} heads of a tensor-parallel rank, in "
            f"{own_groups} groups, cannot be divided among --context-parallel-size {context} ranks; context-parallel "
            f"sizes that work: {choices(sizes)}; or use --recurrent-cp-comm-type all_gather"
        )
