"""Buckets of parameters that are updated together: main parameters, state, and one update rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.core.distributed import ParamShard
from megatron.core.optimizer.flat_state import FlatState
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_rates import COMMON_RATE, Rate
from megatron.core.optimizer.quantized_state import QuantizedState, RemainderTensor, make_moment
from megatron.core.precision import arithmetic_dtype
from megatron.core.sharding import ParamSpec, flat_range_boxes, full_shards
from megatron.core.timers import Timers

ShardGroup = tuple[Sequence[ParamShard], float]
"""Shards of parameters, and their weight-decay multiplier."""
_MAX_ELEMENTS = 2**25
"""Maximum length of a bucket if buckets are updated one after the other: 128 MiB of float32."""


@dataclass(frozen=True, eq=False)
class OptimizedShard:
    """Shard of a parameter that this rank updates, with its main parameter: the shard itself, or a copy."""

    shard: ParamShard
    main_param: torch.Tensor

    @property
    def has_main_copy(self) -> bool:
        """Return whether the main parameter is a copy, separate from the model's weights."""
        return self.main_param is not self.shard.values

    @property
    def is_whole(self) -> bool:
        """Return whether this is a whole parameter of the model, not a shard."""
        held = sum(each.global_box.num_elements for each in self.shard.spec.shards)
        is_local = self.shard.end - self.shard.start == self.shard.parameter.numel()
        return is_local and held == math.prod(self.shard.spec.global_shape)

    def scale_rows(self, factors: torch.Tensor) -> None:
        """Multiply the rows of the parameter that the shard holds by factors, and round them into the model.

        Shapes: ``factors: [rows of the parameter]``.
        """
        flat, position = self.main_param.view(-1), 0
        for box in flat_range_boxes(self.shard.parameter.shape, self.shard.start, self.shard.end):
            rows = flat[position : position + box.num_elements].view(box.shape)
            own = factors[box.offset[0] : box.offset[0] + box.shape[0]].to(rows.dtype)
            rows.mul_(own.view(-1, *(1,) * (rows.dim() - 1)))
            position += box.num_elements
        if self.has_main_copy:
            self.shard.values.copy_(self.main_param)

    @property
    def is_rounded(self) -> bool:
        return self.main_param.dtype is not self.shard.values.dtype


