"""A model in training as generation runs it: the same parameters, in layers that are given whole sequences."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.moe.expert_groups import ExpertGroups


def share_model(chunk: GPTModel, wrapped: DistributedDataParallel, state: ParallelState) -> GPTModel:
    """Return a chunk with the parameters of one in training, in eval mode, that a cache and single tokens can go with.

    No rank has a part of a sequence alone: there is neither sequence nor context parallelism, whose ranks compute the
    same. Products are in the parameters' precision, and layers run as themselves, whatever training has in fp8 or in
    graphs. ``wrapped`` is the chunk in data parallelism, whose parameters must have been gathered where they are
    sharded by the optimizer; weights that are sharded come and go with the passes. Nothing of training is changed.
    """
    config = dataclasses.replace(
        chunk.config, sequence_parallel=False, context_parallel_size=1, tp_comm_overlap=False, fp8_format=None
    )
    device = next(chunk.parameters()).device
    cp = single_rank_group(("cp",), state.rank)
    shared = GPTModel(
        config,
        chunk.tp,
        chunk.rng,
        seed=None,
        device=device,
        layer_numbers=chunk.layer_numbers,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        cp=cp,
        experts=dataclasses.replace(ExpertGroups.of(state), cp=cp),
        fills_later=True,
    )
    for name, module in chunk.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            setattr(shared.get_submodule(name), parameter_name, parameter)
    assert {id(each) for each in shared.parameters()} == {id(each) for each in chunk.parameters()}, "all are shared"
    if wrapped.weights is not None:
        layers = [layer for block in shared.blocks for layer in block.layers.values()]
        wrapped.weights.follow_chunk(shared, layers, shared.embedding if chunk.first_alone is not None else None)
        for block in shared.blocks:
            block.weights = wrapped.weights
    return shared.eval()
