"""Requests that run together over tensor- and pipeline-parallel ranks give what one process gives for each."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.checkpoint.inference_model import inference_stage
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import Continuation, GatheredAnswer, GenerationRequest
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from tests.harness.distributed import run_distributed
from tests.unit.core.inference.small_models import build, odd_config
from tests.unit.core.inference.test_continuous_engine import REQUESTS, check_equal


def engine_of(state: ParallelState) -> InferenceEngine:
    config = odd_config()
    model = build(config, state.tp, contents=inference_stage(config.num_layers, state.pp.size, state.pp.rank))
    return InferenceEngine(model, state, create_pipeline_links(state.pp) if state.pp.size > 1 else None)


def run_together(pp: int) -> list[list[Continuation]]:
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // pp, pp=pp))
    continuous = ContinuousEngine(engine_of(state), max_rows=7, max_tokens=1000)
    answers = [GatheredAnswer(request) for request in REQUESTS]
    for job, request in enumerate(REQUESTS):
        continuous.add(job, request)
    gone = len(REQUESTS)
    continuous.add(gone, GenerationRequest(prompts=((1, 2),) * 3, max_new_tokens=30))
    for step in range(1000):
        for job, happened in continuous.step():
            if job != gone:
                answers[job].add(happened)
        if step == 3:
            continuous.drop([gone])
        if not continuous.is_busy:
            break
    return [answer.continuations() for answer in answers]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_every_rank_knows_what_one_process_computes_for_each_request(tp: int, pp: int) -> None:
    alone = engine_of(describe_parallel_state(0, 1))
    expected = [alone.generate(request) for request in REQUESTS]
    for found in run_distributed(tp * pp, run_together, pp):
        for own, other in zip(found, expected, strict=True):
            check_equal(own, other)
