"""Generation over tensor-parallel ranks gives what one process gives."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.inference.engine import generate
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import ParallelState, create_parallel_state, describe_parallel_state
from megatron.core.process_group import single_rank_group
from tests.harness.distributed import run_distributed
from tests.unit.core.inference.small_models import build, golden_model, odd_config

PROMPTS = [[3, 1, 4], [15, 92, 6, 53, 58], [9], [79, 32, 38]]
GREEDY = SamplingConfig(greedy=True)
DRAWN = SamplingConfig(temperature=1.3, top_k=60, top_p=0.97, seed=5)


def texts(name: str, state: ParallelState, eod_id: int | None) -> list[list[list[int]]]:
    model = build(odd_config(), state.tp) if name == "odd" else golden_model(name, state.tp)
    return [generate(model, PROMPTS, 7, sampling, eod_id, state) for sampling in (GREEDY, DRAWN)]


def texts_of_rank(names: list[str], eod_id: int | None) -> dict[str, list[list[list[int]]]]:
    state = create_parallel_state(tensor_model_parallel_size=dist.get_world_size())
    return {name: texts(name, state, eod_id) for name in names}


@pytest.mark.parametrize(("tp", "names"), [(2, ["gpt2", "qwen", "odd"]), (4, ["llama", "odd"])])
def test_any_tensor_parallel_size_gives_the_text_of_one_process(tp: int, names: list[str]) -> None:
    """All but gpt2 have two key-value groups: of four ranks two share one. The vocabulary of odd is padded."""
    alone = {name: texts(name, describe_parallel_state(0, 1), None) for name in names}
    for result in run_distributed(tp, texts_of_rank, names, None, timeout_s=60.0):
        assert result == alone


def test_all_ranks_stop_at_the_end_of_document() -> None:
    free = texts("odd", describe_parallel_state(0, 1), None)
    eod_id = free[0][0][3]
    alone = texts("odd", describe_parallel_state(0, 1), eod_id)
    assert alone != free
    assert run_distributed(2, texts_of_rank, ["odd"], eod_id) == [{"odd": alone}] * 2


def text_drawn_with_own_seed() -> list[list[int]]:
    state = create_parallel_state(tensor_model_parallel_size=dist.get_world_size())
    sampling = SamplingConfig(temperature=5.0, seed=state.rank)
    return generate(build(odd_config(), state.tp), PROMPTS, 5, sampling, None, state)


def test_ranks_that_would_choose_otherwise_follow_the_first() -> None:
    """As where a GPU's sums differ in their last bit from rank to rank: all must go on with one text."""
    alone = generate(
        build(odd_config(), single_rank_group()),
        PROMPTS,
        5,
        SamplingConfig(temperature=5.0, seed=0),
        None,
        describe_parallel_state(0, 1),
    )
    assert run_distributed(2, text_drawn_with_own_seed) == [alone] * 2
