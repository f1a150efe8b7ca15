"""Parts of gated delta-net, KDA and Mamba-2: sharded projections and convolutions, decay parameters, and states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.ops.linear_attention import causal_convolution, document_starts_of
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, attach_spec, even_shards, spec_of, stacked_shards
from megatron.core.tensor_parallel import ColumnShardedLinear, RowShardedLinear, make_parameter
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles


class StackedConvolution(nn.Module):
    """Depthwise causal convolution with SiLU over stacked tensors, each sharded over the tensor-parallel group.

    ``channels`` are the whole widths of the tensors. Initial values are those of `torch.nn.Conv1d`.

    Shapes: ``[b, s, channels/tp] -> [b, s, channels/tp]``.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        tp: Group,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
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
        return causal_convolution(
            x, self.weight.squeeze(1), self.bias, state, starts, silu=True, return_state=return_state
        )


class RecurrentMixer(nn.Module, ABC):
    """A layer that mixes positions by a recurrence, called like `SelfAttention`.

    A subclass sets ``rows``, the whole widths of the tensors that the input projection stacks, calls `_add_projections`
    and computes `mix`, to whose input `project` may add tensors. Heads are sharded over the tensor-parallel group, so
    that nothing is exchanged between the projections. The state does not pass from one packed document to the next.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    rows: tuple[int, ...]

    def __init__(self, config: DecoderConfig, layer_number: int, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.tp, self.device, self.dtype = tp, device, dtype_from_name(config.params_dtype)
        self.recomputes_core = "core_attn" in config.recomputed_modules

    def _add_projections(self, config: DecoderConfig, inner: int) -> None:
        """Create the input projection, whose rows are sharded tensor by tensor, and the output projection."""
        self.in_proj = ColumnShardedLinear(
            config.hidden_size,
            sum(self.rows),
            self.tp,
            config=config,
            init_std=config.init_method_std,
            bias=False,
            device=self.device,
            tp_comm_buffer_name="fc1",
        )
        spec = spec_of(self.in_proj.weight)
        shards = stacked_shards(spec.global_shape, 0, self.tp.rank, self.tp.size, self.rows)
        attach_spec(self.in_proj.weight, replace(spec, shards=shards, fused_rows=self.rows))
        self.out_proj = RowShardedLinear(
            inner,
            config.hidden_size,
            self.tp,
            config=config,
            init_std=config.output_init_method_std,
            bias=False,
            device=self.device,
            tp_comm_buffer_name="fc2",
        )

    def _add_decay(self, num_heads: int, num_steps: int | None = None) -> None:
        """Create the logarithms of decay rates from 1 to 16, and the biases of steps from 0.001 to 0.1.

        By default every head has one step per position.
        """
        low, high = math.log(1e-3), math.log(1e-1)
        self.A_log = self._per_head("A_log", num_heads, init_mean=8.5, init_bound=7.5, init_transform="log")
        self.dt_bias = self._per_head(
            "dt_bias",
            num_heads if num_steps is None else num_steps,
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
        mixed = self.project(x)
        padding = None if cache is None else cache.padding
        starts = document_starts(pattern, mixed.shape[0]) if padding is None else None
        if cache is not None:
            output, states = self.mix(mixed, starts, cache.states(self.layer_number), padding, return_states=True)
            cache.set_states(self.layer_number, states)
        elif self.recomputes_core and self.training:
            output, _ = recompute(self.mix, mixed, starts)
        else:
            output, _ = self.mix(mixed, starts)
        return LayerOutput(self.out_proj(output))

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

        Shapes: ``mixed: [s, b, rows/tp], starts: [b, s], padding: [b] -> [s, b, inner/tp]``; states have the batch
        first.
        """

    def steps(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the step sizes in at least float32: positive, but 0 in the padding, where nothing decays.

        Shapes: ``x: [b, s, heads/tp], padding: [b] -> [b, s, heads/tp]``.
        """
        wide = arithmetic_dtype(x.dtype)
        return without_padding(F.softplus(x.to(wide) + self.dt_bias.to(wide)), padding)

    def decay_rates(self) -> torch.Tensor:
        """Return the negative rates, in at least float32. Shapes: ``-> [heads/tp]``."""
        return -self.A_log.to(arithmetic_dtype(self.A_log.dtype)).exp()


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
