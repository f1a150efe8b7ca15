"""Run measured steps of the floor: the GEMMs, attention and optimizer update of a training step, and nothing else."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopwatch import Stopwatch
from workload import add_workload_arguments, workload_of

if TYPE_CHECKING:
    import torch

_NUM_TRIALS, _TRIAL_S = 3, 1.0


def floor_step(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    seq_length: int,
    batch_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Return a function that computes one step of a GPT-2 model with tied embeddings.

    Forward and input gradients use the faster of torch's two GEMM libraries. AdamW updates float32 parameters.
    """
    import torch
    import torch.nn.functional as F

    rows, h = seq_length * batch_size, hidden_size
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * num_layers + [(h, vocab_size)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    layers = [(random(rows, i), random(o, i), random(rows, o), random(o, i)) for i, o in sizes]
    heads = (batch_size, num_heads, seq_length, h // num_heads)
    q, k, v = (random(*heads).requires_grad_() for _ in range(3))
    context_grad = random(*heads)
    parameter = torch.nn.Parameter(torch.randn(sum(i * o for i, o in sizes)))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def multiply(linear: Callable[..., Any]) -> None:
        for x, weight, grad, weight_grad in layers:
            linear(x, weight)
            linear(grad, weight.t())
            torch.mm(grad.t(), x, out=weight_grad)

    def onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return output

    def shortest(linear: Callable[..., Any]) -> float:
        times: list[float] = []
        while len(times) < _NUM_TRIALS or sum(times) < _TRIAL_S:
            start = time.perf_counter()
            multiply(linear)
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.no_grad():
        libraries: tuple[Callable[..., Any], ...] = (F.linear, onednn)
        chosen = min(libraries, key=shortest)

    def step() -> None:
        with torch.no_grad():
            multiply(chosen)
        for _ in range(num_layers):
            torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), context_grad)
        optimizer.step()

    return step


def main() -> None:
    """Run the command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True, help="writes PATH.0.json")
    arguments = parser.parse_args()
    workload = workload_of(arguments)
    step = floor_step(
        num_layers=workload.num_layers,
        hidden_size=workload.hidden_size,
        num_heads=workload.num_attention_heads,
        seq_length=workload.seq_length,
        batch_size=workload.micro_batch_size,
        vocab_size=workload.padded_vocab_size,
        dtype=getattr(torch, workload.dtype),
    )
    stopwatch = Stopwatch()
    for _ in range(arguments.num_warmup + arguments.num_steps):
        with stopwatch.step():
            step()
    versions = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    stopwatch.write(arguments.output.with_suffix(".0.json"), arguments.num_warmup, [], versions)


if __name__ == "__main__":
    main()
