"""Adapters in closed form: their parameters at any layout, and that nothing else has gradients and state."""

from __future__ import annotations

from typing import Any

import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.parallel_state import ExpertGroups, create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.theoretical_memory_usage import model_size, theoretical_memory

WHOLE = StageContents((0, 1), has_embedding=True, has_loss=True)
SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24 --bf16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --lora-rank 3 --load somewhere --finetune
"""


def test_experts_beside_adapters_have_no_gradients() -> None:
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 16 --lora-target-modules linear_qkv linear_proj"
    config = resolve_arguments(f"{SMALL} {experts}".split(), 1).config
    state = describe_parallel_state(0, 1, ParallelSizes())
    model = GPTModel(config.model, state.tp, RngStreams(Device("cpu"), 0, state.place), seed=7)
    size = model_size(config)
    assert size.trained == (sum(p.numel() for p in model.parameters() if p.requires_grad),)
    assert size.shards == (sum(p.numel() for p in model.parameters()),)
    assert size.experts == (0,)


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_layer_freq": "([0]+[1])"}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


@pytest.mark.parametrize("experts", [{}, EXPERTS, EXPERTS | SHARED, EXPERTS | {"expert_tensor_parallel_size": 1}])
@pytest.mark.parametrize("targets", [(), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_parameters_are_those_of_the_model(
    targets: tuple[str, ...], tp: int, sequence_parallel: bool, experts: dict[str, Any]
) -> None:
    """At tensor-parallel size 4 two ranks share a group of keys and values."""
    config = GPTConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=40,
        vocab_size=52,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=16,
        swiglu=True,
        lora_rank=3,
        lora_target_modules=targets,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        **experts,
    )
    state = describe_parallel_state(tp - 1, tp, config.parallel_sizes)
    groups = ExpertGroups.of(state) if experts else None
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 0, state.place), seed=7, experts=groups)
    found = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        # What is summed over the ranks is of as many copies as the parameter has.
        copies = spec.num_replicas if spec.gradient_sum_axes else 0
        kind = {"is_trained": parameter.requires_grad, "is_matrix": is_orthogonalized(spec)}
        kind["is_expert"] = spec.is_expert
        found.append(ChunkParameter(parameter.numel(), copies, **kind))
    assert chunk_parameters(config, WHOLE) == found


def test_weights_and_optimizer_are_what_a_run_holds() -> None:
    config = resolve_arguments(SMALL.split(), 1, needs_files=False).config
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    size = model_size(config)
    trained = sum(parameter.numel() for parameter in parts.chunks[0].parameters() if parameter.requires_grad)
    assert size.trained == (trained,)
    assert size.shards == (sum(parameter.numel() for parameter in parts.chunks[0].parameters()),)
    optimizer = sum(tensor.nbytes for _, tensor in parts.optimizer.sharded_state().values())
    weights = sum(parameter.nbytes for parameter in parts.chunks[0].parameters())
    assert theoretical_memory(config).weights_and_optimizer == weights + 4 * trained + optimizer
