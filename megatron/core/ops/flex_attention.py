"""Attention by torch's FlexAttention: documents, windows and soft-capped scores, with memory linear in the sequence.

Dong et al. 2024, https://arxiv.org/abs/2412.05496. Queries and keys are split into blocks. The block mask selects the
pairs of blocks to compute. It is built from each block's lowest and highest document, not from single positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._triton import has_triton_package

from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.attention_sinks import merge_sinks
from megatron.core.ops.dot_product_attention import AttentionInputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

BLOCK_SIZE = 128
"""Block size of queries and keys; sequence lengths must be multiples of it."""
_MOST_COMPILED_FORMS = 64
_MAX_CACHED_BLOCK_MASKS = 16
"""Block masks in a layer's cache: one per length, in training and in evaluation."""


@functools.cache
def load_flex_attention() -> Callable[..., Any] | None:
    """Return torch's FlexAttention, compiled at its first call, or None without Triton.

    This raises torch's limit on recompilations of one function: each length and window, training and evaluation count,
    and beyond the limit torch would materialize all scores.
    """
    if not has_triton_package():
        return None
    import torch._dynamo.config as limits
    from torch.nn.attention.flex_attention import flex_attention

    limits.recompile_limit = max(limits.recompile_limit, _MOST_COMPILED_FORMS)
    return torch.compile(flex_attention, fullgraph=True)


@functools.cache
def load_flash_flex_attention() -> Callable[..., Any] | None:
    """Return FlexAttention on FlashAttention 4's kernels (its FLASH backend), or None if this torch does not have it.

    The kernels cannot take numbers that torch treats as dynamic, so each length is compiled.
    """
    if load_flex_attention() is None:
        return None
    from torch.nn.attention.flex_attention import FlexKernelOptions, flex_attention

    if "BACKEND" not in FlexKernelOptions.__annotations__:
        return None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return functools.partial(compiled, kernel_options={"BACKEND": "FLASH"})


