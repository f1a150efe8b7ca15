"""Token dispatcher for ``--moe-token-dispatcher-type flex`` that exchanges tokens with DeepEP (package ``deep_ep``).

The interface is that of DeepEP 1.2.1: class ``Buffer``, high-throughput kernels within and between nodes. DeepEP 2
contains the same class. https://github.com/deepseek-ai/DeepEP

A token is sent once to each rank that has some of its experts, with all its choices and weights. That rank sums the
weighted outputs of its own experts, and DeepEP sums the results of the ranks. The backward pass of a dispatch is a
combine, and the reverse. DeepEP orders received tokens by rank and position, so a recomputed dispatch returns the same
rows.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.errors import ConfigurationError
from megatron.core.ops import RowCounts
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.transformer import DecoderConfig
from megatron.core.transformer.moe.expert_dispatch import (
    Experts,
    LateGradients,
    Meanwhile,
    TokenDispatcher,
    sort_choices,
    targets_of,
)
from megatron.core.transformer.moe.expert_router import Routing

_BROKEN = (ImportError, OSError, AttributeError, RuntimeError, AssertionError)
_MULTIPLE, _LARGEST, _MOST_CHOICES = 16, 8176, 32
"""Limits of DeepEP 1.2.1's kernels: width of a row (half a row and a barrier in 8 KiB), and choices of a token."""


class DeepEP:
    """DeepEP's buffer class, and the dtype of the choices that it was compiled for."""

    def __init__(self, buffer: Any, index_dtype: torch.dtype) -> None:
        self.buffer, self.index_dtype = buffer, index_dtype

    def buffer_of(self, group: Any, row_bytes: int) -> Any:
        """Return the buffer for rows of ``row_bytes`` over a torch process group; the first call is a collective."""
        size = group.size()
        configs = self.buffer.get_dispatch_config(size), self.buffer.get_combine_config(size)
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        return _make_buffer(self.buffer, group, num_nvl_bytes, num_rdma_bytes)


@functools.lru_cache(maxsize=1)
def _make_buffer(kind: Any, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> Any:
    return kind(group, num_nvl_bytes, num_rdma_bytes)


@functools.cache
def load_deepep() -> DeepEP | None:
    """Return DeepEP, or None if the package is unavailable.

    An installed package that cannot be imported, or lacks the class ``Buffer``, causes one warning.
    """
    try:
        package = importlib.import_module("deep_ep")
        if package.Buffer is None:  # a build of version 2 without the older interface
            raise ImportError("deep_ep was built without the class Buffer")
        return DeepEP(package.Buffer, getattr(package, "topk_idx_t", torch.int64))
    except _BROKEN as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "deep_ep"):
            warnings.warn(f"DeepEP is installed but cannot be used, so alltoall is used: {error}", stacklevel=2)
        return None


def why_no_deepep(num_ranks: int, device: torch.device | str) -> str | None:
    """Return the reason why DeepEP cannot exchange tokens over ``num_ranks`` ranks on this device, or None."""
    if num_ranks == 1:
        return "all experts are on each rank"
    if torch.device(device).type != "cuda":
        return "it needs CUDA"
    return "the package deep_ep cannot be imported" if load_deepep() is None else None


def check_deepep(config: DecoderConfig, groups: ExpertGroups) -> DeepEP:
    """Return DeepEP, which must be installed, if it supports the model and its layout.

    Raises:
        ConfigurationError: it does not; the message has one line per problem.
    """
    deepep = load_deepep()
    assert deepep is not None, "the package was imported"
    problems = list(_problems(config, groups, deepep))
    if problems:
        raise ConfigurationError(problems)
    return deepep


def _problems(config: DecoderConfig, groups: ExpertGroups, deepep: DeepEP) -> Iterator[str]:
    width, moe, copies = config.expert_input_size, config.moe, groups.tensor_size
    width_flag = "--hidden-size" if moe.moe_latent_size is None else "--moe-latent-size"
    if config.params_dtype != "bfloat16":
        yield (
            f"--moe-token-dispatcher-type flex: DeepEP sends bfloat16, and the model is in {config.params_dtype}; add "
            "--bf16, or use --moe-token-dispatcher-type alltoall"
        )
    if moe.moe_router_dtype == "fp64":
        yield (
            "--moe-router-dtype fp64: DeepEP sends weights in float32; use fp32, or use --moe-token-dispatcher-type "
            "alltoall"
        )
    if width % _MULTIPLE or width > _LARGEST:
        yield (
            f"{width_flag} {width}: DeepEP needs a multiple of {_MULTIPLE} up to {_LARGEST}; use "
            "--moe-token-dispatcher-type alltoall"
        )
    if moe.moe_router_topk * copies > _MOST_CHOICES:
        yield (
            f"--moe-router-topk {moe.moe_router_topk} with --expert-tensor-parallel-size {copies}: their product is "
            f"{moe.moe_router_topk * copies}, and DeepEP supports {_MOST_CHOICES}; use "
            "--moe-token-dispatcher-type alltoall"
        )
    try:
        deepep.buffer.get_dispatch_config(groups.model.size)
    except AssertionError:
        yield (
            f"--expert-model-parallel-size {groups.size} with --expert-tensor-parallel-size {copies}: DeepEP does not "
            f"support {groups.model.size} ranks; use 2, 4 or 8, or --moe-token-dispatcher-type alltoall"
        )


