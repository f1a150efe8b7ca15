"""What "agree within a relative tolerance" means, in one place for every test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

GRADIENT_FLOOR = 1e-3


def relative_difference(actual: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """Return max|actual - expected| / max(max|expected|, floor); the shapes must be equal.

    A difference that is not a number counts as infinite, one of zero as zero whatever it is divided by.
    """
    assert actual.shape == expected.shape, f"{actual.shape} and {expected.shape}"
    if actual.size == 0:
        return 0.0
    wide = np.result_type(actual, expected, np.float64)
    difference = float(np.abs(actual.astype(wide) - expected.astype(wide)).max())
    if not np.isfinite(difference):
        return float("inf")
    scale = max(float(np.abs(expected).max()), floor)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def assert_tensors_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, name: str = "") -> None:
    """Assert that two tensors agree within a relative tolerance."""
    difference = relative_difference(actual, expected)
    assert difference <= tolerance, f"{name}: relative difference {difference:.3e} is above {tolerance:.1e}"


def assert_gradients_close(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Assert that two models' gradients have the same names and agree tensor by tensor.

    The floor is a thousandth of the largest gradient element of the model: a gradient that is zero in exact
    arithmetic (a key bias) holds nothing but rounding.
    """
    assert set(actual) == set(expected), f"only on one side: {sorted(set(actual) ^ set(expected))}"
    floor = GRADIENT_FLOOR * max(float(np.abs(gradient).max()) for gradient in expected.values())
    differences = {name: relative_difference(actual[name], expected[name], floor) for name in expected}
    wrong = {name: value for name, value in differences.items() if not value <= tolerance}
    assert not wrong, f"relative differences above {tolerance:.1e}: {wrong}"
