"""Which exchange between context-parallel ranks an attention layer uses."""

from __future__ import annotations

from megatron.core.context_parallel.all_gather_attention import AllGatherAttention
from megatron.core.context_parallel.ring_attention import RingAttention
from megatron.core.context_parallel.ulysses_attention import UlyssesAttention
from megatron.core.kernels.attention_block import AttentionBlocks
from megatron.core.kernels.dot_product_attention import AttentionCore
from megatron.core.process_group import Group


def with_context_parallel(
    core: AttentionCore, exchange: str, cp: Group, *, plain_blocks: bool = False, softcap: float | None = None
) -> AttentionCore:
    """Return ``core`` for sequences that are split over ``cp``; the core itself where one rank holds them whole.

    The result takes a pattern without a mask: that of a whole sequence would be larger than anything else that a rank
    holds. ``plain_blocks`` keeps ring attention from kernels; ``softcap`` must be the core's. With ``a2a+p2p`` the
    ranks of the group's inner level share the heads, and each of them goes round a ring with the outer level's.
    """
    if cp.size == 1:
        return core
    if exchange == "a2a+p2p":
        assert cp.levels is not None, "the group is cut in no levels"
        inner, outer = cp.levels
        # Neighbours hold stretches of the two chunks that one rank of a ring of the outer size would hold.
        core = with_context_parallel(core, "p2p", outer, plain_blocks=plain_blocks, softcap=softcap)
        return with_context_parallel(core, "a2a", inner)
    if exchange == "p2p":
        return RingAttention(cp, AttentionBlocks(plain_blocks, softcap))
    if exchange == "all_gather":
        return AllGatherAttention(cp, core)
    assert exchange == "a2a", exchange
    return UlyssesAttention(cp, core)
