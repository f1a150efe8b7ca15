"""The attention core: softmax(q kᵀ / √d) v, by torch's fused kernels, by FlashAttention, or written out plainly.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Dao et al. 2022, https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F

from megatron.core.device import seeded_generator
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import AttentionDropout
from megatron.core.kernels.flash_attn import load_flash_attention
from megatron.core.precision import arithmetic_dtype

PLAIN_BACKENDS = ("unfused", "local")
"""Values of ``--attention-backend`` that ask for attention without fused kernels."""

AttentionCore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPattern, AttentionDropout | None], torch.Tensor
]
"""(query, key, value, pattern, dropout) -> context.

Shapes: ``query: [sq, b, n, d]``, ``key, value: [sk, b, g, d]`` ``-> [sq, b, n, d]``.
"""


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: AttentionPattern,
    dropout: AttentionDropout | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention step by step with the softmax in at least float32: the oracle of the fused kernels.

    With ``softcap`` the scores are kept within that number of 0, by a tanh.
    """
    groups = key.shape[2]
    heads_per_group = query.shape[2] // groups
    key = key.repeat_interleave(heads_per_group, dim=2)
    value = value.repeat_interleave(heads_per_group, dim=2)
    visible = pattern.matrix(query.shape[0], key.shape[0], query.device)
    # A product of float16 heads can pass its largest number, 65,504, before it is scaled.
    wide = arithmetic_dtype(query.dtype)
    scores = torch.einsum("qbnd,kbnd->bnqk", query.to(wide), key.to(wide)) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    if dropout:
        weights = dropout.drop(weights)
    return torch.einsum("bnqk,kbnd->qbnd", weights, value)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: AttentionPattern,
    dropout: AttentionDropout | None,
) -> torch.Tensor:
    """Compute attention by torch's scaled_dot_product_attention, which picks the kernel.

    With dropout on CPU it has none but the plain steps, and the plain core takes its place: that drops the same weights
    at every layout.
    """
    if dropout and query.device.type == "cpu":
        return plain_attention(query, key, value, pattern, dropout)
    num_queries, num_keys = query.shape[0], key.shape[0]
    # The kernels' own causal rule is that of as many queries as keys; a single query sees all keys.
    needs_no_matrix = pattern.is_plain_causal and num_queries in (1, num_keys)
    with _drawing_as(dropout, query.device):
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if needs_no_matrix else pattern.matrix(num_queries, num_keys, query.device),
            dropout_p=dropout.probability if dropout else 0.0,
            is_causal=needs_no_matrix and num_queries > 1,
            enable_gqa=key.shape[2] != query.shape[2],
        )
    return context.permute(2, 0, 1, 3)


def select_attention_core(backend: str, device_type: str, softcap: float | None = None) -> AttentionCore:
    """Return the attention core that ``--attention-backend`` names on this kind of device.

    Capped scores are computed plainly: torch's fused kernels have no place for it.
    """
    if softcap is not None:
        return partial(plain_attention, softcap=softcap)
    if backend in PLAIN_BACKENDS:
        return plain_attention
    if device_type == "cuda" and backend in ("auto", "flash"):
        flash = load_flash_attention()
        if flash is not None:
            return _with_flash(flash)
    return fused_attention


def describe_missing_flash(attention_backend: str, params_dtype: str, device_type: str) -> str | None:
    """Return one line that says why FlashAttention, asked for by name, is not used on this kind of device, or None."""
    if attention_backend != "flash":
        return None
    if device_type != "cuda":
        reason = "it needs CUDA"
    elif params_dtype not in ("float16", "bfloat16"):
        reason = "it needs --bf16 or --fp16"
    elif load_flash_attention() is None:
        reason = "the package cannot be imported"
    else:
        return None
    return f"flash-attn is not used, since {reason}: torch's own attention takes its place"


def _with_flash(
    flash: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> AttentionCore:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern,
        dropout: AttentionDropout | None,
    ) -> torch.Tensor:
        if not pattern.is_plain_causal or query.dtype not in (torch.float16, torch.bfloat16):
            return fused_attention(query, key, value, pattern, dropout)
        with _drawing_as(dropout, query.device):
            return flash(query, key, value, dropout.probability if dropout else 0.0)

    return attention


def _drawing_as(dropout: AttentionDropout | None, device: torch.device) -> AbstractContextManager[None]:
    """Have a library's kernel draw what it drops from the dropout's own seed."""
    return seeded_generator(device, dropout.seed) if dropout else nullcontext()
