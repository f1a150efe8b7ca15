"""Adam's state in flat tensors, which one kernel per run of shards updates together with the model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed import PARAM_ALIGNMENT, ParamShard
from megatron.core.ops import runs_on_triton
from megatron.core.precision import arithmetic_dtype

_MAX_DECAYS = 2


@dataclass(frozen=True, eq=False)
class _Run:
    """Shards whose gradients and values follow each other in memory, except for padding, and their flat tensors.

    Shapes: ``gradient, values, main, exp_avg, exp_avg_sq: [n]``, ``is_second: [ceil(n / PARAM_ALIGNMENT)]`` uint8.
    """

    gradient: torch.Tensor
    values: torch.Tensor
    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    is_second: torch.Tensor | None


class FlatState:
    """Float32 main parameters and Adam's moments of shards, in one flat tensor each per run of shards.

    The kernel reads and writes everything once: it scales the gradients, updates moments and main parameters, and
    rounds these into the model's weights. The device decides if an update is made, and counts the updates.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[ParamShard], float]], betas: tuple[float, float]) -> None:
        place = {id(shard): index for index, (shards, _) in enumerate(groups) for shard in shards}
        self._runs: list[_Run] = []
        self._main: dict[int, torch.Tensor] = {}
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        shards = [shard for shards, _ in groups for shard in shards]
        device = shards[0].values.device
        self._num_updates = torch.zeros((), dtype=torch.float32, device=device)
        self._betas = torch.tensor(betas, dtype=torch.float64).to(device)
        # The learning rate and two weight decays, and the numbers that were written there.
        self._rates: torch.Tensor | None = None
        self._written: tuple[float, ...] = ()
        for run in _runs_of(shards):
            self._add_run(run, [place[id(shard)] for shard in run])

    @staticmethod
    def supports(groups: Sequence[tuple[Sequence[ParamShard], float]]) -> bool:
        """Return whether the kernel supports these shards, with their weight-decay multipliers, on their device."""
        shards = [shard for shards, _ in groups for shard in shards]
        return (
            bool(shards)
            and len(groups) <= _MAX_DECAYS
            and all(runs_on_triton(shard.gradient, shard.values) for shard in shards)
        )

    def main_param(self, shard: ParamShard) -> torch.Tensor:
        """Return the main parameter of a shard: its values if these are float32. Shapes: ``-> [n]``."""
        return self._main[id(shard)]

    def state_of(self, main_param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a main parameter; the number of updates is shared by all."""
        return self._states[id(main_param)]

    def keep_rates_on_device(self) -> None:
        """Let updates read the learning rate and the weight decays from the device, as a CUDA graph must."""
        self._rates = torch.zeros(1 + _MAX_DECAYS, dtype=torch.float64, device=self._num_updates.device)
        self._written = (0.0,) * (1 + _MAX_DECAYS)

    def write_rates(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the numbers of the next step to the device if they are kept there; the host waits for nothing."""
        if self._rates is None:
            return
        decays = [group["weight_decay"] for group in param_groups]
        numbers = (param_groups[0]["lr"], decays[0], decays[-1])
        for index, (number, written) in enumerate(zip(numbers, self._written, strict=True)):
            if number != written:
                self._rates[index].fill_(number)
        self._written = numbers

    @torch.no_grad()
    def step(
        self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor, param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Update with the gradients times a factor if ``is_finite`` is true; otherwise change nothing.

        ``param_groups`` are those of the optimizer, in the order of the groups of shards.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        from megatron.core.ops.triton import AdamWNumbers, update_adamw

        first = param_groups[0]
        decays = tuple(group["weight_decay"] for group in param_groups)
        numbers = AdamWNumbers(first["lr"], decays, first["betas"], first["eps"])
        self._num_updates.add_(is_finite)
        corrections = 1.0 - self._betas.pow(self._num_updates)
        for run in self._runs:
            update_adamw(
                run.gradient,
                run.main,
                run.exp_avg,
                run.exp_avg_sq,
                None if run.main is run.values else run.values,
                run.is_second,
                is_finite,
                grad_multiplier,
                corrections,
                numbers,
                PARAM_ALIGNMENT,
                self._rates,
            )

    def _add_run(self, shards: Sequence[ParamShard], places: Sequence[int]) -> None:
        origin = shards[0].gradient.storage_offset()
        starts = [shard.gradient.storage_offset() - origin for shard in shards]
        assert all(start % PARAM_ALIGNMENT == 0 for start in starts), "shards start at the layout's alignment"
        length = starts[-1] + shards[-1].gradient.numel()
        num_blocks = -(-length // PARAM_ALIGNMENT)
        if _has_elements(shards[0].gradient, num_blocks * PARAM_ALIGNMENT) and _has_elements(
            shards[0].values, num_blocks * PARAM_ALIGNMENT
        ):
            # With the buffers' padding the kernel's accesses are 16 bytes wide at the end too.
            length = num_blocks * PARAM_ALIGNMENT
        gradient, values = (
            tensor.as_strided((length,), (1,), tensor.storage_offset())
            for tensor in (shards[0].gradient, shards[0].values)
        )
        has_copy = arithmetic_dtype(values.dtype) is not values.dtype
        main = values.to(arithmetic_dtype(values.dtype)) if has_copy else values
        is_second = None
        if len(set(places)) > 1 or places[0] > 0:
            blocks = torch.zeros(num_blocks, dtype=torch.uint8)
            for start, shard, place in zip(starts, shards, places, strict=True):
                blocks[start // PARAM_ALIGNMENT : -(-(start + shard.gradient.numel()) // PARAM_ALIGNMENT)] = place
            is_second = blocks.to(values.device)
        run = _Run(gradient, values, main, torch.zeros_like(main), torch.zeros_like(main), is_second)
        self._runs.append(run)
        for start, shard in zip(starts, shards, strict=True):
            own = slice(start, start + shard.gradient.numel())
            main_param = main[own] if has_copy else shard.values
            self._main[id(shard)] = main_param
            self._states[id(main_param)] = {
                "exp_avg": run.exp_avg[own],
                "exp_avg_sq": run.exp_avg_sq[own],
                "step": self._num_updates,
            }


def _has_elements(tensor: torch.Tensor, count: int) -> bool:
    """Return whether a flat tensor's memory has so many elements from the tensor's first."""
    return (tensor.storage_offset() + count) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _runs_of(shards: Sequence[ParamShard]) -> Iterator[list[ParamShard]]:
    """Yield shards that follow each other in the memory of gradients and of values alike."""

    def position(shard: ParamShard) -> tuple[int, int]:
        return shard.gradient.untyped_storage()._cdata, int(shard.gradient.storage_offset())

    run: list[ParamShard] = []
    for shard in sorted((shard for shard in shards if shard.gradient.numel()), key=position):
        if run and not _follows(run[-1], shard):
            yield run
            run = []
        run.append(shard)
    if run:
        yield run


def _follows(last: ParamShard, shard: ParamShard) -> bool:
    for before, after in ((last.gradient, shard.gradient), (last.values, shard.values)):
        is_same = before.untyped_storage()._cdata == after.untyped_storage()._cdata
        if not is_same or before.dtype is not after.dtype:
            return False
    distances = [
        after.storage_offset() - before.storage_offset()
        for before, after in ((last.gradient, shard.gradient), (last.values, shard.values))
    ]
    return distances[0] == distances[1] and 0 <= distances[0] - last.gradient.numel() < PARAM_ALIGNMENT
