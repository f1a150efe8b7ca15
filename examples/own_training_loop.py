"""Train a small GPT with a model, an optimizer and a loop of its own: of Megatron only the layers and the groups.

One process, or several that share each layer and cut the batch; the losses are the same at every layout:

    python examples/own_training_loop.py
    torchrun --nproc-per-node 4 examples/own_training_loop.py --tensor-model-parallel-size 2

It learns the bytes of a text file, by default its own. docs/python_api.md explains each piece.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.errors import InputError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import Group
from megatron.core.sharding import attach_spec, spec_of
from megatron.core.tensor_parallel import (
    ColumnShardedLinear,
    RowShardedLinear,
    VocabShardedEmbedding,
    initialize_parameter,
    vocab_sharded_cross_entropy,
)

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 64, 4, 2, 48, 8
PARALLEL_LAYERS = (ColumnShardedLinear, RowShardedLinear, VocabShardedEmbedding)


class Block(nn.Module):
    """Add attention and a feed-forward layer to ``[s, b, h]``; each rank has some of the heads and of the width."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        self.heads = HEADS // tp.size
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = ColumnShardedLinear(WIDTH, 3 * WIDTH, tp, stride=3)
        self.projection = RowShardedLinear(WIDTH, WIDTH, tp)
        self.fc1 = ColumnShardedLinear(WIDTH, 4 * WIDTH, tp, skip_bias_add=True)
        self.fc2 = RowShardedLinear(4 * WIDTH, WIDTH, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(s, b, 3, self.heads, -1)
        query, key, value = parts.permute(2, 1, 3, 0, 4)  # each [b, heads, s, d]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.permute(2, 0, 1, 3).reshape(s, b, -1))
        wide, bias = self.fc1(self.norms[1](x))
        output: torch.Tensor = x + self.fc2(F.gelu(wide + bias))
        return output


class SmallGPT(nn.Module):
    """Give the loss of every token; the logits of the vocabulary stay cut over the ranks."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.embedding = VocabShardedEmbedding(VOCAB, VOCAB, WIDTH, tp)
        self.position = nn.Parameter(torch.zeros(LENGTH, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(tp) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.output = ColumnShardedLinear(WIDTH, VOCAB, tp, bias=False)
        for name, layer in self.named_modules():
            for parameter in layer.parameters(recurse=False) if isinstance(layer, PARALLEL_LAYERS) else ():
                # The values follow from the seed, the name and the place in the whole weight, at any layout.
                attach_spec(parameter, spec_of(parameter).with_prefix(f"{name}."))
                initialize_parameter(parameter, seed=1234)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.blocks(self.embedding(tokens) + self.position))
        return vocab_sharded_cross_entropy(logits, labels.t(), VOCAB, self.tp)


def train(state: ParallelState, text: bytes, iterations: int, device: str, dtype: torch.dtype) -> list[float]:
    """Return the loss of each iteration, the mean over the whole batch."""
    data = torch.tensor(list(text))
    model = SmallGPT(state.tp).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for iteration in range(1, iterations + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        rows = rows.chunk(state.dp.size)[state.dp.rank].to(device)  # the ranks of a tensor-parallel group have the same
        loss = model(rows[:, :-1], rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            all_reduce(parameter.grad, state.dp)
            parameter.grad /= state.dp.size
        optimizer.step()
        mean = loss.detach() / state.dp.size
        all_reduce(mean, state.dp)
        losses.append(mean.item())
        if state.rank == 0:
            print(f"iteration {iteration}: loss {losses[-1]:.5f}", flush=True)
    return losses


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-model-parallel-size", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    arguments = parser.parse_args()
    text = arguments.text.read_bytes() if arguments.text.is_file() else b""
    if len(text) <= LENGTH:
        parser.error(f"--text {arguments.text} is no file of more than {LENGTH} bytes")
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
    try:
        state = create_parallel_state(ParallelSizes(tp=arguments.tensor_model_parallel_size))
    except InputError as error:
        parser.error(str(error))
    train(state, text, arguments.iterations, device, torch.float32)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
