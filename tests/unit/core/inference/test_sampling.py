"""Sampling: the filters of logits, the draws, and the settings that can be."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.inference.inference_request import TokenPairs
from megatron.core.inference.sampling import (
    add_bias,
    apply_temperature,
    choose_tokens,
    forbid_pairs,
    forbid_repeats,
    keep_top_k,
    keep_top_p,
    penalize,
    token_probabilities,
)
from megatron.core.inference.sampling_config import MIN_TEMPERATURE, SamplingConfig


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(5, 83, generator=torch.Generator().manual_seed(3)) * 3


def generators(count: int, seed: int = 7) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + row) for row in range(count)]


def test_greedy_takes_the_largest_and_draws_nothing(logits: torch.Tensor) -> None:
    (generator,) = generators(1)
    before = generator.get_state()
    chosen = choose_tokens(logits, SamplingConfig(greedy=True), [generator] * 5)
    assert torch.equal(chosen, logits.max(dim=-1).indices)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("k", [1, 2, 17, 82])
def test_top_k_keeps_the_k_largest_unchanged(logits: torch.Tensor, k: int) -> None:
    kept = keep_top_k(logits, k)
    for row, kept_row in zip(logits, kept):
        largest = set(row.topk(k).indices.tolist())
        assert set(kept_row.isfinite().nonzero().flatten().tolist()) == largest
        assert torch.equal(kept_row[sorted(largest)], row[sorted(largest)])


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    kept = keep_top_k(torch.zeros(2, 9), 4)
    assert kept.isfinite().sum(dim=-1).tolist() == [4, 4]


@pytest.mark.parametrize("k", [83, 84, 10_000])
def test_top_k_of_the_whole_vocabulary_changes_nothing(logits: torch.Tensor, k: int) -> None:
    assert torch.equal(keep_top_k(logits, k), logits)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: torch.Tensor, p: float) -> None:
    logits = logits.double()
    probabilities = torch.softmax(logits, dim=-1)
    for row, kept_row, probability in zip(logits, keep_top_p(logits, p), probabilities):
        kept = kept_row.isfinite()
        assert torch.equal(kept_row[kept], row[kept])
        assert probability[kept].sum() >= p
        assert probability[kept].sum() - probability[kept].min() < p
        assert probability[kept].min() >= probability[~kept].max()


def test_top_p_of_a_known_distribution() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert keep_top_p(logits, 0.39).isfinite().tolist() == [[False, True, False, False]]
    assert keep_top_p(logits, 0.6).isfinite().tolist() == [[False, True, False, True]]
    assert keep_top_p(logits, 0.75).isfinite().tolist() == [[False, True, True, True]]
    assert keep_top_p(logits, 1e-9).isfinite().tolist() == [[False, True, False, False]]


def test_top_p_counts_what_top_k_left() -> None:
    """0.4, 0.3 and 0.2 are 0.44, 0.33 and 0.22 once the fourth is gone: 0.75 is then reached by two."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    probabilities = token_probabilities(logits, SamplingConfig(top_k=3, top_p=0.75))
    torch.testing.assert_close(probabilities, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))


def test_temperature_raises_probabilities_to_a_power(logits: torch.Tensor) -> None:
    plain = torch.softmax(logits.double(), dim=-1)
    tempered = token_probabilities(logits.double(), SamplingConfig(temperature=0.5))
    torch.testing.assert_close(tempered, plain**2 / (plain**2).sum(dim=-1, keepdim=True))


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[3e4, 2e4, -1.0]])
    assert apply_temperature(logits, 1e-38).tolist() == [[0.0, -torch.inf, -torch.inf]]
    assert choose_tokens(logits, SamplingConfig(temperature=1e-38), generators(1)).tolist() == [0]


def test_low_precision_logits_are_sampled_in_float32(logits: torch.Tensor) -> None:
    assert token_probabilities(logits.bfloat16(), SamplingConfig()).dtype == torch.float32
    assert token_probabilities(logits.double(), SamplingConfig()).dtype == torch.float64


