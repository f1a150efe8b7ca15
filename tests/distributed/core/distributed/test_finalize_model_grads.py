"""Partial gradients summed over the tensor-parallel ranks that hold copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Piece, attach_spec, even_pieces, full_pieces
from tests.harness.distributed import run_distributed


class Copies(nn.Module):
    """Hold a norm with partial gradients, one without, a key-value head shared by pairs, and a shard."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        sharers = 2
        group, member = divmod(tp.rank, sharers)
        self.partial_norm = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.whole_norm = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.key_value = nn.Parameter(torch.zeros(2, 7, dtype=torch.float64))
        self.half_norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.shard = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        copy = {"replicated_axes": ("tp",), "replica_index": tp.rank, "num_replicas": tp.size}
        summed = {"gradient_sum_axes": ("tp",)}
        rows = 2 * tp.size // sharers
        head = (Piece(Box((2 * group, 0), (2, 7)), (0, 0)),)
        attach_spec(self.partial_norm, ParamSpec("partial", (3,), full_pieces((3,)), **copy, **summed))
        attach_spec(self.whole_norm, ParamSpec("whole", (5,), full_pieces((5,)), **copy))
        attach_spec(
            self.key_value,
            ParamSpec("kv", (rows, 7), head, **summed, replica_index=member, num_replicas=sharers),
        )
        attach_spec(self.half_norm, ParamSpec("half", (4,), full_pieces((4,)), **copy, **summed))
        shape = (3 * tp.size, 2)
        attach_spec(self.shard, ParamSpec("shard", shape, even_pieces(shape, 0, tp.rank, tp.size)))


def finalized(tp_size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients after every rank brought ``rank + 1``, and how many collectives that took."""
    state = create_parallel_state(tensor_model_parallel_size=tp_size)
    model = Copies(state.tp)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    ddp.zero_grad_buffer()
    for parameter in model.parameters():
        main_grad_of(parameter).add(torch.full(parameter.shape, state.rank + 1.0))
    counted: list[int] = []
    real = collectives.dist.all_reduce
    collectives.dist.all_reduce = lambda tensor, **options: (counted.append(tensor.numel()), real(tensor, **options))[1]
    try:
        finalize_model_grads([ddp], state)
    finally:
        collectives.dist.all_reduce = real
    return {name: main_grad_of(p).tensor for name, p in model.named_parameters()}, len(counted)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_copies_get_the_sum_of_their_parts_and_nothing_else_changes(tp_size: int) -> None:
    results = run_distributed(tp_size, finalized, tp_size)
    everyone = sum(range(1, tp_size + 1))
    for rank, (gradients, num_collectives) in enumerate(results):
        first_sharer = rank // 2 * 2
        sums = {
            "partial_norm": everyone,
            "half_norm": everyone,
            "key_value": 2 * first_sharer + 3,
            "whole_norm": rank + 1,
            "shard": rank + 1,
        }
        for name, value in sums.items():
            assert gradients[name].eq(value).all(), name
        # One for each gradient dtype: float64, and float32 for the bf16 parameter.
        assert num_collectives == 2


def test_with_replicas_the_mean_over_them_is_summed() -> None:
    results = run_distributed(4, finalized, 2)
    for rank, (gradients, _) in enumerate(results):
        # Tensor-parallel rank 0 is ranks 0 and 2, tensor-parallel rank 1 is ranks 1 and 3.
        assert gradients["partial_norm"].eq((1 + 3) / 2 + (2 + 4) / 2).all()
        assert gradients["shard"].eq((1 + 3) / 2 + rank % 2).all()
