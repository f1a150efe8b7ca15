"""Toy GPT models at any tensor-parallel layout: built, filled with given global weights, and taken apart again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.config_base import from_fields
from megatron.core.device import Device
from megatron.core.models.fp8_layers import compute_in_float8
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import Box, ParamSpec, spec_of
from megatron.core.tensor_parallel.random import RngStreams

SEED = 1234


def make_rng(tp: Group, seed: int = SEED) -> RngStreams:
    """Return the random streams of this tensor-parallel rank."""
    return RngStreams(Device("cpu"), seed, ParallelSizes(tp=tp.size).place(tp.rank))


def tensor_parallel_group(size: int | None = None) -> Group:
    """Return this rank's group of ``size`` ranks (by default all of the running job), or one rank outside a job."""
    if not dist.is_initialized():
        return single_rank_group()
    return create_parallel_state(ParallelSizes(tp=size or dist.get_world_size())).tp


def make_model(
    tp: Group, device: str = "cpu", cp: Group | None = None, *, fills_later: bool = False, **config: Any
) -> GPTModel:
    """Return a toy model; ``config`` overrides fields of a small dense configuration without dropout."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 28,
        "num_attention_heads": 4,
        "kv_channels": 10,
        "ffn_hidden_size": 36,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": 53,
        "make_vocab_size_divisible_by": 4,
        "max_position_embeddings": 14,
        "tensor_model_parallel_size": tp.size,
        "context_parallel_size": 1 if cp is None else cp.size,
    }
    made = from_fields(GPTConfig, **(settings | config))
    return GPTModel(made, tp, make_rng(tp), seed=SEED, device=device, cp=cp, fills_later=fills_later)


def make_float8_model(recipe: str, tp: Group | None = None, **config: Any) -> GPTModel:
    """Return a toy model, by default on one rank, whose layers compute in fp8 by a recipe, or in nvfp4."""
    config |= {"fp4_format": "e2m1"} if recipe == "nvfp4" else {"fp8_format": "hybrid", "fp8_recipe": recipe}
    model = make_model(single_rank_group() if tp is None else tp, bf16=True, **config)
    load_global_weights(model)
    compute_in_float8([model], model.config, "cpu")
    return model


def named_values(spec: ParamSpec) -> np.ndarray:
    """Return a whole tensor of values that depend on its global name only; none is zero or one by design."""
    seed = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little")
    values = np.random.default_rng(seed).normal(size=spec.global_shape)
    return values * (0.1 if len(spec.global_shape) == 1 else 0.25) + spec.init_mean


def load_global_weights(model: GPTModel, weight_of: Callable[[ParamSpec], np.ndarray] = named_values) -> None:
    """Fill every parameter with its shards of the global tensors that ``weight_of`` returns."""
    with torch.no_grad():
        for parameter in model.parameters():
            spec = spec_of(parameter)
            whole = torch.from_numpy(weight_of(spec))
            parameter.zero_()
            for shard in spec.shards:
                parameter[shard.local_box.slices] = whole[shard.global_box.slices].to(parameter.dtype)


@dataclass(frozen=True)
class Fragment:
    """Hold one rank's values of one box of a global tensor."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    is_owner: bool
    values: np.ndarray


def summed_gradients(model: GPTModel, tp: Group) -> list[tuple[ParamSpec, torch.Tensor]]:
    """Return every gradient after the sum over the copies that its description asks for.

    Written apart from the library's own reduction, which sums the same thing in a flat buffer.
    """
    result = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        assert parameter.grad is not None, f"{spec.name} has no gradient"
        gradient = parameter.grad
        if "tp" in spec.gradient_sum_axes:
            copies: list[torch.Tensor] = [torch.empty_like(gradient) for _ in range(tp.size)]
            dist.all_gather(copies, gradient.contiguous(), group=tp.handle)
            first = tp.rank - spec.replica_index
            gradient = torch.stack(copies[first : first + spec.num_replicas]).sum(dim=0)
        result.append((spec, gradient))
    return result


def fragments(tensors: Iterable[tuple[ParamSpec, torch.Tensor]]) -> list[Fragment]:
    """Cut local tensors into the shards that their descriptions name, for the way back to the test."""
    return [
        Fragment(
            spec.name,
            spec.global_shape,
            shard.global_box,
            spec.is_owner,
            tensor.detach()[shard.local_box.slices].numpy().copy(),
        )
        for spec, tensor in tensors
        for shard in spec.shards
    ]


def parameter_fragments(model: GPTModel) -> list[Fragment]:
    """Return the fragments of the parameters themselves."""
    return fragments((spec_of(parameter), parameter) for parameter in model.parameters())


def reassemble(ranks: Iterable[list[Fragment]], copy_tolerance: float = 0.0) -> dict[str, np.ndarray]:
    """Return the global tensors.

    Every element must have exactly one owner, and further copies must equal the owner's within
    ``copy_tolerance`` of the largest element.
    """
    collected = [fragment for rank in ranks for fragment in rank]
    whole: dict[str, np.ndarray] = {}
    owners: dict[str, np.ndarray] = {}
    for fragment in collected:
        tensor = whole.setdefault(fragment.name, np.zeros(fragment.global_shape, fragment.values.dtype))
        count = owners.setdefault(fragment.name, np.zeros(fragment.global_shape, np.int64))
        if fragment.is_owner:
            tensor[fragment.box.slices] = fragment.values
            count[fragment.box.slices] += 1
    for name, count in owners.items():
        assert (count == 1).all(), f"{name}: elements have {np.unique(count)} owners"
    for fragment in collected:
        difference = np.abs(fragment.values - whole[fragment.name][fragment.box.slices]).max()
        assert difference <= copy_tolerance * np.abs(whole[fragment.name]).max(), f"{fragment.name}: copies differ"
    return whole


def make_batch(length: int, batch: int, vocab_size: int, seed: int = 7) -> tuple[torch.Tensor, ...]:
    """Return tokens, labels, positions and a loss mask, all ``[b, s]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (batch, length + 1), generator=generator)
    positions = torch.arange(length).expand(batch, length)
    mask = (torch.rand(batch, length, generator=generator) > 0.2).to(torch.float64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, mask
