"""A stand-in for transformer_engine.pytorch with its signatures, written in torch; tests install it as that."""

from __future__ import annotations

import math

import torch
from torch import nn

calls: list[dict[str, object]] = []


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
    ):
        super().__init__()
        assert qkv_format == "sbhd"
        self.num_heads, self.width, self.num_groups = num_attention_heads, kv_channels, num_gqa_groups
        self.attention_dropout = attention_dropout

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
    ):
        """``query_layer: [s, b, n, d]``, ``key_layer, value_layer: [s, b, g, d]`` ``-> [s, b, n * d]``."""
        length = query_layer.shape[0]
        assert query_layer.dtype in (torch.float16, torch.bfloat16)
        assert query_layer.shape[2:] == (self.num_heads, self.width)
        assert key_layer.shape == value_layer.shape == (length, query_layer.shape[1], self.num_groups, self.width)
        calls.append({"kind": "attention", "dropout": self.attention_dropout, "mask": attn_mask_type})
        is_causal = {"causal": True, "no_mask": False}[attn_mask_type]
        left, right = window_size or (-1, 0 if is_causal else -1)
        assert right == 0 if is_causal else (left >= 0) == (right >= 0)
        grouped = query_layer.float().unflatten(2, (self.num_groups, -1))
        scores = torch.einsum("qbghd,kbgd->bghqk", grouped, key_layer.float()) / math.sqrt(self.width)
        positions = torch.arange(length, device=query_layer.device)
        behind = positions[:, None] - positions
        if left >= 0:
            scores = scores.masked_fill(behind > left, -math.inf)
        if right >= 0:
            scores = scores.masked_fill(-behind > right, -math.inf)
        weights = torch.dropout(scores.softmax(dim=-1), self.attention_dropout, True)
        context = torch.einsum("bghqk,kbgd->qbghd", weights, value_layer.float())
        return context.flatten(2).to(query_layer.dtype)


class _Normalize(torch.autograd.Function):
    """Read the weights from the module in both passes, as transformer-engine does."""

    @staticmethod
    def forward(ctx, x, module, *weights):
        assert x.is_contiguous()
        ctx.save_for_backward(x)
        ctx.module = module
        return module.compute(x, *weights)

    @staticmethod
    def backward(ctx, grad_output):
        leaves = [tensor.detach().requires_grad_() for tensor in (*ctx.saved_tensors, *ctx.module.parameters())]
        with torch.enable_grad():
            output = ctx.module.compute(*leaves)
        x, *weights = torch.autograd.grad(output, leaves, grad_output)
        return x, None, *weights


class _Norm(nn.Module):
    num_weights = 1

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
    ):
        super().__init__()
        self.eps, self.mean = eps, 1.0 if zero_centered_gamma else 0.0
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device))
        if self.num_weights == 2:
            self.bias = nn.Parameter(torch.empty(normalized_shape, device=device))

    def forward(self, x):
        calls.append({"kind": type(self).__name__})
        return _Normalize.apply(x, self, *self.parameters())


class RMSNorm(_Norm):
    def compute(self, x, weight):
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * (weight.float() + self.mean)).to(weight.dtype)


class LayerNorm(_Norm):
    num_weights = 2

    def compute(self, x, weight, bias):
        wide = x.float() - x.float().mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * (weight.float() + self.mean) + bias.float()).to(weight.dtype)
