"""Generation over tensor-, pipeline- and expert-parallel ranks gives what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.inference_model import build_inference_model, inference_config, inference_stage
from megatron.core.device import Device
from megatron.core.errors import InputError
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import (
    Continuation,
    GatheredAnswer,
    GenerationCancelled,
    GenerationRequest,
    StopRule,
)
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights
from tests.unit.core.inference.small_models import build, golden_config, golden_model, odd_config, whole_logits
from tests.unit.core.inference.test_continuous_engine import REQUESTS, check_equal

PROMPTS = ((3, 1, 4), (15, 92, 6, 53, 58), (9,), (79, 32, 38))
GREEDY = SamplingConfig(greedy=True)
DRAWN = SamplingConfig(temperature=1.3, top_k=60, top_p=0.97, seed=5)
OWN: dict[str, dict[str, Any]] = {
    "odd": {},
    "sharing": {
        "num_layers": 5,
        "position_embedding_type": "rope",
        "geglu": True,
        "window_size": "4,0",
        "window_attn_skip_freq": "[1,0,1,0,1]",
        "global_kv_channels": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 5,
    },
}
"""Models by name, and how each differs from odd. The last layers of sharing use keys and values of other stages."""
ALONE = describe_parallel_state(0, 1)


def engine_of(name: str, state: ParallelState) -> InferenceEngine:
    config = odd_config(**OWN[name]) if name in OWN else golden_config(name)
    stage = inference_stage(config.num_layers, state.pp.size, state.pp.rank)
    model = build(config, state.tp, contents=stage) if name in OWN else golden_model(name, state.tp, stage)
    links = create_pipeline_links(state.pp) if state.pp.size > 1 else None
    return InferenceEngine(model, state, links)


def texts(name: str, state: ParallelState, eod_id: int | None, scored: bool = False) -> list[list[Continuation]]:
    engine = engine_of(name, state)
    stop = StopRule(end_tokens=frozenset(() if eod_id is None else (eod_id,)))
    return [
        engine.generate(
            GenerationRequest(prompts=PROMPTS, max_new_tokens=7, sampling=sampling, stop=stop, log_probabilities=scored)
        )
        for sampling in (GREEDY, DRAWN)
    ]


def texts_of_rank(
    names: list[str], eod_id: int | None, pp: int = 1, scored: bool = False
) -> dict[str, list[list[Continuation]]]:
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // pp, pp=pp))
    return {name: texts(name, state, eod_id, scored) for name in names}


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("tp", "pp", "names"),
    [
        pytest.param(2, 1, ["gpt2", "qwen", "odd"], marks=pytest.mark.long),
        (4, 1, ["llama", "odd"]),
        (1, 2, ["gpt2", "llama", "odd"]),
        (1, 3, ["odd"]),
        (2, 2, ["qwen", "odd", "sharing"]),
    ],
)
def test_any_layout_gives_the_text_of_one_process(tp: int, pp: int, names: list[str]) -> None:
    """All but gpt2 have two key-value groups: of four ranks two share one. The vocabulary of odd is padded.

    odd has three layers: two stages are unequal. Its two embeddings are one, on two stages.
    """
    alone = {name: texts(name, ALONE, None) for name in names}
    for result in run_distributed(tp * pp, texts_of_rank, names, None, pp, timeout_s=60.0):
        assert result == alone


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_log_probabilities_are_those_of_one_whole_forward_pass(tp: int, pp: int) -> None:
    """Against the model without a cache, without padding and without other prompts."""
    model = engine_of("odd", ALONE).model
    results = run_distributed(tp * pp, texts_of_rank, ["odd"], None, pp, True)
    assert results[0] == results[-1]
    for continuations in results[0]["odd"]:
        for prompt, continuation in zip(PROMPTS, continuations, strict=True):
            tokens = torch.tensor([[*prompt, *continuation.tokens]])
            logits = whole_logits(model, tokens)[:-1, 0, : model.config.vocab_size]
            expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
            assert continuation.log_probabilities == pytest.approx(expected.tolist(), rel=1e-11, abs=1e-11)


@pytest.mark.default(1)
@pytest.mark.parametrize("pp", [1, 2])
def test_all_ranks_stop_at_the_end_of_document(pp: int) -> None:
    free = texts("odd", ALONE, None)
    eod_id = free[0][0].tokens[3]
    alone = texts("odd", ALONE, eod_id)
    assert alone != free
    assert run_distributed(2, texts_of_rank, ["odd"], eod_id, pp) == [{"odd": alone}] * 2


def text_drawn_with_own_seed(pp: int) -> list[Continuation]:
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // pp, pp=pp))
    # The first rank of the last stage chooses.
    seed = int((state.pp.rank, state.tp.rank) != (pp - 1, 0))
    return drawn_with_seed(state, seed)


def drawn_with_seed(state: ParallelState, seed: int) -> list[Continuation]:
    sampling = SamplingConfig(temperature=5.0, seed=seed)
    return engine_of("odd", state).generate(GenerationRequest(prompts=PROMPTS, max_new_tokens=5, sampling=sampling))


@pytest.mark.parametrize(("world_size", "pp"), [(2, 1), (2, 2)])
def test_ranks_that_would_choose_otherwise_follow_one(world_size: int, pp: int) -> None:
    """As where a GPU's sums differ in their last bit from rank to rank: all must go on with one text."""
    alone = drawn_with_seed(ALONE, 0)
    assert run_distributed(world_size, text_drawn_with_own_seed, pp) == [alone] * world_size


