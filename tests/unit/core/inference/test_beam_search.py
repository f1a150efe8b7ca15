"""The bookkeeping of a beam search: which beams continue, which are kept, and when the search ends."""

from __future__ import annotations

import pytest

from megatron.core.inference.beam_search import IMPOSSIBLE, BeamConfig, BeamSearch, Candidate, Hypothesis

END = 9


def search(max_new_tokens: int = 4, num_end_tokens: int = 1, **options: object) -> BeamSearch:
    ends = frozenset(range(END, END + num_end_tokens))
    return BeamSearch(BeamConfig(**({"num_beams": 2} | options)), max_new_tokens, ends)  # type: ignore[arg-type]


def advance(beams: BeamSearch, *candidates: tuple[int, int, float]) -> list[int]:
    return beams.advance([Candidate(*each) for each in candidates])


@pytest.mark.parametrize(("num_end_tokens", "expected"), [(0, 4), (1, 4), (2, 6)])
def test_a_step_needs_candidates_for_the_texts_that_end(num_end_tokens: int, expected: int) -> None:
    assert search(num_end_tokens=num_end_tokens).num_candidates() == expected


def test_texts_go_on_from_the_likeliest_candidates_that_do_not_end() -> None:
    beams = search()
    assert (beams.texts, beams.scores) == ([(), ()], [0.0, IMPOSSIBLE])
    assert advance(beams, (0, 5, -1.0), (0, END, -1.5), (0, 6, -2.0), (0, 7, -3.0)) == [0, 0]
    assert (beams.texts, beams.scores) == ([(5,), (6,)], [-1.0, -2.0])
    assert advance(beams, (1, 3, -2.5), (1, 4, -2.75), (0, 3, -4.0), (0, 4, -5.0)) == [1, 1]
    assert (beams.texts, beams.scores) == ([(6, 3), (6, 4)], [-2.5, -2.75])


def test_a_text_that_ends_counts_among_the_likeliest_alone() -> None:
    beams = search(length_penalty=1.0)
    # The end is the third candidate of a search for two texts.
    advance(beams, (0, 5, -1.0), (0, 6, -2.0), (0, END, -2.5), (0, 7, -3.0))
    assert beams.finished == []
    advance(beams, (0, 5, -1.5), (0, END, -3.0), (1, 7, -4.0), (1, 8, -5.0))
    assert beams.finished == [Hypothesis((5,), -1.5, END)]


def test_a_row_without_a_text_ends_nothing() -> None:
    beams = search()
    advance(beams, (1, END, IMPOSSIBLE - 1.0), (0, 5, IMPOSSIBLE / 10), (0, 6, -2e9), (0, 7, -3e9))
    assert beams.finished == []
    assert not beams.is_done
    beams = search(max_new_tokens=1)
    advance(beams, (0, 5, -1.0), (1, 5, IMPOSSIBLE / 10), (1, 6, -2e9), (1, 7, -3e9))
    assert [text.tokens for text in beams.finished] == [(5,)]


def test_the_best_finished_texts_are_kept_by_their_score() -> None:
    beams = search(length_penalty=2.0, early_stopping="never")
    advance(beams, (0, END, -1.0), (0, 5, -1.5), (0, 6, -2.0), (0, 7, -3.0))
    advance(beams, (0, END, -2.0), (1, 5, -2.5), (1, 6, -2.75), (0, 7, -3.0))
    # The longer text has the better score.
    assert beams.finished == [Hypothesis((5,), -0.5, END), Hypothesis((), -1.0, END)]
    advance(beams, (1, END, -2.25), (0, 5, -3.0), (1, 6, -3.5), (0, 7, -4.0))
    assert beams.finished == [Hypothesis((6, 6), -0.25, END), Hypothesis((5,), -0.5, END)]


def test_texts_of_full_length_are_finished_without_an_end() -> None:
    beams = search(max_new_tokens=2)
    advance(beams, (0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0))
    assert not beams.is_done
    assert advance(beams, (1, 3, -3.0), (0, END, -4.0), (0, 4, -5.0), (0, 5, -6.0)) == [0, 1]
    assert beams.is_done
    assert beams.finished == [Hypothesis((6, 3), -1.5, None), Hypothesis((5,), -2.0, END)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "next_score", "is_done"),
    [
        (True, 1.0, -1.0, True),
        # At the present length of 2: -5 / 2 is no better than the -2.5 of the second text, -4 / 2 is.
        (False, 1.0, -5.0, True),
        (False, 1.0, -4.0, False),
        # At the full length of 4.
        ("never", 1.0, -5.0, False),
        ("never", 1.0, -10.0, True),
        # Longer texts have no better score.
        ("never", 0.0, -5.0, True),
        ("never", 0.0, -4.5, False),
        ("never", -1.0, -5.0, True),
        ("never", -1.0, -4.0, False),
    ],
)
def test_a_search_ends_when_nothing_better_can_come(
    early_stopping: bool | str, length_penalty: float, next_score: float, is_done: bool
) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=length_penalty)
    advance(beams, (0, 5, -0.5), (0, 6, -0.75), (0, 7, -3.0), (0, 8, -4.0))
    advance(beams, (0, END, -4.0), (1, END, -5.0), (0, 3, next_score), (0, 4, -20.0))
    assert len(beams.finished) == 2
    assert beams.is_done is is_done


def test_a_search_with_fewer_finished_texts_goes_on() -> None:
    beams = search(early_stopping=True)
    advance(beams, (0, END, -0.5), (0, 6, -0.75), (0, 7, -3.0), (0, 8, -4.0))
    assert len(beams.finished) == 1
    assert not beams.is_done


def test_a_search_that_has_ended_keeps_what_it_found() -> None:
    beams = search(early_stopping=True)
    advance(beams, (0, END, -1.0), (0, END, -1.5), (0, 7, -3.0), (0, 8, -4.0))
    found = list(beams.finished)
    assert beams.is_done
    advance(beams, (0, END, -0.1), (1, END, -0.2), (0, 7, -3.0), (0, 8, -4.0))
    assert beams.finished == found
    assert beams.is_done
