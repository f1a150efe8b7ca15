"""Texts are continued in batches as each is alone."""

from __future__ import annotations

from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.evaluation.model_ranks import ModelRanks, TextEncoding, TextQuestion
from tests.unit.core.inference.small_models import build, odd_config

PROMPTS = ((5, 7), (9, 11, 2), (40,), (3, 3), (88, 1))


def continued(prompts: tuple[tuple[int, ...], ...], engine_batch: int, batch: int) -> list[str]:
    state = describe_parallel_state(0, 1)
    engine = InferenceEngine(build(odd_config(), single_rank_group()), state, max_batch_size=engine_batch)
    ranks = ModelRanks(engine, TextEncoding(NullTokenizer(100)), state.world, state.dp, batch)
    # A text has ended where its first number is followed by another.
    return ranks.continue_texts(TextQuestion(prompts, 6, (" ",), SamplingConfig(greedy=True)))


def test_batches_greater_than_the_engines_leave_no_text_out() -> None:
    alone = [continued((prompt,), 1, 1)[0] for prompt in PROMPTS]
    assert all(text.isdigit() for text in alone)
    assert continued(PROMPTS, 2, 16) == alone
    assert continued(PROMPTS, 16, 16) == alone
