"""lm-eval's local-completions asks the server, as its users do, and gets what the model computes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

from megatron.core.inference.inference_request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from tests.harness.openai_server import NAME, served

PAIRS = [("two and two", " is four"), ("a", "b c"), ("the end of a longer text is", " near"), ("x", "yz")]


@pytest.mark.long
def test_lm_eval_scores_and_continues_texts_through_the_server(tmp_path) -> None:
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = tmp_path / "tokenizer"
    with served(folder) as server:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )
        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=NAME,
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            num_concurrent=3,
            batch_size=2,
            max_length=400,
        )
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
        scores = model.loglikelihood(asked, disable_tqdm=True)
        for (context, rest), (score, is_greedy) in zip(PAIRS, scores, strict=True):
            ids, prompt = server.tokenizer.tokenize(context + rest), server.tokenizer.tokenize(context)
            request = GenerationRequest(prompts=(tuple(ids),), max_new_tokens=0, log_probabilities=True)
            (known,) = server.engine.generate(request)
            assert known.log_probabilities is not None
            assert score == pytest.approx(sum(known.log_probabilities[len(prompt) - 1 :]))
            likeliest = GenerationRequest(
                prompts=(tuple(prompt),), max_new_tokens=len(ids) - len(prompt), sampling=SamplingConfig(greedy=True)
            )
            assert is_greedy == (server.engine.generate(likeliest)[0].tokens == ids[len(prompt) :])
        until = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
        texts = model.generate_until(
            [Instance("generate_until", {}, (context, until), n) for n, (context, _) in enumerate(PAIRS)],
            disable_tqdm=True,
        )
        eod = server.tokenizer.eod_id
        assert eod is not None
        greedy = GenerationRequest(
            prompts=tuple(tuple(server.tokenizer.tokenize(context)) for context, _ in PAIRS),
            max_new_tokens=12,
            sampling=SamplingConfig(greedy=True),
            stop=StopRule(end_tokens=frozenset((eod,))),
        )
        assert texts == [server.tokenizer.detokenize(each.tokens) for each in server.engine.generate(greedy)]
