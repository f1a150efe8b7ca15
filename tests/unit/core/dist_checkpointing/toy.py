"""A toy model whose tensors are cut in every way that the real one's are, with values known at any layout."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import barrier
from megatron.core.dist_checkpointing.index import write_index
from megatron.core.dist_checkpointing.planner import (
    MAX_SHARD_BYTES,
    CheckpointState,
    SavePlanner,
    ShardedTensor,
    from_spec,
)
from megatron.core.dist_checkpointing.shard_file import build_index, take_share
from megatron.core.parallel_state import ParallelState, gather_from_world
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, even_shards, full_shards, stacked_shards

VOCAB_SIZE = 11
PADDED_VOCAB_SIZE = 16
SHAPES = {
    "embedding.weight": (VOCAB_SIZE, 5),
    "fc1.weight": (24, 5),
    "proj.weight": (5, 12),
    "kv.weight": (6, 5),
    "norm.weight": (5,),
}


def toy_specs(tp_rank: int, tp_size: int) -> list[tuple[ParamSpec, tuple[int, ...]]]:
    """Return (spec, local shape) of every parameter of a tensor-parallel rank."""
    shards: dict[str, tuple[tuple[Shard, ...], tuple[int, ...]]] = {
        "embedding.weight": (
            even_shards(SHAPES["embedding.weight"], 0, tp_rank, tp_size, PADDED_VOCAB_SIZE),
            (PADDED_VOCAB_SIZE // tp_size, 5),
        ),
        "fc1.weight": (stacked_shards(SHAPES["fc1.weight"], 0, tp_rank, tp_size, 2), (24 // tp_size, 5)),
        "proj.weight": (even_shards(SHAPES["proj.weight"], 1, tp_rank, tp_size), (5, 12 // tp_size)),
        "norm.weight": (full_shards(SHAPES["norm.weight"]), SHAPES["norm.weight"]),
    }
    # Two key-value heads of three rows: beyond two ranks, several share one.
    heads = min(tp_size, 2)
    copies = tp_size // heads
    shards["kv.weight"] = (even_shards(SHAPES["kv.weight"], 0, tp_rank // copies, heads), (6 // heads, 5))
    replicas = {"kv.weight": (tp_rank % copies, copies), "norm.weight": (tp_rank, tp_size)}
    specs = []
    for name, shape in SHAPES.items():
        index, count = replicas.get(name, (0, 1))
        spec = ParamSpec(name, shape, shards[name][0], replica_index=index, num_replicas=count)
        specs.append((spec, shards[name][1]))
    return specs


def global_values(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return values that depend on the name and on every index."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def fill(data: torch.Tensor, spec: ParamSpec, name: str) -> None:
    """Give a local tensor its part of the global values, and its padding a value that nothing may change."""
    whole = global_values(name, spec.global_shape, data.dtype)
    data.fill_(-7)
    for shard in spec.shards:
        data[shard.local_box.slices] = whole[shard.global_box.slices]


def toy_tensors(
    tp_rank: int, tp_size: int, prefix: str = "model.", dtype: torch.dtype = torch.float32, filled: bool = True
) -> list[ShardedTensor]:
    """Return a rank's tensors: with their values, or with a value that none of them has."""
    tensors = []
    for spec, shape in toy_specs(tp_rank, tp_size):
        data = torch.full(shape, -7.0, dtype=dtype)
        if filled:
            fill(data, spec, prefix + spec.name)
        tensors.append(from_spec(spec.with_prefix(prefix), data))
    return tensors


def all_ranks(tp_size: int, prefix: str = "model.", dtype: torch.dtype = torch.float32) -> list[ShardedTensor]:
    """Return the tensors of all tensor-parallel ranks in one list, as if one rank held them all."""
    return [tensor for rank in range(tp_size) for tensor in toy_tensors(rank, tp_size, prefix, dtype)]


