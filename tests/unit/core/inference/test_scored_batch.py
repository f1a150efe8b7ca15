"""Scores of given tokens are those of one whole forward pass over each row alone."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import InputError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.prompt_batch import ScoredRow
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from tests.unit.core.inference.small_models import build, odd_config, whole_logits

STATE = describe_parallel_state(0, 1)
GREEDY_ROW = 3


def rows_of(model: GPTModel) -> list[ScoredRow]:
    """Return rows of unequal length; one ends in the tokens that the model finds likeliest."""
    rows = [
        ScoredRow((3, 1, 4), 1),
        ScoredRow((15, 92, 6, 53, 58, 9), 4),
        ScoredRow((9, 7), 1),
        ScoredRow(tuple(range(2, 40)), 37),
    ]
    tokens = [79, 32]
    for _ in range(3):
        tokens.append(int(whole_logits(model, torch.tensor([tokens]))[-1, 0, : model.config.vocab_size].argmax()))
    rows.insert(GREEDY_ROW, ScoredRow(tuple(tokens), 3))
    return rows


@pytest.mark.parametrize("at_once", [6, 1024])
def test_scores_are_those_of_a_whole_forward_pass(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.inference.prompt_batch._PROMPT_TOKENS_AT_ONCE", at_once)
    model = build(odd_config(), single_rank_group())
    rows = rows_of(model)
    sizes: list[int] = []
    scores = InferenceEngine(model, STATE).score(rows, max_batch_size=3, on_batch=sizes.append)
    assert sizes == [3, 2]
    sizes.clear()
    InferenceEngine(model, STATE, max_batch_size=4).score(rows, on_batch=sizes.append)
    assert sizes == [4, 1]
    for row, score in zip(rows, scores, strict=True):
        logits = whole_logits(model, torch.tensor([row.tokens[:-1]]))[:, 0, : model.config.vocab_size]
        behind = torch.tensor(row.tokens[1:])[-row.num_scored :]
        known = logits.log_softmax(dim=-1)[-row.num_scored :]
        assert score.log_probability == pytest.approx(float(known.gather(1, behind[:, None]).sum()), abs=1e-11)
        assert score.is_greedy == bool((known.argmax(dim=-1) == behind).all())
    assert [score.is_greedy for score in scores].index(True) == GREEDY_ROW


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ScoredRow((3,), 1), "1 of 1 tokens cannot be scored"),
        (ScoredRow((3, 4), 0), "0 of 2 tokens cannot be scored"),
        (ScoredRow((3, 101, 5), 1), "prompt 1 of 1 has token 101"),
        (ScoredRow((1,) * 39, 1), "has 37 learned positions"),
    ],
)
def test_what_cannot_be_scored_is_refused(row: ScoredRow, message: str) -> None:
    engine = InferenceEngine(build(odd_config(), single_rank_group()), STATE)
    with pytest.raises(InputError, match=message):
        engine.score([row])


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    engine = InferenceEngine(build(odd_config(), single_rank_group()), STATE)
    for token in (101, -1):
        with pytest.raises(InputError, match=rf"token {token} cannot be scored: the model knows 0\.\.100"):
            engine.score([ScoredRow((3, 4, token), 1)])
    assert len(engine.score([ScoredRow((3, 4, 0), 1), ScoredRow((3, 4, 100), 1)])) == 2


def test_logits_that_are_not_finite_are_refused() -> None:
    model = build(odd_config(), single_rank_group())
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="logits are not finite"):
        InferenceEngine(model, STATE).score([ScoredRow((3, 4, 10), 1)])


def test_the_place_of_logits_that_are_not_finite_is_named() -> None:
    """It is the last position of the row that has them, counted without the padding."""
    model = build(odd_config(untie_embeddings_and_output_weights=True), single_rank_group())
    with torch.no_grad():
        model.embedding.word_embeddings.weight[13] = torch.nan
    with pytest.raises(InputError, match="logits are not finite at position 2:"):
        InferenceEngine(model, STATE).score([ScoredRow((3, 4, 10, 5, 6), 1), ScoredRow((3, 4, 13, 5), 1)])
