"""The folder of a run's checkpoints: names, publication, interruption, retention, and which are validated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint.checkpoint_folder import (
    TRACKER_FILE,
    Retention,
    ValidationWindow,
    candidate_folders,
    create_saving_folder,
    expired_iterations,
    is_known,
    iteration_folder,
    lost_tracker,
    mark_known,
    new_iteration,
    newest_known,
    point_tracker,
    publish,
    remove_expired,
    saved_iterations,
)
from megatron.checkpoint.save import recover
from megatron.checkpoint.stored_checkpoint import open_stored
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megatron.core.parallel_state import describe_parallel_state

TRACKER = "latest_checkpointed_iteration.txt"


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours may catch it."""


def save(directory: Path, iteration: int, text: str = "new") -> None:
    folder = create_saving_folder(directory, iteration)
    (folder / "index.json").write_text(text)
    publish(directory, iteration)


def content(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_names_and_tracker_are_megatrons(tmp_path: Path) -> None:
    save(tmp_path, 50)
    assert content(tmp_path) == ["iter_0000050", TRACKER]
    assert (tmp_path / TRACKER).read_bytes() == b"50"
    assert iteration_folder(tmp_path, 12345678).name == "iter_12345678"


def test_candidates_are_the_tracked_one_and_older_ones(tmp_path: Path) -> None:
    assert candidate_folders(tmp_path) == []
    assert candidate_folders(tmp_path / "absent") == []
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    (tmp_path / "iter_latest").mkdir()
    assert [folder.name for folder in candidate_folders(tmp_path)] == [
        "iter_0000030",
        "iter_0000020",
        "iter_0000010",
    ]
    (tmp_path / TRACKER).write_text("20\n")
    assert [folder.name for folder in candidate_folders(tmp_path)] == ["iter_0000020", "iter_0000010"]
    (tmp_path / TRACKER).write_text("release")
    assert candidate_folders(tmp_path) == [tmp_path / "release"]
    assert candidate_folders(tmp_path, ckpt_step=10) == [tmp_path / "iter_0000010"]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match="--ckpt-step 15 to one of: 10, 20"):
        candidate_folders(tmp_path, ckpt_step=15)


def test_a_damaged_tracker_leaves_all_folders_as_candidates(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / TRACKER).write_text("")
    assert [folder.name for folder in candidate_folders(tmp_path)] == ["iter_0000020", "iter_0000010"]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / TRACKER).write_text("twenty")
    with pytest.raises(CheckpointError, match="'twenty'"):
        candidate_folders(empty)


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, "old")
    save(tmp_path, 10, "new")
    remove_expired(tmp_path, 10, Retention())
    assert content(tmp_path) == ["iter_0000010", TRACKER]
    assert (tmp_path / "iter_0000010" / "index.json").read_text() == "new"


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
def test_killed_at_any_rename_something_complete_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, again: bool
) -> None:
    save(tmp_path, 10, "old")
    iteration = 10 if again else 20
    folder = create_saving_folder(tmp_path, iteration)
    (folder / "index.json").write_text("new")
    calls = 0
    real_rename, real_write = os.rename, checkpoint_folder.write_text

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls > step:
            raise Killed

    def rename(source: Path, target: Path) -> None:
        count()
        real_rename(source, target)

    def write(path: Path, text: str) -> None:
        count()
        real_write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder.os, "rename", rename)
        patch.setattr(checkpoint_folder, "write_text", write)
        total = 4 if again else 3
        if step < total:
            with pytest.raises(Killed):
                publish(tmp_path, iteration)
        else:
            publish(tmp_path, iteration)
    lines: list[str] = []
    recover(tmp_path, lines.append)
    assert [name for name in content(tmp_path) if name.startswith(".")] == []
    newest = candidate_folders(tmp_path)[0]
    # The last rename alone separates a published checkpoint from its entry in the tracker file.
    is_published = step >= total - 1
    assert newest.name == f"iter_{iteration if is_published else 10:07d}"
    assert (newest / "index.json").read_text() == ("new" if is_published else "old")
    assert bool(lines) == (step < total or again)


def test_a_refused_rename_puts_the_replaced_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, "old")
    create_saving_folder(tmp_path, 10)
    real_rename = os.rename

    def rename(source: Path, target: Path) -> None:
        if source.name.endswith(".saving"):
            raise OSError(28, "No space left on device")
        real_rename(source, target)

    monkeypatch.setattr(checkpoint_folder.os, "rename", rename)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 10)
    assert content(tmp_path) == [".iter_0000010.saving", "iter_0000010", TRACKER]
    assert (tmp_path / "iter_0000010" / "index.json").read_text() == "old"


def test_rolling_back_by_hand_is_not_undone(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / TRACKER).write_text("10")
    lines: list[str] = []
    recover(tmp_path, lines.append)
    assert candidate_folders(tmp_path) == [tmp_path / "iter_0000010"]
    assert lines == []


