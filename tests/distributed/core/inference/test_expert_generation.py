"""A mixture of experts with latent attention generates one process's tokens, however its experts are spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron.checkpoint.inference_model import build_inference_model, inference_config
from megatron.core.device import Device
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import Continuation, GatheredAnswer, GenerationRequest
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights
from tests.unit.core.inference.small_models import odd_config

MODEL: dict[str, Any] = {
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 8,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 3,
    "moe_layer_freq": "[0,1,1]",
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
PROMPTS = ((3, 1, 4), (15, 92, 6, 53, 58), (9,))
REQUESTS = (
    GenerationRequest(prompts=PROMPTS, max_new_tokens=9, sampling=SamplingConfig(greedy=True)),
    GenerationRequest(prompts=PROMPTS[:1], max_new_tokens=7, sampling=SamplingConfig(temperature=1.3, seed=5)),
)


def tokens_of(sizes: ParallelSizes, dispatcher: str) -> list[list[list[int]]]:
    """Return what each request gives alone, then all of them together."""
    state = create_parallel_state(sizes) if dist.is_initialized() else describe_parallel_state(0, 1)
    config = inference_config(odd_config(**MODEL, moe_token_dispatcher_type=dispatcher), sizes)
    model = build_inference_model(config, state, Device("cpu"))
    load_global_weights(model)
    engine = InferenceEngine(model, state, create_pipeline_links(state.pp) if state.pp.size > 1 else None)
    alone = [engine.generate(request) for request in REQUESTS]
    answers = [GatheredAnswer(request) for request in REQUESTS]
    together = ContinuousEngine(engine, max_rows=4, max_tokens=1000)
    for job, request in enumerate(REQUESTS):
        together.add(job, request)
    while together.is_busy:
        for job, happened in together.step():
            answers[job].add(happened)
    return [_tokens(given) for given in (*alone, *(answer.continuations() for answer in answers))]


def _tokens(continuations: list[Continuation]) -> list[list[int]]:
    return [list(continuation.tokens) for continuation in continuations]


@pytest.mark.parametrize(
    ("sizes", "dispatcher"),
    [
        (ParallelSizes(tp=2, ep=2, etp=1), "alltoall"),
        pytest.param(ParallelSizes(tp=2, ep=2, etp=1), "allgather", marks=pytest.mark.long),
        pytest.param(ParallelSizes(tp=4, ep=2, etp=2), "alltoall", marks=pytest.mark.long),
        pytest.param(ParallelSizes(tp=2, pp=2, ep=2, etp=1), "alltoall", marks=pytest.mark.long),
    ],
    ids=["tp2-ep2", "tp2-ep2-allgather", "tp4-ep2", "tp2-pp2-ep2"],
)
def test_spread_experts_generate_one_processs_tokens(sizes: ParallelSizes, dispatcher: str) -> None:
    expected = tokens_of(ParallelSizes(), "allgather")
    assert all(len(tokens) == len(expected[0][0]) for tokens in expected[0])
    assert expected[: len(REQUESTS)] == expected[len(REQUESTS) :]
    for found in run_distributed(sizes.world_size, tokens_of, sizes, dispatcher, timeout_s=60.0):
        assert found == expected
