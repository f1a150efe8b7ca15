"""Checkpoints become known to train by the finite iterations after them, and retention keeps the newest of those."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.checkpoint_folder import (
    TRACKER_FILE,
    Retention,
    ValidationWindow,
    expired_iterations,
    is_known,
    iteration_folder,
    mark_known,
    newest_known,
    point_tracker,
    remove_expired,
    saved_iterations,
)


def observe(trial: ValidationWindow, outcomes: dict[int, bool]) -> dict[int, list[int]]:
    found = {}
    for iteration, is_finite in outcomes.items():
        found[iteration] = trial.observe(iteration, is_finite)
        for saved in found[iteration]:
            trial.settle(saved)
    return {iteration: due for iteration, due in found.items() if due}


def test_a_checkpoint_is_due_after_finite_iterations_in_a_row() -> None:
    trial = ValidationWindow(3)
    trial.begin(4)
    trial.begin(6)
    outcomes = {5: True, 6: True, 7: False, 8: True, 9: True, 10: True, 11: True}
    assert observe(trial, outcomes) == {10: [4, 6]}


def test_going_back_forgets_what_came_after() -> None:
    trial = ValidationWindow(1)
    trial.begin(4)
    trial.begin(8)
    trial.go_back(4)
    assert observe(trial, {5: True, 9: True}) == {5: [4]}


def test_the_newest_known_checkpoint_outlives_retention(tmp_path: Path) -> None:
    assert expired_iterations([10, 20, 30, 40], 40, 1, None, (20, None)) == [10, 30]
    for iteration in (10, 20, 30, 40):
        folder = iteration_folder(tmp_path, iteration)
        folder.mkdir()
        (folder / "index.json").write_text('{"format": "megatron-native"}')
    mark_known(tmp_path, 10, 2)
    mark_known(tmp_path, 20, 2)
    assert [is_known(tmp_path, iteration) for iteration in (10, 20, 30)] == [True, True, False]
    assert newest_known(tmp_path) == 20
    remove_expired(tmp_path, 40, Retention(1, on_trial={25, 30, 40}))
    assert saved_iterations(tmp_path) == [20, 30, 40]
    remove_expired(tmp_path, 40, Retention(1))
    assert saved_iterations(tmp_path) == [20, 40]
    assert sorted(path.name for path in iteration_folder(tmp_path, 20).iterdir()) == [
        "index.json",
        "known_to_train.json",
    ]


def test_the_tracker_is_pointed_back(tmp_path: Path) -> None:
    (tmp_path / TRACKER_FILE).write_text("40")
    point_tracker(tmp_path, 20)
    assert (tmp_path / TRACKER_FILE).read_text() == "20"