class BlockMaskCache:
    """Cache of the block masks of a layer.

    A pattern with documents caches its own block mask, which all layers share. A block mask without documents depends
    only on lengths, window and causality, so that each step reuses it: on an H200 building it took 2 ms of host time,
    ten times as long as the attention. A mask built under a fake tensor mode stays in the cache of the model that was
    built under it.

    ``query_block_size`` is the block size of queries if it differs from that of keys, for kernels that take document
    numbers as int32.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, query_block_size: int | None = None) -> None:
        self._block_sizes = (block_size,) if query_block_size is None else (block_size, query_block_size)
        self._cache: dict[Hashable, BlockMask] = {}

    def get(self, pattern: AttentionPattern, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
        """Return the block mask of a pattern for these numbers of queries and keys."""
        assert pattern.mask is None, "a mask is not made of blocks"

        def make() -> BlockMask:
            return make_block_mask(pattern, num_queries, num_keys, device, *self._block_sizes)

        if pattern.document_ids is not None:
            return pattern.shared(("blocks", num_queries, *self._block_sizes[1:]), make)
        key = (pattern.is_causal, pattern.window, pattern.first_query, num_queries, num_keys, device)
        block_mask = self._cache.pop(key, None)
        if block_mask is None:
            block_mask = make()
            if len(self._cache) == _MAX_CACHED_BLOCK_MASKS:
                # The first entry is the least recently used one.
                del self._cache[next(iter(self._cache))]
        self._cache[key] = block_mask
        return block_mask


def attend_by_blocks(
    flex: Callable[..., Any], masks: BlockMaskCache, inputs: AttentionInputs, softcap: float | None
) -> torch.Tensor:
    """Compute attention with ``flex``, without repeating key-value heads.

    With sinks the kernel also returns the log-sum-exp of its rows, whose gradient it accepts. The numbers of queries
    and keys must be multiples of the block size.
    """
    assert not inputs.dropout, "FlexAttention has no dropout"
    block_mask = masks.get(inputs.pattern, inputs.num_queries, inputs.num_keys, inputs.query.device)
    call = functools.partial(
        flex,
        *(tensor.permute(1, 2, 0, 3) for tensor in inputs.heads),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask,
        enable_gqa=inputs.has_groups,
    )
    context: torch.Tensor
    if inputs.sinks is None:
        context = call()
    else:
        context, rows = call(return_aux=_row_sums_too())
        context, _ = merge_sinks(context, rows.lse, inputs.sinks)
    return context.permute(2, 0, 1, 3)


def _row_sums_too() -> AuxRequest:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def make_block_mask(
    pattern: AttentionPattern,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
    query_block_size: int | None = None,
) -> BlockMask:
    """Convert a pattern without a mask to a FlexAttention block mask.

    ``block_size`` is that of keys, and of queries unless ``query_block_size`` is given; document numbers are then int32
    in the kernel. The host does not synchronize with the device. Memory is that of a matrix of blocks, 1/16,384 of the
    full attention matrix.
    """
    from torch.nn.attention.flex_attention import BlockMask

    assert pattern.mask is None, "a mask is not made of blocks"
    first = pattern.position_of_first_query(num_queries, num_keys)
    positions, of_queries = torch.arange(num_keys, device=device), query_block_size or block_size
    query_low, query_high = _bounds(positions[None, first : first + num_queries], of_queries)
    key_low, key_high = _bounds(positions[None], block_size)
    # [b or 1, query blocks, key blocks]: whether any pair, and whether every pair, of two blocks is visible.
    some = torch.ones(1, query_low.shape[1], key_low.shape[1], dtype=torch.bool, device=device)
    every = some
    if pattern.is_causal:
        some = some & (key_low[:, None] <= query_high[..., None])
        every = every & (key_high[:, None] <= query_low[..., None])
    if pattern.window is not None:
        some = some & (key_high[:, None] > query_low[..., None] - pattern.window)
        every = every & (key_low[:, None] > query_high[..., None] - pattern.window)
    if pattern.document_ids is not None:
        query_low, query_high = _bounds(pattern.document_ids[:, first : first + num_queries], of_queries)
        key_low, key_high = _bounds(pattern.document_ids, block_size)
        some = some & (key_low[:, None] <= query_high[..., None]) & (query_low[..., None] <= key_high[:, None])
        every = every & (key_low[:, None] == query_high[..., None]) & (query_low[..., None] == key_high[:, None])
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every),
        *_in_order(every),
        BLOCK_SIZE=(of_queries, block_size),
        mask_mod=_rule(pattern, first, pattern.document_ids if query_block_size is None else _as_int32(pattern)),
        seq_lengths=(num_queries, num_keys),
    )


def _bounds(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and maximum of every block. Shapes: ``[b, s] -> [b, blocks]`` twice."""
    low, high = torch.aminmax(values.reshape(values.shape[0], -1, block_size), dim=2)
    return low, high


def _in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of visible key blocks of each query block, and the key blocks with the visible ones first."""
    numbers = blocks.int()[:, None]
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(dim=-1, dtype=torch.int32), order.int()


def _as_int32(pattern: AttentionPattern) -> torch.Tensor | None:
    return None if pattern.document_ids is None else pattern.document_ids.int()


def _rule(pattern: AttentionPattern, first: int, ids: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's ``mask_mod``: whether a query may attend to a key; ``ids`` are the documents."""
    is_causal, window = pattern.is_causal, pattern.window

    def may_look(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position = query + first
        allowed = key <= position if is_causal else key >= 0
        if window is not None:
            allowed = allowed & (key > position - window)
        if ids is not None:
            allowed = allowed & (ids[batch, position] == ids[batch, key])
        return allowed

    return may_look


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        # tanh computed with a sigmoid: on an H200 the forward pass takes 0.19 ms instead of 0.32 ms.
        return (2.0 * torch.sigmoid(score * (2.0 / softcap)) - 1.0) * softcap

    return cap
