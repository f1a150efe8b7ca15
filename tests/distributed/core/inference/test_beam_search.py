"""Beam search and the rules against repetition give the texts and scores of transformers, at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.formats.huggingface.parallelize import load_hugging_face_model
from megatron.core.device import Device
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import Continuation, GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from tests.harness.distributed import run_distributed
from tests.unit.checkpoint.formats.huggingface.tiny_models import save_model, tokens_of

KINDS = ("gpt2", "neo", "llama31")
PROMPTS = ((3, 1, 4, 15, 92), (65, 35), (89, 79, 32))
NEW_TOKENS = 14
CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 3},
    "no repeats": {"num_beams": 5, "no_repeat_ngram_size": 2},
    "short texts": {"num_beams": 4, "length_penalty": -1.5},
    "first ones": {"num_beams": 4, "early_stopping": True},
    "long texts": {"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never", "no_repeat_ngram_size": 3},
    "greedy": {"num_beams": 1, "no_repeat_ngram_size": 1},
    "penalized texts": {"num_beams": 3, "repetition_penalty": 1.7},
    "penalized": {"num_beams": 1, "repetition_penalty": 1.4},
}
Texts = list[list[tuple[list[int], float]]]
"""Of each prompt the finished texts with their scores, the best first."""


def their_texts(model: Any, end: int, settings: dict[str, Any]) -> Texts:
    """Return what transformers gives, prompt by prompt."""
    results: Texts = []
    for prompt in PROMPTS:
        given = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            num_return_sequences=settings["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        texts = [row[len(prompt) :].tolist() for row in given.sequences]
        texts = [text[: text.index(end)] if end in text else text for text in texts]
        scores = [0.0] if settings["num_beams"] == 1 else given.sequences_scores.tolist()
        results.append(list(zip(texts, scores, strict=True)))
    return results


def request_of(end: int, settings: dict[str, Any]) -> GenerationRequest:
    rest = dict(settings)
    size, penalty = rest.pop("no_repeat_ngram_size", 0), rest.pop("repetition_penalty", 1.0)
    return GenerationRequest(
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        sampling=SamplingConfig(greedy=True, no_repeat_ngram_size=size, repetition_penalty=penalty),
        stop=StopRule(end_tokens=frozenset((end,))),
        beams=BeamConfig(**rest) if rest["num_beams"] > 1 else None,
    )


def our_continuations(folders: dict[str, Path], ends: dict[str, int], pp: int) -> dict[str, list[list[Continuation]]]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    state = create_parallel_state(ParallelSizes(tp=world_size // pp, pp=pp))
    links = create_pipeline_links(state.pp) if pp > 1 else None
    results = {}
    for kind, folder in folders.items():
        engine = InferenceEngine(load_hugging_face_model(folder, state, Device("cpu")), state, links, max_batch_size=8)
        results[kind] = [engine.generate(request_of(ends[kind], settings)) for settings in CASES.values()]
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, list[Texts]]]:
    """Return of every kind its folder, a token that ends texts early, and what transformers gives in every case."""
    results = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("models") / kind
        model = save_model(kind, folder)
        # A token of what a free search finds comes early enough to end some texts, and not all.
        free = their_texts(model, int(tokens_of(kind, 1, 1)[0, 0]), CASES["plain"])
        end = free[0][0][0][5]
        results[kind] = (folder, end, [their_texts(model, end, settings) for settings in CASES.values()])
    return results


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "pp", "kinds"),
    [
        pytest.param(1, 1, KINDS, marks=pytest.mark.long),
        (2, 1, ("neo", "llama31")),
        (1, 2, ("gpt2",)),
        pytest.param(2, 2, ("llama31",), marks=pytest.mark.long),
    ],
)
def test_texts_and_scores_are_those_of_transformers(models: Any, tp: int, pp: int, kinds: tuple[str, ...]) -> None:
    folders, ends = {kind: models[kind][0] for kind in kinds}, {kind: models[kind][1] for kind in kinds}
    for results in run_distributed(tp * pp, our_continuations, folders, ends, pp, timeout_s=120.0):
        for kind in kinds:
            for (name, settings), given, expected in zip(CASES.items(), results[kind], models[kind][2], strict=True):
                for continuation, texts in zip(given, expected, strict=True):
                    assert continuation.tokens == texts[0][0], f"{kind}, {name}"
                    if settings["num_beams"] == 1:
                        continue
                    found = continuation.hypotheses
                    assert [list(hypothesis.tokens) for hypothesis in found] == [text for text, _ in texts]
                    scores = [hypothesis.score for hypothesis in found]
                    assert scores == pytest.approx([score for _, score in texts], rel=1e-4), f"{kind}, {name}"


@pytest.mark.full
def test_the_cases_differ(models: Any) -> None:
    """Some texts end early and others do not, and each setting changes what is found."""
    for _, _, of_cases in models.values():
        lengths = {len(text) for texts in of_cases for of_prompt in texts for text, _ in of_prompt}
        assert min(lengths) < NEW_TOKENS == max(lengths)
        best = [[of_prompt[0][0] for of_prompt in texts] for texts in of_cases]
        assert len({str(texts) for texts in best}) >= 4
