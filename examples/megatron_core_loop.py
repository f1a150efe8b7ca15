"""Train a small GPT written for megatron-core's public layers; the same file runs with this framework's layers.

    python -m torch.distributed.run --nproc-per-node 2 examples/megatron_core_loop.py --tensor-model-parallel-size 2

Only the launch decides whose layers are used: the package that is installed, or first on PYTHONPATH. It learns the
bytes of a text file, by default its own. docs/python_api.md lists the import paths.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
from megatron.core.utils import init_method_normal

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 32, 4, 2, 32, 8


class Block(nn.Module):
    """Add attention and a feed-forward layer to ``[s, b, h]``; each rank has some of the heads and of the width."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        column = {"config": config, "init_method": init_method_normal(0.02)}
        row = {**column, "bias": True, "input_is_parallel": True, "skip_bias_add": True}
        self.heads = HEADS // parallel_state.get_tensor_model_parallel_world_size()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = tensor_parallel.ColumnParallelLinear(WIDTH, 3 * WIDTH, stride=3, **column)
        self.projection = tensor_parallel.RowParallelLinear(WIDTH, WIDTH, **row)
        self.fc1 = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, skip_bias_add=True, **column)
        self.fc2 = tensor_parallel.RowParallelLinear(4 * WIDTH, WIDTH, **row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, _ = x.shape
        qkv, _ = self.qkv(self.norms[0](x))
        query, key, value = qkv.view(s, b, 3, self.heads, -1).permute(2, 1, 3, 0, 4)  # each [b, heads, s, d]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output, bias = self.projection(seen.permute(2, 0, 1, 3).reshape(s, b, -1))
        x = x + output + bias
        wide, bias = self.fc1(self.norms[1](x))
        output, bias = self.fc2(F.gelu(wide + bias))
        result: torch.Tensor = x + output + bias
        return result


class SmallGPT(nn.Module):
    """Give the loss of every token; the embedding is the output layer too, and the logits stay cut over the ranks."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        init_method = init_method_normal(0.02)
        self.embedding = tensor_parallel.VocabParallelEmbedding(VOCAB, WIDTH, config=config, init_method=init_method)
        self.position = nn.Parameter(torch.zeros(LENGTH, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.output = tensor_parallel.ColumnParallelLinear(
            WIDTH, VOCAB, config=config, init_method=init_method, bias=False, skip_weight_param_allocation=True
        )

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embedding(tokens).transpose(0, 1).contiguous() + self.position)
        logits, _ = self.output(hidden, weight=self.embedding.weight)
        losses: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous())
        return losses


def train(text: bytes, iterations: int, tensor_model_parallel_size: int, device: str) -> list[float]:
    """Return the loss of each iteration, the mean over the whole batch."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size)
    torch.manual_seed(1234)
    config = ModelParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size, use_cpu_initialization=True, params_dtype=torch.float32
    )
    model = SmallGPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    group, size = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_world_size()
    data, generator, losses = torch.tensor(list(text)), torch.Generator().manual_seed(5), []
    for iteration in range(1, iterations + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        rows = rows.chunk(size)[parallel_state.get_data_parallel_rank()]
        batch = {"text": rows.to(device)} if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
        rows = tensor_parallel.broadcast_data(["text"], batch, torch.int64)["text"] if device != "cpu" else rows
        loss = model(rows[:, :-1], rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean, group=group)
        losses.append(mean.item())
        if dist.get_rank() == 0:
            print(f"iteration {iteration}: loss {losses[-1]:.8f}", flush=True)
    return losses


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-model-parallel-size", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    arguments = parser.parse_args()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    train(arguments.text.read_bytes(), arguments.iterations, arguments.tensor_model_parallel_size, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
