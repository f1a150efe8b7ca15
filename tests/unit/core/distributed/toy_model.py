"""A small model in which gradients come in every way: through autograd, straight from a layer, twice, never."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.main_grad import set_gradient_uses
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.sharded_layers import embedding_lookup, tensor_parallel_linear

VOCAB, WIDTH, INNER = 13, 6, 10


def parameter(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter with a description and values that depend on the seed alone."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    result = nn.Parameter((values * 0.5).to(dtype))
    attach_spec(result, ParamSpec(name, shape, full_shards(shape)))
    return result


class ToyModel(nn.Module):
    """Embed, normalize, apply two linear maps and predict with the embedding's own table."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.tp = single_rank_group()
        self.embedding = parameter("embedding.weight", (VOCAB, WIDTH), 1, dtype)
        self.norm = parameter("norm.weight", (WIDTH,), 2, dtype)
        self.unused = parameter("unused.weight", (3, 5), 3, dtype)
        self.fc1 = parameter("fc1.weight", (INNER, WIDTH), 4, dtype)
        self.fc1_bias = parameter("fc1.bias", (INNER,), 5, dtype)
        self.fc2 = parameter("fc2.weight", (WIDTH, INNER), 6, dtype)
        set_gradient_uses(self.embedding, 2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed loss. Shapes: both ``[n]``."""
        hidden = embedding_lookup(tokens, self.embedding) * self.norm
        hidden = torch.tanh(tensor_parallel_linear(hidden, self.fc1, self.fc1_bias, InputRegion.REPLICATED, self.tp))
        hidden = tensor_parallel_linear(hidden, self.fc2, None, InputRegion.SPLIT, self.tp)
        logits = tensor_parallel_linear(hidden, self.embedding, None, InputRegion.REPLICATED, self.tp)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def batch(index: int, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 + index)
    return (
        torch.randint(VOCAB, (size,), generator=generator),
        torch.randint(VOCAB, (size,), generator=generator),
    )


def autograd_gradients(batches: list[int], divisor: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the float64 gradients of the loss over micro-batches, by torch alone; unused parameters have zeros."""
    model = ToyModel()
    for index in batches:
        (model(*batch(index)) / divisor).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