def failures_of_rank(pp: int) -> tuple[str, list[Continuation]]:
    """Ask for what cannot be, give a generation up that only the last rank wants to end, then generate."""
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // pp, pp=pp))
    engine = engine_of("odd", state)
    request = GenerationRequest(prompts=PROMPTS, max_new_tokens=7, sampling=GREEDY)
    count = 0

    def is_cancelled() -> bool:
        nonlocal count
        count += 1
        return state.world.is_last and count > 4

    with pytest.raises(GenerationCancelled):
        engine.generate(request, is_cancelled=is_cancelled)
    assert count == 5
    weights = [parameter.clone() for parameter in engine.model.parameters()]
    if state.pp.is_last:
        with torch.no_grad():
            engine.model.output_weight.fill_(torch.nan)
    message = ""
    try:
        engine.generate(request)
    except InputError as error:
        message = str(error)
    with torch.no_grad():
        for parameter, weight in zip(engine.model.parameters(), weights):
            parameter.copy_(weight)
    return message, engine.generate(request)


@pytest.mark.parametrize("pp", [1, 2])
def test_all_ranks_go_on_after_a_generation_that_was_given_up_or_failed(pp: int) -> None:
    expected = texts("odd", ALONE, None)[0]
    results = run_distributed(2, failures_of_rank, pp)
    assert [result for _, result in results] == [expected] * 2
    messages = {message for message, _ in results}
    assert len(messages) == 1
    assert messages.pop().startswith("the model's logits are not finite at position ")


def continuous_engine_of(state: ParallelState) -> InferenceEngine:
    config = odd_config()
    model = build(config, state.tp, contents=inference_stage(config.num_layers, state.pp.size, state.pp.rank))
    return InferenceEngine(model, state, create_pipeline_links(state.pp) if state.pp.size > 1 else None)


def run_together(pp: int) -> list[list[Continuation]]:
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // pp, pp=pp))
    continuous = ContinuousEngine(continuous_engine_of(state), max_rows=7, max_tokens=1000)
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
    alone = continuous_engine_of(describe_parallel_state(0, 1))
    expected = [alone.generate(request) for request in REQUESTS]
    for found in run_distributed(tp * pp, run_together, pp):
        for own, other in zip(found, expected, strict=True):
            check_equal(own, other)


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
EXPERT_PROMPTS = ((3, 1, 4), (15, 92, 6, 53, 58), (9,))
EXPERT_REQUESTS = (
    GenerationRequest(prompts=EXPERT_PROMPTS, max_new_tokens=9, sampling=SamplingConfig(greedy=True)),
    GenerationRequest(prompts=EXPERT_PROMPTS[:1], max_new_tokens=7, sampling=SamplingConfig(temperature=1.3, seed=5)),
)


def tokens_of(sizes: ParallelSizes, dispatcher: str) -> list[list[list[int]]]:
    """Return what each request gives alone, then all of them together."""
    state = create_parallel_state(sizes) if dist.is_initialized() else describe_parallel_state(0, 1)
    config = inference_config(odd_config(**MODEL, moe_token_dispatcher_type=dispatcher), sizes)
    model = build_inference_model(config, state, Device("cpu"))
    load_global_weights(model)
    engine = InferenceEngine(model, state, create_pipeline_links(state.pp) if state.pp.size > 1 else None)
    alone = [engine.generate(request) for request in EXPERT_REQUESTS]
    answers = [GatheredAnswer(request) for request in EXPERT_REQUESTS]
    together = ContinuousEngine(engine, max_rows=4, max_tokens=1000)
    for job, request in enumerate(EXPERT_REQUESTS):
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
    assert expected[: len(EXPERT_REQUESTS)] == expected[len(EXPERT_REQUESTS) :]
    for found in run_distributed(sizes.world_size, tokens_of, sizes, dispatcher, timeout_s=60.0):
        assert found == expected
