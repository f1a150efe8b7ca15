"""Errors of a layout in a low precision, compared with those of one process: nothing unknown or infinite passes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.sharding import Box
from megatron.verification.rounding import Errors, ErrorsOfOneProcess, Reference
from megatron.verification.run_cell import CellResult, Fragment

EXACT = np.arange(1.0, 13.0).reshape(3, 4)


def result(error: float, name: str = "w", of_later_norms: float | None = None) -> CellResult:
    """Return a result of which every number has the same relative error, but for gradient norms of later steps."""
    later = error if of_later_norms is None else of_later_norms
    fragment = Fragment(name, EXACT.shape, Box((0, 0), EXACT.shape), EXACT * (1.0 + error), 0)
    return CellResult([2.0 * (1.0 + error)] * 3, [5.0 * (1.0 + x) for x in (error, later, later)], [fragment], [fragment])


def errors(*results: CellResult) -> Errors:
    return Errors.of(results, Reference.of(result(0.0)))


def test_a_layout_passes_only_with_errors_like_those_of_one_process() -> None:
    of_one_process = ErrorsOfOneProcess((errors(result(0.01)), errors(result(-0.01))))
    assert of_one_process.compare(errors(result(0.02))).reasons == ()
    found = of_one_process.compare(errors(result(0.0), result(0.05)))
    assert len(found.reasons) == 3 + 4
    assert found.multiples == pytest.approx((5.0, 5.0, 5.0, 5.0))


@pytest.mark.parametrize(("of_one_process", "fails"), [(0.01, True), (0.09, False), (0.5, False)])
def test_later_gradient_norms_are_compared_where_those_of_one_process_are_stable(
    of_one_process: float, fails: bool
) -> None:
    measured = ErrorsOfOneProcess((errors(result(0.01)), errors(result(-0.01, of_later_norms=of_one_process))))
    assert measured.compare(errors(result(0.01, of_later_norms=0.09))).reasons == ()
    found = measured.compare(errors(result(0.01, of_later_norms=0.2))).reasons
    expected = [f"gradient norm of step {step}: error 2.0e-01" for step in (2, 3)] if fails else []
    assert [reason.partition(" relative")[0] for reason in found] == expected


def test_a_tensor_that_one_process_does_not_have_fails() -> None:
    of_one_process = ErrorsOfOneProcess((errors(result(0.01)), errors(result(-0.01))))
    found = of_one_process.compare(errors(result(0.0), result(0.0, "other")))
    assert found.reasons == ("other: one process has no such tensor",)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nothing_passes_if_one_process_overflows(bad: float) -> None:
    of_one_process = ErrorsOfOneProcess((errors(result(0.01)), errors(result(bad))))
    reasons = of_one_process.compare(errors(result(bad))).reasons
    assert "loss of step 1: one process has no finite error relative to float64, so none can be compared" in reasons
    assert any(reason.startswith("gradient of w: one process has no finite error") for reason in reasons)