def test_equal_generators_draw_equal_tokens(logits: torch.Tensor) -> None:
    sampling = SamplingConfig(temperature=1.5)
    first, again = (choose_tokens(logits, sampling, generators(5)) for _ in range(2))
    other = choose_tokens(logits, sampling, generators(5, seed=1000))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_row_draws_the_same_whatever_rows_are_beside_it(logits: torch.Tensor) -> None:
    sampling = SamplingConfig(temperature=2.0, top_k=50, top_p=0.95)
    together = choose_tokens(logits, sampling, generators(5))
    alone = [choose_tokens(logits[row : row + 1], sampling, [generators(5)[row]]) for row in range(5)]
    assert torch.equal(together, torch.cat(alone))


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    (generator,) = generators(1)
    sampling = SamplingConfig(top_k=3)
    counts = torch.zeros(4)
    for _ in range(3000):
        counts[choose_tokens(logits, sampling, [generator])] += 1
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert counts[3] == 0
    torch.testing.assert_close(counts / 3000, expected, atol=0.03, rtol=0)


def test_forbidden_tokens_are_minus_infinity_behind_their_first_token_only(logits: torch.Tensor) -> None:
    before = logits.clone()
    never = TokenPairs(first=frozenset((3, 9)), second=frozenset((80, 2)))
    result = forbid_pairs(logits, [9, 8, 3, 80, 2], never)
    assert result[[0, 2]][:, [2, 80]].isneginf().all()
    changed = (result != before).nonzero().tolist()
    assert changed == [[0, 2], [0, 80], [2, 2], [2, 80]]
    assert torch.equal(logits, before)


def test_penalties_count_what_each_row_has_and_leave_the_logits_alone(logits: torch.Tensor) -> None:
    sampling = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25)
    texts = [[1, 2, 3, 3, 7], [9], [4, 4, 4], [5, 6], [8, 8]]
    before = logits.clone()
    given = penalize(logits, texts, [3, 0, 3, 1, 1], sampling)
    expected = logits.clone()
    for row, token, times in ((0, 3, 2), (0, 7, 1), (2, 4, 3), (3, 6, 1), (4, 8, 1)):
        expected[row, token] -= 0.5 + 0.25 * times
    torch.testing.assert_close(given, expected)
    assert torch.equal(logits, before)
    assert penalize(logits, texts, 0, SamplingConfig()) is logits


def test_a_repetition_penalty_brings_what_a_text_has_nearer_to_minus_infinity() -> None:
    """Logits above 0 are divided by it and others multiplied, once, whether a token is of the prompt or new."""
    logits = torch.tensor([[0.5, -4.0, 3.0, -3.0, 0.0], [4.0, -4.0, 3.0, -3.0, 0.0]])
    given = penalize(logits, [[0, 1, 1], [3, 4]], [1, 0], SamplingConfig(repetition_penalty=2.0))
    assert given.tolist() == [[0.25, -8.0, 3.0, -3.0, 0.0], [4.0, -4.0, 3.0, -6.0, 0.0]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingConfig(presence_penalty=0.5), [1.0, 0.5, 1.0]),
        (SamplingConfig(frequency_penalty=0.25), [1.0, 0.5, 1.0]),
        (SamplingConfig(presence_penalty=-0.5), [1.0, 1.5, 1.0]),
    ],
)
def test_each_penalty_counts_by_itself(sampling: SamplingConfig, expected: list[float]) -> None:
    assert penalize(torch.ones(1, 3), [[0, 1, 1]], 2, sampling).tolist() == [expected]


def test_a_bias_is_added_to_the_logits_of_its_own_row() -> None:
    logits = torch.ones(3, 4)
    given = add_bias(logits, [((1, 2.0), (3, -0.5)), (), ((0, -torch.inf), (0, 1.0))])
    assert given.tolist() == [[1.0, 3.0, 1.0, 0.5], [1.0] * 4, [-torch.inf, 1.0, 1.0, 1.0]]
    assert logits.eq(1.0).all()
    assert add_bias(logits, [(), (), ()]) is logits


def test_repeats_are_forbidden_row_by_row() -> None:
    logits = torch.zeros(3, 4)
    given = forbid_repeats(logits, [[1, 2, 1], [3, 2, 1], []], 2)
    assert given.isneginf().nonzero().tolist() == [[0, 2]]
    assert logits.eq(0.0).all()
    assert forbid_repeats(logits, [[1, 1], [2, 2], [3]], 0) is logits


