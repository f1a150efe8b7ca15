"""How long a run needs from a signal to its checkpoint, against what it is given."""

from __future__ import annotations

from megatron.training.callbacks.exit_warning import ExitWarning


class Clock:
    """Tell the time that a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(
    seconds: int | None, is_async: bool = False, stretches: tuple[float, ...] = (2.0, 7.0, 3.0)
) -> ExitWarning:
    """Return a warning whose ranks looked for signals at first, and then after each of the stretches."""
    clock = Clock()
    warning = ExitWarning(seconds, is_async, clock)
    warning.look()
    for stretch in (2.0, 7.0, 3.0):
        clock.now += stretch
        warning.look()
    return warning


def test_what_fits_is_not_mentioned() -> None:
    assert measured(10).line(3.0) is None
    assert measured(10).line(None) is None
    assert measured(None).line(1e6) is None


def test_what_does_not_fit_is_said_with_its_parts() -> None:
    line = measured(10).line(3.5)
    assert line is not None
    assert "may need 10.5 s (7.0 s until it looks for signals, 3.5 s for a checkpoint)" in line
    assert "--exit-warning-seconds 10 is less" in line


def test_beside_training_a_save_under_way_comes_first() -> None:
    assert measured(14, is_async=True).line(3.5) is None
    line = measured(13, is_async=True).line(3.5)
    assert line is not None
    assert "may need 14.0 s" in line
    assert "3.5 s for a checkpoint, one under way and one more)" in line


def test_it_is_said_again_when_it_is_much_worse() -> None:
    warning = measured(10)
    found = [warning.line(seconds) is not None for seconds in (4.0, 4.0, 8.0, 9.6, 9.7)]
    assert found == [True, False, False, True, False]
