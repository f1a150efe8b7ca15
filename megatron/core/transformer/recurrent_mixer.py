"""Parts of gated delta-net, KDA and Mamba-2: sharded projections and convolutions, decay parameters, and states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.context_parallel import (
    StackedHeads,
    from_segments,
    heads_to_sequence,
    inputs_before_segments,
    rows_of_heads,
    segments_of_whole,
    sequence_to_heads,
    states_before_segments,
    to_segments,
)
from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.ops.linear_attention import causal_convolution, document_starts_of
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, even_shards, spec_of, stacked_shards
from megatron.core.tensor_parallel import ColumnShardedLinear, RowShardedLinear, make_parameter
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles


class StackedConvolution(nn.Module):
    """Depthwise causal convolution with SiLU over stacked tensors, each sharded over the tensor-parallel group.

    ``stacked`` are the tensors of a tensor-parallel rank, whose heads the context-parallel ranks share. Initial values
    are those of `torch.nn.Conv1d`.

    Shapes: ``[b, s, channels of rank] -> [b, s, channels of rank]``.
    """

    def __init__(
        self,
        stacked: Sequence[StackedHeads],
        width: int,
        tp: Group,
        cp: Group,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.stacked, self.cp = tuple(stacked), cp
        channels = [heads.num_rows * tp.size for heads in stacked]
        total, bound = sum(channels), width**-0.5

        def parameter(name: str, *trailing: int) -> nn.Parameter:
            shape = (total, *trailing)
            shards = stacked_shards(shape, 0, tp.rank, tp.size, channels)
            spec = ParamSpec(name, shape, shards, init_bound=bound)
            return make_parameter((total // tp.size, *trailing), spec, dtype, device)

        self.weight = parameter("weight", 1, width)
        self.bias = parameter("bias") if has_bias else None

    def forward(
        self,
        x: torch.Tensor,
        state: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        *,
        return_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and with ``return_state`` the inputs that the next positions need.

        The state of a row precedes the position after its ``padding: [b]``.
        """
        if padding is not None:
            width = self.weight.shape[-1] - 1
            before = x.new_zeros((len(x), width, x.shape[-1]))
            inputs = torch.cat((before, x), dim=1)
            places = padding[:, None] + torch.arange(width, device=x.device)
            inputs[torch.arange(len(x), device=x.device)[:, None], places] = (
                before if state is None else state.to(x.dtype)
            )
            state, x = inputs[:, :width], inputs[:, width:]
        weight = rows_of_heads(self.weight.squeeze(1), self.stacked, self.cp)
        bias = None if self.bias is None else rows_of_heads(self.bias, self.stacked, self.cp)
        return causal_convolution(x, weight, bias, state, starts, silu=True, return_state=return_state)