class _Exchange:
    """One dispatch of tokens, with the numbers of received rows per expert and the handle for the way back."""

    def __init__(self, buffer: Any, group: Group, num_experts: int) -> None:
        self._buffer, self._group, self._num_experts = buffer, group, num_experts
        self.counts: list[int] = []
        self._handle: Any = None

    def dispatch(
        self, x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Send tokens to the ranks of their experts; return the received tokens, choices of own experts, and weights.

        The host waits for the numbers of rows. A choice of another rank's expert is -1, with the weight 0.
        """
        per_rank, per_node, per_expert, is_sent, _ = self._buffer.get_dispatch_layout(targets, self._num_experts)
        entry = self._group.begin("deepep_dispatch", x, x.nbytes)
        rows, received, received_weights, self.counts, self._handle, event = self._buffer.dispatch(
            x,
            topk_idx=targets,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        meanwhile()
        event.current_stream_wait()
        self._group.end(entry)
        return rows, received, received_weights

    def dispatch_again(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to the same ranks as before."""
        entry = self._group.begin("deepep_dispatch", x, x.nbytes)
        rows: torch.Tensor = self._buffer.dispatch(x, handle=self._handle)[0]
        self._group.end(entry)
        return rows

    def combine(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None, late: LateGradients | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of each token's rows, and of its weights, over the ranks; meanwhile compute ``late``."""
        entry = self._group.begin("deepep_combine", rows, rows.nbytes)
        total, total_weights, event = self._buffer.combine(
            rows, self._handle, topk_weights=weights, async_finish=bool(late)
        )
        if late:
            while late:
                late.pop(0)()
            event.current_stream_wait()
        self._group.end(entry)
        return total, total_weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        exchange: _Exchange,
        meanwhile: Meanwhile,
        late: LateGradients | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.exchange, ctx.late = exchange, late
        rows, received, received_weights = exchange.dispatch(x, targets, weights, meanwhile)
        ctx.mark_non_differentiable(received)
        return rows, received, received_weights

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None, weights_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad, weights_grad_of_own = ctx.exchange.combine(grad.contiguous(), weights_grad.contiguous(), ctx.late)
        return x_grad, None, weights_grad_of_own, *(None,) * 3


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.combine(rows)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.dispatch_again(grad.contiguous()), None


class DeepEPDispatcher(TokenDispatcher):
    """Send each token once to each rank of its experts, with its weights; each rank sums its own experts' outputs."""

    def __init__(self, num_experts: int, groups: ExpertGroups, deepep: DeepEP) -> None:
        super().__init__(num_experts, groups)
        self._deepep = deepep

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows are exchanged."""
        return self.groups.model.size > 1

    @property
    def sends_padding(self) -> bool:
        """Return False: each rank pads the rows that it has received."""
        return False

    def _exchanged(
        self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile, late: LateGradients | None
    ) -> torch.Tensor:
        group, num_local = self.groups.model, self.num_local
        targets, weights = targets_of(routing, self.groups, num_local)
        num_targets = group.size * num_local
        if routing.may_drop:
            targets = targets.masked_fill(targets >= num_targets, -1)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        buffer = self._deepep.buffer_of(group.handle, x.shape[1] * x.element_size())
        exchange = _Exchange(buffer, group, num_targets)
        targets = targets.to(self._deepep.index_dtype).contiguous()
        arguments = x.contiguous(), targets, weights.contiguous(), exchange, meanwhile, late
        rows, received, weights = _Dispatch.apply(*arguments)  # type: ignore[no-untyped-call]
        group.ensure_not_given_up()
        ordered = sort_choices(received.masked_fill(received < 0, num_local), num_local)
        counts = RowCounts(exchange.counts, ordered.counts())
        order = ordered.row_order(sum(counts))
        output = experts(rows, counts, order, weights)
        result: torch.Tensor = _Collect.apply(output, exchange)  # type: ignore[no-untyped-call]
        return result


def deepep_dispatcher(
    config: DecoderConfig, groups: ExpertGroups, device: torch.device | str
) -> DeepEPDispatcher | None:
    """Return the dispatcher with DeepEP, or None if it cannot be used on this device.

    Raises:
        ConfigurationError: DeepEP does not support the model or its layout.
    """
    assert config.moe.num_experts is not None
    if why_no_deepep(groups.model.size, device) is not None:
        return None
    deepep = check_deepep(config, groups)
    deepep.buffer.set_num_sms(config.moe.moe_deepep_num_sms)
    return DeepEPDispatcher(config.moe.num_experts, groups, deepep)