def test_recovery_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in (".hidden", ".iter_0000010", "iter_0000010.saving", "metrics.jsonl"):
        (tmp_path / name).mkdir()
    before = content(tmp_path)
    recover(tmp_path, lambda line: None)
    assert content(tmp_path) == before
    recover(tmp_path / "absent", lambda line: None)


@pytest.mark.parametrize("text", ["1" * 400, "1" * 5000, "２０", "twenty"])
def test_a_pending_tracker_that_names_no_iteration_is_removed(text: str, tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / checkpoint_folder.PENDING_TRACKER).write_text(text)
    lines: list[str] = []
    recover(tmp_path, lines.append)
    assert content(tmp_path) == ["iter_0000010", TRACKER]
    assert lines == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expired"),
    [
        (None, None, []),
        (None, 20, []),
        (3, None, [10, 20, 30]),
        (1, 20, [10, 30, 50]),
        (2, 25, [10, 20, 30, 40]),
        (9, None, []),
        (0, None, [10, 20, 30, 40, 50]),
    ],
)
def test_retention(keep_last: int | None, keep_every: int | None, expired: list[int]) -> None:
    assert expired_iterations([10, 20, 30, 40, 50, 60], 60, keep_last, keep_every) == expired


def test_retention_never_removes_what_was_just_saved_nor_later_ones() -> None:
    assert expired_iterations([10, 20, 30, 40, 50], 20, 1, None) == [10]


def test_expired_checkpoints_are_removed_and_foreign_ones_kept(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration)
        remove_expired(tmp_path, iteration, Retention(3))
    assert saved_iterations(tmp_path) == [5, 20, 30, 40]
    assert content(tmp_path)[-1] == TRACKER


@pytest.mark.parametrize("text", [None, "", "\0\0\0", "twenty", "1" * 5000, "２０"])
def test_a_lost_tracker_leaves_the_newest_complete_checkpoint(text: str | None, tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "iter_0000030").mkdir()  # no checkpoint: it holds nothing
    assert lost_tracker(tmp_path) is None
    (tmp_path / TRACKER).unlink()
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    assert [folder.name for folder in candidate_folders(tmp_path)] == ["iter_0000020", "iter_0000010"]
    found = lost_tracker(tmp_path)
    assert found is not None
    assert len(found) < len(str(tmp_path)) + 160


def test_a_lost_tracker_beside_a_release_and_iterations_is_no_choice_of_ours(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "index.json").write_text("new")
    assert candidate_folders(tmp_path) == [tmp_path / "release"]
    save(tmp_path, 10)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(
        CheckpointError, match=r"is missing, and its folder contains both release and iterations \(10\)"
    ):
        candidate_folders(tmp_path)


def test_a_tracker_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKER)
    with pytest.raises(CheckpointError, match="is a pipe, not a file"):
        candidate_folders(tmp_path)


def test_retention_leaves_what_is_not_this_runs(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration)
    assert remove_expired(tmp_path, 50, Retention(1, kept={10, 30})) == [20, 40]
    assert saved_iterations(tmp_path) == [10, 30, 50]


def test_what_two_runs_write_has_names_of_its_own(tmp_path: Path) -> None:
    for token in ("aaaa", "bbbb"):
        (create_saving_folder(tmp_path, 10, token) / "index.json").write_text(token)
    publish(tmp_path, 10, "bbbb")
    assert (tmp_path / "iter_0000010" / "index.json").read_text() == "bbbb"
    publish(tmp_path, 10, "aaaa")
    assert content(tmp_path) == [".iter_0000010.aaaa.replaced", "iter_0000010", TRACKER]
    (tmp_path / "iter_0000010").rename(tmp_path / ".iter_0000010.aaaa.saving")
    lines: list[str] = []
    recover(tmp_path, lines.append)
    assert (tmp_path / "iter_0000010" / "index.json").read_text() == "bbbb"
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("there", "lacking"),
    [("mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt"), ("common.pt", ".metadata"), ("", "index.json")],
)
def test_a_folder_without_its_main_file_is_damaged_in_its_own_format(there: str, lacking: str, tmp_path: Path) -> None:
    if there:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).touch()
    with pytest.raises(DamagedCheckpointError, match=rf"{tmp_path / lacking}: No such file or directory"):
        open_stored(tmp_path, describe_parallel_state(0, 1))


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


def test_a_rejected_conversion_leaves_no_folder(tmp_path: Path) -> None:
    def write() -> None:
        with new_iteration(tmp_path, 3, "10") as folder:
            (folder / "part").write_text("x")
            raise ConfigurationError("the format cannot express it")

    with pytest.raises(ConfigurationError):
        write()
    assert list(tmp_path.iterdir()) == []
