"""Tokens without values, whose experts cannot be known: they are taken to spread evenly, as in the closed forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from megatron.core.transformer.moe.moe_config import MoEConfig


class BalancedExperts(TorchFunctionMode):
    """Answer how many tokens go where, which the host asks of the device, with equal numbers.

    ``on_wait`` is told where the host would wait for the device to say so.
    """

    def __init__(self, config: MoEConfig, on_wait: Callable[[str], None]) -> None:
        super().__init__()
        self._config, self._on_wait = config, on_wait
        self._num_choices = self._num_kept = 0
        self._answers: Mapping[Any, Callable[..., Any]] = {
            torch.Tensor.bincount: self._bincount,
            torch.Tensor.__int__: self._int,
            torch.Tensor.repeat_interleave: self._repeat_interleave,
        }

    @contextmanager
    def taking_calls(self) -> Iterator[None]:
        """Answer inside what the host asks of tokens' choices."""
        # Tensors without values have a method of their own, which asks for number after number.
        as_numbers = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            is_count = tensor.dim() == 1 and tensor.dtype is torch.int64 and tensor.is_cuda
            return self._tolist(tensor) if is_count else as_numbers(tensor)

        with patch.object(FakeTensor, "tolist", tolist), self:
            yield

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or answer in its place what depends on the values of whole numbers on the device."""
        answer = self._answers.get(func)
        if answer is None or not args[0].is_cuda or args[0].dtype is not torch.int64:
            return func(*args, **(kwargs or {}))
        return answer(*args, **(kwargs or {}))

    def _bincount(self, targets: torch.Tensor, minlength: int = 0) -> torch.Tensor:
        # Behind the last target are choices of experts that are elsewhere, or that a full expert drops.
        share = min(1.0, (minlength - 1) / (self._config.num_experts or 1))
        share *= min(1.0, self._config.moe_expert_capacity_factor or 1.0)
        self._num_choices, self._num_kept = targets.numel(), round(targets.numel() * share)
        return targets.new_empty(minlength)

    def _int(self, count: torch.Tensor) -> int:
        self._on_wait("int")
        return self._num_choices - self._num_kept

    def _tolist(self, counts: torch.Tensor) -> list[int]:
        self._on_wait("tolist")
        even, over = divmod(self._num_kept, len(counts))
        return [even + (number < over) for number in range(len(counts))]

    def _repeat_interleave(self, values: torch.Tensor, repeats: torch.Tensor | int, **options: Any) -> torch.Tensor:
        if isinstance(repeats, int):
            return values.repeat_interleave(repeats, **options)
        return values.new_empty(self._num_kept)