@pytest.mark.parametrize("top_p", [0.0, 1.0])
def test_a_top_p_of_none_or_all_keeps_every_token(top_p: float) -> None:
    logits = torch.tensor([[0.0, -30.0, -60.0]])
    assert token_probabilities(logits, SamplingConfig(top_p=top_p)).gt(0.0).all()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"greedy": True},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"top_p": 1.0},
        {"temperature": MIN_TEMPERATURE},
        {"top_p": 0.5, "top_p_decay": 1.0, "top_p_bound": 0.5},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"greedy": True, "seed": 0},
    ],
)
def test_usable_values_have_no_problems(values) -> None:
    assert SamplingConfig(**values).problems() == ()


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": 0.0}, "--temperature 0 "),
        ({"temperature": -1.5}, "--temperature -1.5 "),
        ({"temperature": math.nan}, "--temperature nan "),
        ({"temperature": math.inf}, "--temperature inf "),
        ({"temperature": MIN_TEMPERATURE / 2}, "--temperature 5.87747e-39 is below 1.17549e-38"),
        ({"top_k": -3}, "--top-k -3 "),
        ({"top_p": 1.25}, "--top-p 1.25 "),
        ({"top_p": -0.25}, "--top-p -0.25 "),
        ({"top_p": math.nan}, "--top-p nan "),
        ({"top_p": 0.9, "top_p_decay": 1.5}, "--top-p-decay 1.5 "),
        ({"top_p": 0.9, "top_p_decay": -0.5}, "--top-p-decay -0.5 "),
        ({"top_p": 0.3, "top_p_bound": -0.1}, "--top-p-bound -0.1 "),
        ({"top_p_decay": 0.5}, "--top-p-decay 0.5 needs --top-p"),
        ({"top_p": 0.3, "top_p_bound": 0.4}, "--top-p-bound 0.4 "),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0 "),
        ({"repetition_penalty": math.nan}, "--repetition-penalty nan "),
        ({"repetition_penalty": 101.0}, "--repetition-penalty 101 "),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5 "),
        ({"frequency_penalty": -2.5}, "frequency_penalty -2.5 "),
        ({"frequency_penalty": math.nan}, "frequency_penalty nan "),
        ({"seed": -1}, "--seed -1 "),
        ({"greedy": True, "top_k": 5}, "--greedy "),
        ({"greedy": True, "temperature": 0.5}, "--greedy "),
        ({"greedy": True, "top_p": 0.5}, "--greedy "),
    ],
)
def test_a_problem_names_the_flag_and_the_value(values, flag: str) -> None:
    (problem,) = SamplingConfig(**values).problems()
    assert problem.startswith(flag)


def test_by_default_tokens_are_drawn_from_the_models_own_distribution() -> None:
    default = SamplingConfig()
    assert not default.greedy
    assert not default.has_penalty
    assert (default.temperature, default.top_k, default.top_p, default.no_repeat_ngram_size) == (1.0, 0, 0.0, 0)
    assert default.at_step(3) is default


@pytest.mark.parametrize(
    "values", [{"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]
)
def test_a_penalty_of_any_kind_counts(values) -> None:
    assert SamplingConfig(**values).has_penalty


def test_all_problems_are_found_at_once() -> None:
    assert len(SamplingConfig(temperature=0.0, top_k=-1, top_p=2.0).problems()) == 3


def test_top_p_decays_down_to_its_bound() -> None:
    sampling = SamplingConfig(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    assert [sampling.at_step(step).top_p for step in range(4)] == [0.8, 0.4, 0.3, 0.3]


def test_top_p_never_decays_to_drawing_from_all() -> None:
    assert 0.0 < SamplingConfig(top_p=0.8, top_p_decay=0.5).at_step(5000).top_p < 1e-300


@pytest.mark.parametrize("values", [{"top_p": 0.8}, {"top_k": 3}, {"top_p_decay": 0.5}])
def test_without_a_decay_every_token_is_chosen_alike(values) -> None:
    sampling = SamplingConfig(**values)
    assert sampling.at_step(7) == sampling
