"""Generate texts and score them, as stages of a pipeline or in one process, and write the results to a metrics file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config_base import from_fields
from megatron.core.device import select_device
from megatron.core.errors import MegatronError
from megatron.core.inference import prompt_batch, running_batch
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import (
    GatheredAnswer,
    GenerationCancelled,
    GenerationRequest,
    StopRule,
    TokenPairs,
)
from megatron.core.inference.prompt_batch import ScoredRow
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import StagedModel
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from megatron.core.pipeline_parallel.stage_layout import plan_stage_layout
from megatron.core.tensor_parallel.random import RngStreams

GREEDY = SamplingConfig(greedy=True)
PROMPTS = ((3, 1, 4), (15, 42, 6, 53, 58), (9,))
POISON = 62
"""The token whose embedding is not a number."""
ROWS = (ScoredRow((3, 1, 4, 15), 2), ScoredRow((42, 6, 53, 58, 9, 59, 32), 6))

_ROTARY: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "swiglu": True,
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "windows": {"window_size": "4,0", "window_attn_skip_freq": "2", "position_embedding_type": "rope"},
    # Tokens of the vocabulary lie on every rank.
    "apart": {"make_vocab_size_divisible_by": 32},
    "grouped": {
        **_ROTARY,
        "params_dtype": "bfloat16",
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "rotary_interleaved": True,
        "no_rope_freq": "2",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "sinks": {**_ROTARY, "params_dtype": "bfloat16", "softmax_type": "learnable", "window_size": "4,0"},
    "latent": {
        **_ROTARY,
        "multi_latent_attention": True,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "params_dtype": "bfloat16",
    },
    "experts": {**_EXPERTS, "params_dtype": "bfloat16"},
    "small": {},
    "poisoned": {"untie_embeddings_and_output_weights": True},
}
"""The fields of the model of each kind of program."""


def build_engine(sizes: ParallelSizes, **fields: Any) -> InferenceEngine:
    """Return the engine of this rank, which is a stage of the pipeline or alone; ``fields`` are those of the model."""
    device = select_device(int(os.environ.get("LOCAL_RANK", "0")))
    device.make_current()
    state = describe_parallel_state(0, 1)
    if sizes.world_size > 1:
        dist.init_process_group(device.default_backend, timeout=timedelta(seconds=60))
        state = create_parallel_state(sizes)
    config = from_fields(
        GPTConfig,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=63,
        max_position_embeddings=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        **sizes.model_fields(),
        **fields,
    )
    (contents,) = plan_stage_layout(config, config.num_layers).chunks(state.pp.rank)
    model = GPTModel(
        config,
        state.tp,
        RngStreams(device, 1, state.place),
        seed=11,
        device=device.torch_device,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
    )
    links = create_pipeline_links(state.pp, device=device.torch_device) if state.pp.size > 1 else None
    return InferenceEngine(model.eval(), state, links)


def results(engine: InferenceEngine) -> Iterator[tuple[str, Any]]:
    """Yield what each kind of request gives."""
    for name, request in (
        ("greedy", GenerationRequest(prompts=PROMPTS, max_new_tokens=5, sampling=GREEDY, log_probabilities=True)),
        (
            "sampled",
            GenerationRequest(prompts=PROMPTS[:2], max_new_tokens=5, sampling=SamplingConfig(top_k=20, seed=7)),
        ),
        ("beams", GenerationRequest(prompts=PROMPTS[:1], max_new_tokens=4, beams=BeamConfig(num_beams=3))),
        (
            "penalties",
            GenerationRequest(
                prompts=PROMPTS,
                max_new_tokens=6,
                sampling=SamplingConfig(
                    top_p=0.9,
                    top_p_decay=0.9,
                    top_p_bound=0.3,
                    temperature=1.3,
                    repetition_penalty=1.2,
                    presence_penalty=0.3,
                    frequency_penalty=0.2,
                    seed=9,
                ),
                bias=((5, 1.5), (9, -2.0)),
                new_log_probabilities=True,
                num_alternatives=3,
            ),
        ),
        (
            "no repetition",
            GenerationRequest(
                prompts=PROMPTS,
                max_new_tokens=6,
                sampling=SamplingConfig(greedy=True, no_repeat_ngram_size=2),
                never=TokenPairs(first=frozenset(range(63)), second=frozenset({42, 7})),
            ),
        ),
    ):
        yield name, [[list(text.tokens), text.log_probabilities] for text in engine.generate(request)]
    yield from stopped_results(engine)
    yield "scores", [[score.log_probability, score.is_greedy] for score in engine.score(ROWS)]
    request = GenerationRequest(prompts=PROMPTS, max_new_tokens=5, sampling=GREEDY)
    yield from continuous_results(engine, request)
    questions = iter((False, False, True))
    try:
        engine.generate(request, is_cancelled=lambda: next(questions))
    except GenerationCancelled:
        yield "cancelled", True


def stopped_results(engine: InferenceEngine) -> Iterator[tuple[str, Any]]:
    """Yield what requests give whose texts end before their full length, alone and with another request."""
    free = GenerationRequest(prompts=PROMPTS, max_new_tokens=8, sampling=GREEDY)
    texts = [text.tokens for text in engine.generate(free)]
    ending = StopRule(end_tokens=frozenset({texts[0][2], texts[1][4]}), closing_tokens=frozenset({texts[2][1]}))
    stopped = GenerationRequest(
        prompts=PROMPTS, max_new_tokens=8, sampling=GREEDY, stop=ending, log_probabilities=True, num_alternatives=2
    )
    yield "stopped", [[list(text.tokens), text.log_probabilities] for text in engine.generate(stopped)]
    continuous, requests = ContinuousEngine(engine, 4, 200), [stopped, free]
    answers = [GatheredAnswer(each) for each in requests]
    for job, each in enumerate(requests):
        while not continuous.has_room:
            for number, happened in continuous.step():
                answers[number].add(happened)
        continuous.add(job, each)
    while not all(answer.is_whole for answer in answers):
        for number, happened in continuous.step():
            answers[number].add(happened)
    for job, answer in enumerate(answers):
        texts_of_job = answer.continuations()
        yield f"continuous, stopped {job}", [[list(text.tokens), text.log_probabilities] for text in texts_of_job]
    continuous.reset()


def continuous_results(engine: InferenceEngine, request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    """Yield what requests give that run together: they begin one after the other, and one is given up."""
    known = GenerationRequest(
        prompts=PROMPTS[::-1], max_new_tokens=7, sampling=GREEDY, log_probabilities=True, num_alternatives=2
    )
    drawn = GenerationRequest(
        prompts=PROMPTS[:2],
        max_new_tokens=3,
        sampling=SamplingConfig(top_k=9, top_p=0.8, seed=3, no_repeat_ngram_size=2, frequency_penalty=0.5),
        bias=((8, 2.0),),
        new_log_probabilities=True,
    )
    beams = GenerationRequest(prompts=PROMPTS[:2], max_new_tokens=4, beams=BeamConfig(num_beams=2))
    never = TokenPairs(first=frozenset(range(63)), second=frozenset({42}))
    given_up = GenerationRequest(prompts=PROMPTS, max_new_tokens=9, sampling=GREEDY, never=never)
    continuous, requests = ContinuousEngine(engine, 12, 400), [request, given_up, known, drawn, beams]
    answers = [GatheredAnswer(each) for each in requests]
    for job, each in enumerate(requests):
        continuous.add(job, each)
        for number, happened in continuous.step():
            answers[number].add(happened)
    continuous.drop([1])
    del answers[1]
    places = {0: 0, 2: 1, 3: 2, 4: 3}
    while not all(answer.is_whole for answer in answers):
        for number, happened in continuous.step():
            answers[places[number]].add(happened)
    for job, answer in enumerate(answers):
        yield f"continuous {job}", [[list(text.tokens), text.log_probabilities] for text in answer.continuations()]
    continuous.reset()


def failed_results(engine: InferenceEngine) -> Iterator[tuple[str, Any]]:
    """Yield what happens to requests whose prompts fail: one whose logits are not finite, one without a token left.

    The other requests continue, and a later one takes the slots of the failed.
    """
    for name, weight in engine.model.named_parameters():
        if "word_embeddings" in name:
            weight[POISON] = torch.nan
    poisoned = GenerationRequest(prompts=((POISON, 3), PROMPTS[0]), max_new_tokens=4, sampling=GREEDY)
    drawn = GenerationRequest(prompts=PROMPTS[:1], max_new_tokens=4, sampling=SamplingConfig(top_k=5, seed=2))
    nothing = TokenPairs(first=frozenset(range(63)), second=frozenset(range(63)))
    stuck = GenerationRequest(prompts=PROMPTS[1:], max_new_tokens=4, sampling=GREEDY, never=nothing)
    later = GenerationRequest(prompts=PROMPTS, max_new_tokens=6, sampling=GREEDY, log_probabilities=True)
    continuous = ContinuousEngine(engine, 6, 100)
    for job, request in enumerate((poisoned, drawn, stuck, later)):
        continuous.add(job, request)
        for number, happened in continuous.step():
            yield f"failed {number}", repr(happened)
    while continuous.is_busy:
        for number, happened in continuous.step():
            yield f"failed {number}", repr(happened)
    continuous.reset()
    for request in (poisoned, stuck):
        try:
            engine.generate(request)
        except MegatronError as error:
            yield "failed alone", str(error)
    yield "after a failure", [list(text.tokens) for text in engine.generate(later)]


def let_ranks_choose_apart() -> None:
    """Let tensor-parallel ranks after the first choose other tokens, as a GPU's rounding may let them."""
    share = StagedModel.share

    def choose_apart_and_share(self: StagedModel, values: torch.Tensor, logits: torch.Tensor | None) -> None:
        if logits is not None and self.state.tp.rank > 0:
            values.add_(1)
        share(self, values, logits)

    StagedModel.share = choose_apart_and_share  # type: ignore[method-assign]


def main(path: str, pp: str, tp: str, kind: str = "") -> None:
    """Write the results of rank 0 to a file."""
    torch.manual_seed(1)
    if kind == "small":
        modules: tuple[Any, ...] = (running_batch, prompt_batch)
        for module in modules:
            assert module._PROMPT_TOKENS_AT_ONCE > 3
            module._PROMPT_TOKENS_AT_ONCE = 3
    if kind == "apart":
        let_ranks_choose_apart()
    engine = build_engine(ParallelSizes(pp=int(pp), tp=int(tp)), **MODELS.get(kind, {}))
    with torch.no_grad():
        found = list(failed_results(engine) if kind == "poisoned" else results(engine))
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(path, "w") as file:
            for name, value in found:
                file.write(json.dumps({"name": name, "value": value}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