def assert_equal_tensors(actual: Sequence[ShardedTensor], expected: Sequence[ShardedTensor]) -> None:
    """Compare bit by bit, padding included."""
    assert [tensor.name for tensor in actual] == [tensor.name for tensor in expected]
    for ours, theirs in zip(actual, expected):
        assert ours.data.dtype == theirs.data.dtype
        assert torch.equal(ours.data, theirs.data), ours.name


def save_tensors(
    folder: Path,
    tensors: Sequence[ShardedTensor],
    common: Mapping[str, Any],
    state: ParallelState,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Take the steps of a save that make the files, without a run around them; collective."""
    plan = SavePlanner(state, max_shard_bytes).plan(tensors)
    shares = gather_from_world(take_share(plan, tensors, state.rank, state.world_size).write(folder), state)
    if state.world.is_first:
        write_index(folder, build_index(plan, shares, common))
    barrier(state.world)


class ToyModel(torch.nn.Module):
    """Hold a rank's parameters."""

    def __init__(self, state: ParallelState, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for number, (spec, shape) in enumerate(toy_specs(state.tp.rank, state.tp.size)):
            parameter = torch.nn.Parameter(torch.full(shape, -7.0, dtype=dtype))
            attach_spec(parameter, spec)
            self.register_parameter(f"p{number}", parameter)


class ToyOptimizer:
    """Hold float32 moments and a step count."""

    def __init__(self, state: ParallelState) -> None:
        self.scalars: dict[str, Any] = {"step": 0, "loss_scale": 0.0}
        self._tensors = {
            f"local.{spec.name}": (spec.with_prefix("optimizer.exp_avg."), torch.full(shape, -7.0))
            for spec, shape in toy_specs(state.tp.rank, state.tp.size)
        }

    def sharded_state(self) -> dict[str, tuple[ParamSpec, torch.Tensor]]:
        return self._tensors

    def scalar_state(self) -> dict[str, Any]:
        return self.scalars

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        self.scalars = state


def empty_run(state: ParallelState) -> CheckpointState:
    """Return a run as it is before loading."""
    rng = {
        "default": torch.zeros(9, dtype=torch.uint8),
        "tensor-parallel": torch.zeros(4, dtype=torch.uint8),
    }
    return CheckpointState(models=[ToyModel(state)], optimizer=ToyOptimizer(state), rng=rng)


def filled_run(state: ParallelState) -> CheckpointState:
    """Return a run whose every value is known; its random streams depend on the rank."""
    run = empty_run(state)
    with torch.no_grad():
        for parameter in run.models[0].parameters():
            fill(parameter, parameter.spec, parameter.spec.name)
    assert isinstance(run.optimizer, ToyOptimizer)
    for spec, tensor in run.optimizer.sharded_state().values():
        fill(tensor, spec, spec.name)
    run.optimizer.scalars = {"step": 12, "loss_scale": 0.1}
    for number, tensor in enumerate(run.rng.values()):
        tensor.copy_(torch.arange(tensor.numel()) + 20 * state.rank + number)
    return run


def assert_equal_runs(actual: CheckpointState, expected: CheckpointState) -> None:
    """Compare weights and optimizer state bit by bit."""
    for ours, theirs in zip(actual.models[0].parameters(), expected.models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs), theirs.spec.name
    assert isinstance(actual.optimizer, ToyOptimizer)
    assert isinstance(expected.optimizer, ToyOptimizer)
    for name, (_, tensor) in expected.optimizer.sharded_state().items():
        assert torch.equal(actual.optimizer.sharded_state()[name][1], tensor), name
    assert actual.optimizer.scalars == expected.optimizer.scalars


def random_box(generator: random.Random, shape: tuple[int, ...]) -> Box:
    """Return some part of a tensor of this shape that is not empty."""
    offset, lengths = [], []
    for size in shape:
        start = generator.randrange(size)
        offset.append(start)
        lengths.append(generator.randint(1, size - start))
    return Box(tuple(offset), tuple(lengths))
