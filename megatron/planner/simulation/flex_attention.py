"""FlexAttention on a simulated GPU: the kernels that torch compiles it to, with the work of its visible blocks.

Forward is one kernel, backward two: the row sums of output times gradient, and the three gradients. How many blocks are
visible is in the mask's values, which no tensor has here. So each mask is made a second time on the host, of documents
that are as long as those of the empty samples, and its blocks are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron.core.ops import attention_backend, flex_attention
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.planner.simulation.recorder import Recorder

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


class PretendedFlexAttention:
    """Stand in for the compiled function; ``second_document`` is the position where the second one of a sample begins.

    Positions are counted from a call's first key on.
    """

    def __init__(self, recorder: Recorder, second_document: int) -> None:
        self._recorder = recorder
        self._second_document = second_document
        self._pairs = WeakKeyDictionary[Any, int]()

    @contextmanager
    def taking_calls(self) -> Iterator[None]:
        """Let attention take this for FlexAttention."""
        make = flex_attention.make_block_mask

        def make_and_count(
            pattern: AttentionPattern, num_queries: int, num_keys: int, device: torch.device, block_size: int
        ) -> BlockMask:
            mask = make(pattern, num_queries, num_keys, device, block_size)
            self._pairs[mask] = self._visible_pairs(make, pattern, num_queries, num_keys, block_size)
            return mask

        with (
            patch.object(flex_attention, "make_block_mask", make_and_count),
            patch.object(attention_backend, "load_flex_attention", lambda: self),
        ):
            yield

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Callable[..., torch.Tensor] | None,
        block_mask: BlockMask,
        enable_gqa: bool,
        return_aux: AuxRequest | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, AuxOutput]:
        """Return the output, and the log-sum-exps where they are asked for, and note the kernels.

        Shapes: those of torch's own.
        """
        flops = 4.0 * self._pairs[block_mask] * query.shape[0] * query.shape[1] * query.shape[3]
        lists = [tensor for tensor in block_mask.as_tuple() if isinstance(tensor, torch.Tensor)]
        output: torch.Tensor
        output, logsumexp = _FlexAttention.apply(query, key, value, lists, flops, self._recorder)  # type: ignore[no-untyped-call]
        if return_aux is None:
            return output
        from torch.nn.attention.flex_attention import AuxOutput

        return output, AuxOutput(lse=logsumexp)

    def _visible_pairs(
        self,
        make: Callable[..., BlockMask],
        pattern: AttentionPattern,
        num_queries: int,
        num_keys: int,
        block_size: int,
    ) -> int:
        """Return how many pairs of a query and a key the blocks have that are computed, whole or in part."""
        with unset_fake_temporarily():
            ids = None
            if pattern.document_ids is not None:
                ids = (torch.arange(num_keys) >= self._second_document).long()[None]
            host = torch.device("cpu")
            mask = make(replace(pattern, document_ids=ids), num_queries, num_keys, host, block_size)
            blocks = mask.kv_num_blocks.sum()
            if mask.full_kv_num_blocks is not None:
                blocks = blocks + mask.full_kv_num_blocks.sum()
            return int(blocks) * block_size**2


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: list[torch.Tensor],
        flops: float,
        recorder: Recorder,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.empty_like(query)
        row_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        recorder.launch("_flex_attention", [query, key, value, *lists], [output, row_sums], flops)
        ctx.save_for_backward(query, key, value, output, row_sums)
        ctx.lists, ctx.flops, ctx.recorder = lists, flops, recorder
        return output, row_sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, row_sums = ctx.saved_tensors
        recorder: Recorder = ctx.recorder
        products = torch.empty_like(row_sums)
        recorder.launch("flex_row_sums", [grad, output], [products])
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        read = [query, key, value, grad, row_sums, products, *ctx.lists]
        recorder.launch("_flex_attention_backward", read, grads, 2.5 * ctx.flops)
        return *grads, None, None, None