class UpdateBucket:
    """Shards of parameters that are updated together from their gradients.

    On the device the main parameters are the model's weights or float32 copies; ``on_host`` makes them copies in host
    memory. All shards have the learning rate ``rate``. If the configuration sets narrow dtypes, state is stored in
    these between steps. With ``exchange`` the shards belong to matrices that Muon updates. A rule that is not
    elementwise receives whole parameters in their shape (see `UpdateRule`). With ``fuses`` one kernel makes the whole
    update of torch's Adam, if it supports the shards (see `FlatState`).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[ShardGroup],
        fused_adam: type[torch.optim.Optimizer] | None = None,
        *,
        on_host: bool = False,
        rate: Rate = COMMON_RATE,
        exchange: MuonShardExchange | None = None,
        is_elementwise: bool = True,
        fuses: bool = False,
    ) -> None:
        self.rate = rate
        self._flat: FlatState | None = None
        is_plain_adam = config.optimizer == "adam" and fused_adam is None and not config.use_precision_aware_optimizer
        if fuses and is_plain_adam and FlatState.supports(groups):
            self._flat = FlatState(groups, (config.adam_beta1, config.adam_beta2))
        flat = self._flat
        pairs = [
            (
                [
                    _optimized(each, on_host) if flat is None else OptimizedShard(each, flat.main_param(each))
                    for each in shards
                ],
                multiplier,
            )
            for shards, multiplier in groups
        ]
        self.shards = [optimized for shards, _ in pairs for optimized in shards]
        self.main_params = [optimized.main_param for optimized in self.shards]
        self.inner: InnerOptimizer | Muon
        if exchange is None:
            shapes = {id(p.main_param): p.shard.parameter.shape for p in self.shards if p.is_whole}
            self.inner = InnerOptimizer(
                config,
                [([optimized.main_param for optimized in shards], multiplier) for shards, multiplier in pairs],
                fused_adam,
                None if is_elementwise else shapes,
                flat,
            )
        else:
            multipliers = [multiplier for shards, multiplier in pairs for _ in shards]
            self.inner = Muon(config, self.main_params, multipliers, exchange)
        self._with_copy = [optimized for optimized in self.shards if optimized.has_main_copy]
        self._compact: dict[int, QuantizedState] = {}
        if config.use_precision_aware_optimizer:
            self._narrow(config)

    @property
    def num_elements(self) -> int:
        return sum(optimized.shard.values.numel() for optimized in self.shards)

    def step_if(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor, timers: Timers) -> None:
        """Update the model from the gradients times a factor, if they are finite.

        Shapes: ``is_finite, grad_multiplier: []``.
        """
        if self._flat is not None:
            assert isinstance(self.inner, InnerOptimizer)
            with timers("optimizer-inner-step", log_level=1):
                self.inner.step_if(is_finite, self.main_params, grad_multiplier)
            return
        with self._opened():
            if isinstance(self.inner, Muon):
                with timers("optimizer-inner-step", log_level=1):
                    gradients = [optimized.shard.gradient for optimized in self.shards]
                    self.inner.step_if(is_finite, self.main_params, gradients, grad_multiplier)
            else:
                with timers("optimizer-copy-to-main-grad", log_level=1):
                    for optimized in self.shards:
                        # A view of the reduced gradient, except if gradients are stored in bf16.
                        optimized.main_param.grad = optimized.shard.gradient.to(optimized.main_param.dtype)
                with timers("optimizer-inner-step", log_level=1):
                    self.inner.step_if(is_finite, self.main_params, grad_multiplier)
                self._drop_gradients()
            if not self._with_copy:
                return
            with timers("optimizer-copy-main-to-model-params", log_level=1):
                torch._foreach_copy_([p.shard.values for p in self._with_copy], [p.main_param for p in self._with_copy])

    def step(self, gradients: Sequence[torch.Tensor], grad_multiplier: float) -> None:
        """Update the main parameters from separate gradients times a factor, without changing the model's weights.

        Not for matrices, which Muon updates on the device.

        Shapes: ``gradients``: one for each shard, in any floating-point dtype.
        """
        assert isinstance(self.inner, InnerOptimizer)
        with self._opened():
            for optimized, gradient in zip(self.shards, gradients, strict=True):
                optimized.main_param.grad = gradient.to(optimized.main_param.dtype)
            self.inner.step(self.main_params, grad_multiplier)
            self._drop_gradients()

    def state_of(self, optimized: OptimizedShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each state of a shard for a checkpoint; quantized tensors are empty."""
        for name in self.inner.names_of_state(optimized.main_param):
            yield name, self.inner.state_of(optimized.main_param, name)
        if optimized.is_rounded:
            yield "main_param", optimized.main_param

    def compact(self, tensor: torch.Tensor) -> QuantizedState | None:
        """Return the quantized storage of a state tensor, or None if the tensor is not quantized."""
        return self._compact.get(id(tensor))

    @contextmanager
    def main_params_open(self) -> Iterator[None]:
        """Decode all main parameters inside the context, and encode them again afterwards."""
        compact = [stored for tensor in self.main_params if (stored := self.compact(tensor)) is not None]
        for stored in compact:
            stored.open()
        yield
        for stored in compact:
            stored.close()

    def reload_main_params(self) -> None:
        """Reset the main parameters to the model's weights."""
        with self.main_params_open():
            for optimized in self._with_copy:
                optimized.main_param.copy_(optimized.shard.values)

    def reload_unrounded(self) -> None:
        """Reset the main parameters that a checkpoint omits, because the model's weights are as exact."""
        for optimized in self._with_copy:
            if not optimized.is_rounded:
                optimized.main_param.copy_(optimized.shard.values)

    def held(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is kept between steps, except the model's weights."""
        for optimized in self.shards:
            for _, tensor in self.state_of(optimized):
                stored = self.compact(tensor)
                yield from (tensor,) if stored is None else stored.held()
            if optimized.has_main_copy and not optimized.is_rounded:
                yield optimized.main_param

    def _narrow(self, config: OptimizerConfig) -> None:
        narrow: list[QuantizedState | None] = []
        for optimized in self.shards:
            if optimized.is_rounded and config.main_params_dtype != "fp32":
                narrow.append(RemainderTensor(optimized.main_param, optimized.shard.values))
            for name, dtype, decay in (
                ("exp_avg", config.exp_avg_dtype, config.adam_beta1),
                ("exp_avg_sq", config.exp_avg_sq_dtype, config.adam_beta2),
            ):
                if name in self.inner.state_names:
                    tensor = self.inner.state_of(optimized.main_param, name)
                    narrow.append(make_moment(tensor, dtype, decay, is_second=name == "exp_avg_sq"))
        self._compact = {id(stored.tensor): stored for stored in narrow if stored is not None}

    @contextmanager
    def _opened(self) -> Iterator[None]:
        for stored in self._compact.values():
            stored.open()
        yield
        for stored in self._compact.values():
            stored.close(self.inner.num_updates)

    def _drop_gradients(self) -> None:
        for main_param in self.main_params:
            main_param.grad = None


def described_state(optimized: OptimizedShard, tensor: torch.Tensor) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """Split a tensor of a shard's state into views, each with the description of its box in a global tensor.

    A tensor of a different shape than the shard, such as a scalar, is a separate global tensor, equal on all ranks that
    hold shards of the parameter. The rank with the parameter's first element saves it.
    """
    if tensor.shape in (optimized.shard.values.shape, optimized.shard.parameter.shape):
        yield from optimized.shard.described(tensor.view(-1))
        return
    tensor = tensor.view(tensor.shape or (1,))
    spec, shape = optimized.shard.spec, tuple(tensor.shape)
    boxes = (each.global_box for own, _ in optimized.shard.described(optimized.shard.values) for each in own.shards)
    is_first = any(not any(box.offset) for box in boxes)
    index = spec.replica_index if is_first else max(1, spec.replica_index)
    yield replace(spec, global_shape=shape, shards=full_shards(shape), replica_index=index), tensor


def _optimized(shard: ParamShard, on_host: bool) -> OptimizedShard:
    main_dtype = arithmetic_dtype(shard.values.dtype)
    if on_host:
        # Created from a device tensor, so that a dry run creates one without memory.
        return OptimizedShard(shard, torch.empty_like(shard.values, dtype=main_dtype, device="cpu").copy_(shard.values))
    return OptimizedShard(shard, shard.values if main_dtype is shard.values.dtype else shard.values.to(main_dtype))


def split_shard(shard: ParamShard, at: int) -> tuple[ParamShard, ParamShard]:
    """Split a shard after its first ``at`` elements."""
    middle = shard.start + at
    first = replace(shard, end=middle, values=shard.values[:at], gradient=shard.gradient[:at])
    return first, replace(shard, start=middle, values=shard.values[at:], gradient=shard.gradient[at:])


def cut_into_buckets(groups: Iterable[ShardGroup], max_elements: int = _MAX_ELEMENTS) -> Iterator[list[ShardGroup]]:
    """Yield buckets of shards, in order, of at most ``max_elements`` elements each; longer shards are split."""
    bucket: list[ShardGroup] = []
    shard_list: list[ParamShard] = []
    room = max_elements
    for shards, multiplier in groups:
        for shard in _split(shards, max_elements):
            num_elements = shard.end - shard.start
            if num_elements > room and bucket:
                yield bucket
                bucket, room = [], max_elements
            if bucket and bucket[-1][1] == multiplier:
                shard_list.append(shard)
            else:
                shard_list = [shard]
                bucket.append((shard_list, multiplier))
            room -= num_elements
    if bucket:
        yield bucket


def _split(shards: Sequence[ParamShard], max_elements: int) -> Iterator[ParamShard]:
    for shard in shards:
        while shard.end - shard.start > max_elements:
            first, shard = split_shard(shard, max_elements)
            yield first
        yield shard
