"""Experts in closed form: their parameters at any layout, and what is not planned is refused."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.parallel_state import ExpertGroups, describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.theoretical_memory_usage import model_size, theoretical_memory

WHOLE = StageContents((0, 1, 2), has_embedding=True, has_loss=True)
SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data --ffn-hidden-size 40
    --tokenizer-type NullTokenizer --vocab-size 127 --num-experts 8 --moe-ffn-hidden-size 16 --moe-layer-freq 2
"""


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, None), (2, 1, None), (2, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parameters_are_those_of_the_model(tp: int, ep: int, etp: int | None, has_bias: bool) -> None:
    config = GPTConfig(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        ffn_hidden_size=40,
        vocab_size=52,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=16,
        swiglu=True,
        add_bias_linear=has_bias,
        num_experts=6,
        moe_layer_freq="[0,1,1]",
        moe_ffn_hidden_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )
    state = describe_parallel_state(tp - 1, tp, ParallelSizes(tp=tp, ep=ep, etp=etp))
    rng = RngStreams(Device("cpu"), 0, state.place)
    model = GPTModel(config, state.tp, rng, seed=7, experts=ExpertGroups.of(state))
    found = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        copies = spec.num_replicas if spec.gradient_sum_axes else 0
        is_trained = parameter.requires_grad
        kind = {"is_expert": spec.is_expert, "is_matrix": is_orthogonalized(spec)}
        found.append(ChunkParameter(parameter.numel(), copies, is_trained=is_trained, **kind))
    assert chunk_parameters(config, WHOLE) == found


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_experts_have_their_own_share_of_sharded_state(optimizer: str) -> None:
    flags = f"{SMALL} --use-distributed-optimizer --optimizer {optimizer} --disable-bias-linear"
    dense, spread = (
        resolve_arguments([*flags.split(), *more.split()], 4, needs_files=False).config
        for more in ("", "--expert-model-parallel-size 4")
    )
    spread_size = model_size(spread)
    assert model_size(dense).block == spread_size.block
    assert spread_size.experts[0] * 4 == model_size(dense).experts[0]
    # Each rank has a quarter of the experts' state either way; of weights and gradients a quarter only when spread.
    saved = 8.0 * (model_size(dense).experts[0] - spread_size.experts[0])
    difference = theoretical_memory(dense).weights_and_optimizer - theoretical_memory(spread).weights_and_optimizer
    assert difference == pytest.approx(saved)


def test_what_depends_on_the_choices_of_tokens_is_not_in_megatrons_line() -> None:
    config = resolve_arguments(SMALL.split(), 1, needs_files=False).config
    assert theoretical_memory(config).activations is None
