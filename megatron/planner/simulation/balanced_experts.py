"""Route tokens without values: the load of the experts is balanced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from megatron.core.transformer.transformer_config import MoEConfig


class BalancedExperts(TorchFunctionMode):
    """Answer how many tokens go where, which the host asks of the device, with equal numbers.

    ``on_wait`` is told where the host would wait for the device to say so.
    """

    def __init__(self, config: MoEConfig, on_wait: Callable[[str], None]) -> None:
        super().__init__()
        self._config, self._on_wait = config, on_wait
        self._num_kept = 0

    @contextmanager
    def taking_calls(self) -> Iterator[None]:
        """Answer inside what the host asks of tokens' choices."""
        # Tensors without values have a method of their own, which asks for number after number.
        as_numbers = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            is_count = tensor.dim() in (1, 3) and tensor.dtype is torch.int64 and tensor.is_cuda
            return self._tolist(tensor) if is_count else as_numbers(tensor)

        with patch.object(FakeTensor, "tolist", tolist), self:
            yield

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; of choices that are counted by their targets note how many there are."""
        if func is torch.searchsorted and args[0].is_cuda and args[0].dtype is torch.int64:
            # Behind the last target are choices of experts that are elsewhere, or that a full expert drops.
            share = min(1.0, args[1].numel() / (self._config.num_experts or 1))
            share *= min(1.0, self._config.moe_expert_capacity_factor or 1.0)
            self._num_kept = round(args[0].numel() * share)
        return func(*args, **(kwargs or {}))

    def _tolist(self, counts: torch.Tensor) -> list[Any]:
        """Return the choices of each target; where there are three dims, of what goes and of what comes by rank."""
        self._on_wait("tolist")
        ranks, num_local = counts.shape[-2:] if counts.dim() == 3 else (1, counts.numel())
        even, over = divmod(self._num_kept, ranks * num_local)
        shares = [even + (number < over) for number in range(ranks * num_local)]
        by_rank = [shares[first : first + num_local] for first in range(0, len(shares), num_local)]
        return [by_rank] * len(counts) if counts.dim() == 3 else shares
