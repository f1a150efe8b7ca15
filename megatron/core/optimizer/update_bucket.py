"""Parts of the model that are updated together: their main parameters, their state, and one update rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.core.distributed import ParamShard
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_rates import COMMON_RATE, Rate
from megatron.core.optimizer.quantized_state import QuantizedState, RemainderTensor, make_moment
from megatron.core.precision import arithmetic_dtype
from megatron.core.sharding import ParamSpec, full_pieces
from megatron.core.timers import Timers

PartGroup = tuple[Sequence[ParamShard], float]
"""Parts of parameters, and the multiplier of their weight decay."""
_MAX_ELEMENTS = 2**25
"""Length of a bucket where buckets follow one another: 128 MiB of float32."""


@dataclass(frozen=True, eq=False)
class OptimizedPart:
    """Pair the part of a parameter that this rank updates with its main parameter: itself, or a copy to update."""

    part: ParamShard
    main_param: torch.Tensor

    @property
    def has_main_copy(self) -> bool:
        """Return whether the main parameter is not the model's own memory."""
        return self.main_param is not self.part.values

    @property
    def is_whole(self) -> bool:
        """Return whether this is a whole parameter of the model, and no shard of one."""
        held = sum(piece.global_box.num_elements for piece in self.part.spec.pieces)
        is_local = self.part.end - self.part.start == self.part.parameter.numel()
        return is_local and held == math.prod(self.part.spec.global_shape)

    @property
    def is_rounded(self) -> bool:
        return self.main_param.dtype is not self.part.values.dtype


