"""Parameters that arrive while the forward pass already runs, and gradients that leave while the backward pass does."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fully_sharded_data_parallel import ShardedGradBuffer
from megatron.core.parallel_state import create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces
from tests.harness.distributed import run_distributed


def linear(name: str, width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False, dtype=torch.float64)
    attach_spec(layer.weight, ParamSpec(f"{name}.weight", (width, width), full_pieces((width, width))))
    return layer


def gathered(overlap: bool) -> tuple[list[list[bool]], list[list[bool]], list[float]]:
    """Return, when each layer is called, which buckets nobody has waited for; the same in a second pass; the sums."""
    state = create_parallel_state()
    layers = nn.Sequential(*(linear(name, 20) for name in ("first", "second", "third")))
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=overlap, ddp_bucket_size=1
    )
    ddp = DistributedDataParallel(layers, options, state)
    (buffer,) = ddp.grad_buffers
    flat = buffer.flat_parameters
    assert flat is not None
    with torch.no_grad():
        for part in ddp.parts:
            part.values.fill_(state.rank + 1.0)
    ddp.start_param_gather()
    seen: list[list[bool]] = []
    for layer in layers:
        layer.register_forward_hook(
            lambda *_: seen.append([flat.is_pending(i) for i in range(len(buffer.buckets))]),
        )
    layers(torch.ones(1, 20, dtype=torch.float64))
    first_pass = list(seen)
    seen.clear()
    layers(torch.ones(1, 20, dtype=torch.float64))
    return first_pass, seen, [float(p.sum()) for p in layers.parameters()]


def test_each_module_waits_for_its_own_parameters_only() -> None:
    for first_pass, second_pass, sums in run_distributed(2, gathered, True):
        # Buckets lie last layer first.
        assert first_pass == [[True, True, False], [True, False, False], [False, False, False]]
        assert second_pass == [[False] * 3] * 3
        # 400 weights in a bucket of 512: 256 of them are rank 0's.
        assert sums == [256 * 1.0 + 144 * 2.0] * 3


def test_without_overlap_nothing_is_on_its_way() -> None:
    for first_pass, _, sums in run_distributed(2, gathered, False):
        assert first_pass == [[False]] * 3
        # One bucket of 1,536: rank 0 has the last layer, and the second one from its beginning at 512 up to 768.
        assert sums == [400 * 2.0, 256 * 1.0 + 144 * 2.0, 400 * 1.0]


def full_size_buckets() -> int:
    """Return for how many buckets at once an overlapping backward pass of sharded gradients has memory."""
    layers = nn.Sequential(*(linear(name, 20) for name in ("first", "second", "third", "fourth")))
    options = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", ddp_bucket_size=1, overlap_grad_reduce=True
    )
    ddp = DistributedDataParallel(layers, options, create_parallel_state())
    ddp(torch.ones(3, 20, dtype=torch.float64)).sum().backward()
    ddp.finish_grad_sync()
    (buffer,) = ddp.grad_buffers
    assert isinstance(buffer, ShardedGradBuffer)
    return buffer.pool.num_allocated


def test_a_bucket_waits_for_a_reduction_under_way_once_two_have_memory() -> None:
    assert run_distributed(2, full_size_buckets) == [2, 2]