class RecurrentMixer(nn.Module, ABC):
    """A layer that mixes positions by a recurrence, called like `SelfAttention`.

    A subclass sets ``rows``, the whole widths of the tensors that the input projection stacks, calls `_add_projections`
    and computes `mix`, to whose input `project` may add tensors. Heads are sharded over the tensor-parallel group, so
    that it exchanges nothing between the projections. Context-parallel ranks share these heads: `to_heads` exchanges
    sequence shards for head shards before the convolution, and `to_sequence` exchanges them back after the recurrence.
    With ``passes_states`` they compute all heads of their own positions instead: `mix` gets their two segments of the
    sequence as entries of the batch, and gathers what precedes these. The state does not pass from one packed document
    to the next.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    rows: tuple[int, ...]
    conv1d: StackedConvolution

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.cp = single_rank_group(("cp",)) if cp is None else cp
        self.passes_states = self.cp.size > 1 and config.recurrent_cp_comm_type == "all_gather"
        self.head_ranks = single_rank_group(("cp",)) if self.passes_states else self.cp
        """The ranks that share the heads of a tensor-parallel rank."""
        self.tp, self.device, self.dtype = tp, device, dtype_from_name(config.params_dtype)
        self.recomputes_core = "core_attn" in config.recomputed_modules

    def _add_projections(self, config: DecoderConfig, inner: int, *, has_bias: bool = False) -> None:
        """Create the input projection, whose rows are sharded tensor by tensor, and the output projection."""
        self.in_proj = ColumnShardedLinear(
            config.hidden_size,
            sum(self.rows),
            self.tp,
            config=config,
            init_std=config.init_method_std,
            bias=has_bias,
            device=self.device,
            tp_comm_buffer_name="fc1",
        )
        for parameter in self.in_proj.parameters():
            spec = spec_of(parameter)
            shards = stacked_shards(spec.global_shape, 0, self.tp.rank, self.tp.size, self.rows)
            attach_spec(parameter, replace(spec, shards=shards, fused_rows=self.rows if parameter.dim() > 1 else ()))
        self.out_proj = RowShardedLinear(
            inner,
            config.hidden_size,
            self.tp,
            config=config,
            init_std=config.output_init_method_std,
            bias=has_bias,
            device=self.device,
            tp_comm_buffer_name="fc2",
        )

    def _add_decay(self, num_heads: int, steps_per_head: int = 1, copies: int = 1) -> None:
        """Create the logarithms of decay rates from 1 to 16, and the biases of steps from 0.001 to 0.1.

        Context-parallel ranks get ``copies`` of the heads.
        """
        own_heads = num_heads // self.tp.size
        self.heads_of_rates = StackedHeads(own_heads, 1, copies)
        self.heads_of_steps = StackedHeads(own_heads, steps_per_head, copies)
        low, high = math.log(1e-3), math.log(1e-1)
        self.A_log = self._per_head("A_log", num_heads, init_mean=8.5, init_bound=7.5, init_transform="log")
        self.dt_bias = self._per_head(
            "dt_bias",
            num_heads * steps_per_head,
            init_mean=(low + high) / 2,
            init_bound=(high - low) / 2,
            init_transform="step_bias",
        )

    def _per_head(
        self, name: str, num_heads: int, *, init_mean: float, init_bound: float = 0.0, init_transform: str = ""
    ) -> nn.Parameter:
        spec = ParamSpec(
            name,
            (num_heads,),
            even_shards((num_heads,), 0, self.tp.rank, self.tp.size),
            init_mean=init_mean,
            init_bound=init_bound,
            init_transform=init_transform,
        )
        return make_parameter((num_heads // self.tp.size,), spec, self.dtype, self.device)

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        """Return the output; with a cache the states of the layer continue and are updated."""
        assert pattern.is_causal, "a recurrence is causal"
        assert self.cp.size == 1 or (cache is None and pattern.mask is None), "a cache or a mask is of whole sequences"
        mixed = self.project(x)
        padding = None if cache is None else cache.padding
        starts = document_starts(pattern, mixed.shape[0] * self.cp.size) if padding is None else None
        if cache is not None:
            output, states = self.mix(mixed, starts, cache.states(self.layer_number), padding, return_states=True)
            cache.set_states(self.layer_number, states)
        elif self.recomputes_core and self.training:
            output = recompute(self._mix_own, mixed, starts)
        else:
            output = self._mix_own(mixed, starts)
        return LayerOutput(self.out_proj(output))

    def _mix_own(self, mixed: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """Return the output of `mix` at this rank's positions, given its input there and the starts everywhere."""
        if not self.passes_states:
            return self.mix(mixed, starts)[0]
        starts = None if starts is None else segments_of_whole(starts, self.cp)
        return from_segments(self.mix(to_segments(mixed, 0, 1), starts)[0], 0, 1)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of `mix`. Shapes: ``[s, b, h] -> [s, b, rows/tp]``; ``[s/tp, b, h]`` with SP."""
        mixed: torch.Tensor = self.in_proj(x)
        return mixed

    @abstractmethod
    def mix(
        self,
        mixed: torch.Tensor,
        starts: torch.Tensor | None,
        states: tuple[torch.Tensor, ...] | None = None,
        padding: torch.Tensor | None = None,
        *,
        return_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the input of the output projection, and with ``return_states`` the states after the last position.

        The first ``padding`` positions of a row leave its states as they are.

        Shapes: ``mixed: [s/cp, b, rows/tp], starts: [b, s], padding: [b] -> [s/cp, b, inner/tp]``; states have the
        batch first.
        """

    def convolve(
        self,
        x: torch.Tensor,
        state: torch.Tensor | None,
        starts: torch.Tensor | None,
        padding: torch.Tensor | None,
        *,
        return_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the convolution of the layer; with ``passes_states`` its state is the end of the preceding segment."""
        before = self.conv1d.weight.shape[-1] - 1
        if self.passes_states and before:
            state = inputs_before_segments(x, starts, before, self.cp)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.conv1d(
            x, state, starts, padding, return_state=return_state
        )
        return output

    def states_before(self, states: torch.Tensor, transitions: torch.Tensor) -> torch.Tensor:
        """Return the states before this rank's segments, as `states_before_segments` does."""
        return states_before_segments(states, transitions, self.cp)

    def to_heads(
        self, tensors: Sequence[torch.Tensor], stacked: Sequence[Sequence[StackedHeads]]
    ) -> Sequence[torch.Tensor]:
        """Return each tensor with the channels of this rank's heads, at all positions. Each may stack several tensors.

        Shapes: ``[b, s/cp, channels]`` each ``-> [b, s, channels of rank]``.
        """
        if self.head_ranks.size == 1:
            return tensors
        parts = [
            heads.copied(part, dim=2)
            for tensor, own in zip(tensors, stacked, strict=True)
            for heads, part in zip(own, tensor.split_with_sizes([heads.num_rows for heads in own], dim=2), strict=True)
        ]
        received = sequence_to_heads([part.transpose(0, 1) for part in parts], self.head_ranks).transpose(0, 1)
        widths = [sum(heads.rows_of_rank(self.head_ranks.size) for heads in own) for own in stacked]
        return received.split_with_sizes(widths, dim=2)

    def to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return all heads at this rank's positions. Shapes: ``[b, s, heads of rank, d] -> [b, s/cp, heads/tp, d]``."""
        if self.head_ranks.size == 1:
            return x
        received = heads_to_sequence(x.flatten(2).transpose(0, 1), self.head_ranks).transpose(0, 1)
        return received.view(*received.shape[:2], -1, x.shape[3])

    def own_heads(self, parameter: torch.Tensor, heads: StackedHeads | None = None) -> torch.Tensor:
        """Return the values of this rank's heads. Shapes: ``[heads/tp] -> [heads of rank]``."""
        return rows_of_heads(parameter, (heads or StackedHeads(len(parameter)),), self.head_ranks)

    def steps(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the step sizes in at least float32: positive, but 0 in the padding, where nothing decays.

        Shapes: ``x: [b, s, heads of rank], padding: [b] -> [b, s, heads of rank]``.
        """
        wide = arithmetic_dtype(x.dtype)
        return without_padding(
            F.softplus(x.to(wide) + self.own_heads(self.dt_bias, self.heads_of_steps).to(wide)), padding
        )

    def decay_rates(self) -> torch.Tensor:
        """Return the negative rates, in at least float32. Shapes: ``-> [heads of rank]``."""
        return -self.own_heads(self.A_log, self.heads_of_rates).to(arithmetic_dtype(self.A_log.dtype)).exp()


def without_padding(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Set the first ``padding`` positions of each row to 0. Shapes: ``x: [b, s, n], padding: [b] -> [b, s, n]``."""
    if padding is None:
        return x
    is_padding = torch.arange(x.shape[1], device=x.device) < padding[:, None]
    return x.masked_fill(is_padding[..., None], 0.0)


def document_starts(pattern: AttentionPattern, length: int) -> torch.Tensor | None:
    """Return at which of the last ``length`` positions a state must not come from the position before; None is none.

    A mask is that of padding on the left: the state is reset at each position that does not attend to the position
    before it.

    Shapes: ``-> [b, length]`` of bool.
    """
    if pattern.document_ids is not None:
        ids = pattern.document_ids
        starts = pattern.shared("document starts", lambda: document_starts_of(ids))
        return starts[:, -length:]
    if pattern.mask is None:
        return None
    first = pattern.mask.shape[-1] - length
    before = pattern.mask[:, 0].diagonal(offset=first - 1, dim1=-2, dim2=-1)
    if first > 0:
        return ~before
    # The diagonal below the main one lacks the first position, which nothing precedes.
    return ~F.pad(before, (1, 0), value=True)