class UpdateBucket:
    """Update parts of parameters from their gradients.

    On the device the main parameters are the model's own or float32 copies; ``on_host`` makes all of them copies in the
    machine's memory. All parts have the learning rate that ``rate`` says. With the configuration's narrow types, state
    is stored in these between two steps. With ``exchange`` Muon updates the parts, which are matrices. A rule that is
    not elementwise is given whole parameters in their shape (see `UpdateRule`).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[PartGroup],
        fused_adam: type[torch.optim.Optimizer] | None = None,
        *,
        on_host: bool = False,
        rate: Rate = COMMON_RATE,
        exchange: MuonShardExchange | None = None,
        is_elementwise: bool = True,
    ) -> None:
        self.rate = rate
        pairs = [([_optimized(part, on_host) for part in parts], multiplier) for parts, multiplier in groups]
        self.parts = [part for parts, _ in pairs for part in parts]
        self.main_params = [part.main_param for part in self.parts]
        self.inner: InnerOptimizer | Muon
        if exchange is None:
            shapes = {id(p.main_param): p.part.parameter.shape for p in self.parts if p.is_whole}
            self.inner = InnerOptimizer(
                config,
                [([part.main_param for part in parts], multiplier) for parts, multiplier in pairs],
                fused_adam,
                None if is_elementwise else shapes,
            )
        else:
            multipliers = [multiplier for parts, multiplier in pairs for _ in parts]
            self.inner = Muon(config, self.main_params, multipliers, exchange)
        self._with_copy = [part for part in self.parts if part.has_main_copy]
        self._compact: dict[int, QuantizedState] = {}
        if config.use_precision_aware_optimizer:
            self._narrow(config)

    @property
    def num_elements(self) -> int:
        return sum(part.part.values.numel() for part in self.parts)

    def step_if(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor, timers: Timers) -> None:
        """Update the model from the gradients times a factor, if they are finite.

        Shapes: ``is_finite, grad_multiplier: []``.
        """
        with self._opened():
            if isinstance(self.inner, Muon):
                with timers("optimizer-inner-step", log_level=1):
                    gradients = [part.part.gradient for part in self.parts]
                    self.inner.step_if(is_finite, self.main_params, gradients, grad_multiplier)
            else:
                with timers("optimizer-copy-to-main-grad", log_level=1):
                    for part in self.parts:
                        # A view of where the gradient was reduced, except where gradients are kept in bf16.
                        part.main_param.grad = part.part.gradient.to(part.main_param.dtype)
                with timers("optimizer-inner-step", log_level=1):
                    self.inner.step_if(is_finite, self.main_params, grad_multiplier)
                self._drop_gradients()
            if not self._with_copy:
                return
            with timers("optimizer-copy-main-to-model-params", log_level=1):
                torch._foreach_copy_([p.part.values for p in self._with_copy], [p.main_param for p in self._with_copy])

    def step(self, gradients: Sequence[torch.Tensor], grad_multiplier: float) -> None:
        """Update the main parameters from gradients beside them times a factor; leave the model as it is.

        Not of matrices, which Muon updates on the device.

        Shapes: ``gradients``: one of each part's, in any floating-point dtype.
        """
        assert isinstance(self.inner, InnerOptimizer)
        with self._opened():
            for part, gradient in zip(self.parts, gradients, strict=True):
                part.main_param.grad = gradient.to(part.main_param.dtype)
            self.inner.step(self.main_params, grad_multiplier)
            self._drop_gradients()

    def state_of(self, part: OptimizedPart) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each state that a checkpoint holds of a part; closed ones are empty."""
        for name in self.inner.names_of_state(part.main_param):
            yield name, self.inner.state_of(part.main_param, name)
        if part.is_rounded:
            yield "main_param", part.main_param

    def compact(self, tensor: torch.Tensor) -> QuantizedState | None:
        """Return where a tensor of the state is stored, or None where it is itself."""
        return self._compact.get(id(tensor))

    @contextmanager
    def main_params_open(self) -> Iterator[None]:
        """Let all main parameters have their values inside, and store them anew."""
        compact = [stored for tensor in self.main_params if (stored := self.compact(tensor)) is not None]
        for stored in compact:
            stored.open()
        yield
        for stored in compact:
            stored.close()

    def reload_main_params(self) -> None:
        """Take the main parameters from the model's."""
        with self.main_params_open():
            for part in self._with_copy:
                part.main_param.copy_(part.part.values)

    def reload_unrounded(self) -> None:
        """Take those main parameters from the model's which no checkpoint holds, since the model's are as exact."""
        for part in self._with_copy:
            if not part.is_rounded:
                part.main_param.copy_(part.part.values)

    def held(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that stays between two steps, beside the model's own."""
        for part in self.parts:
            for _, tensor in self.state_of(part):
                stored = self.compact(tensor)
                yield from (tensor,) if stored is None else stored.held()
            if part.has_main_copy and not part.is_rounded:
                yield part.main_param

    def _narrow(self, config: OptimizerConfig) -> None:
        narrow: list[QuantizedState | None] = []
        for part in self.parts:
            if part.is_rounded and config.main_params_dtype != "fp32":
                narrow.append(RemainderTensor(part.main_param, part.part.values))
            for name, dtype, decay in (
                ("exp_avg", config.exp_avg_dtype, config.adam_beta1),
                ("exp_avg_sq", config.exp_avg_sq_dtype, config.adam_beta2),
            ):
                if name in self.inner.state_names:
                    tensor = self.inner.state_of(part.main_param, name)
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


def described_state(part: OptimizedPart, tensor: torch.Tensor) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """Cut a tensor of a part's state into views, each with the description of its place in a global tensor.

    A tensor of another shape than the part's, such as a scalar, is a global tensor by itself, equal on all ranks that
    hold shards of the parameter. The rank that holds the parameter's first element saves it.
    """
    if tensor.shape in (part.part.values.shape, part.part.parameter.shape):
        yield from part.part.described(tensor.view(-1))
        return
    tensor = tensor.view(tensor.shape or (1,))
    spec, shape = part.part.spec, tuple(tensor.shape)
    boxes = (piece.global_box for own, _ in part.part.described(part.part.values) for piece in own.pieces)
    is_first = any(not any(box.offset) for box in boxes)
    index = spec.replica_index if is_first else max(1, spec.replica_index)
    yield replace(spec, global_shape=shape, pieces=full_pieces(shape), replica_index=index), tensor


def _optimized(part: ParamShard, on_host: bool) -> OptimizedPart:
    main_dtype = arithmetic_dtype(part.values.dtype)
    if on_host:
        # Of a tensor of the device, so that a dry run makes one without memory.
        return OptimizedPart(part, torch.empty_like(part.values, dtype=main_dtype, device="cpu").copy_(part.values))
    return OptimizedPart(part, part.values if main_dtype is part.values.dtype else part.values.to(main_dtype))


def split_part(part: ParamShard, at: int) -> tuple[ParamShard, ParamShard]:
    """Return the first ``at`` elements of a part, and the rest."""
    middle = part.start + at
    first = replace(part, end=middle, values=part.values[:at], gradient=part.gradient[:at])
    return first, replace(part, start=middle, values=part.values[at:], gradient=part.gradient[at:])


def cut_into_buckets(groups: Iterable[PartGroup], max_elements: int = _MAX_ELEMENTS) -> Iterator[list[PartGroup]]:
    """Yield the parts in their order, as groups of at most so many elements together; longer parts are cut."""
    bucket: list[PartGroup] = []
    part_list: list[ParamShard] = []
    room = max_elements
    for parts, multiplier in groups:
        for part in _pieces(parts, max_elements):
            num_elements = part.end - part.start
            if num_elements > room and bucket:
                yield bucket
                bucket, room = [], max_elements
            if bucket and bucket[-1][1] == multiplier:
                part_list.append(part)
            else:
                part_list = [part]
                bucket.append((part_list, multiplier))
            room -= num_elements
    if bucket:
        yield bucket


def _pieces(parts: Sequence[ParamShard], max_elements: int) -> Iterator[ParamShard]:
    for part in parts:
        while part.end - part.start > max_elements:
            first, part = split_part(part, max_elements)
            yield first
        yield part
