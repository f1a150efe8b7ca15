"""Which checkpoint a folder means, and the lines that say how far a copy is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.progress import ByteProgress
from megatron.core.errors import CheckpointError
from tests.unit.conversion.small_checkpoint import small_common, write_small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with iterations 2 and 4, the tracker file at 4."""
    folder = tmp_path_factory.mktemp("run")
    for iteration in (2, 4):
        write_small(folder, small_common(iteration=iteration, has_optimizer=False))
    return folder


def test_the_tracker_file_decides_unless_an_iteration_is_asked_for(run: Path) -> None:
    assert find_checkpoint(run).folder.name == "iter_0000004"
    assert find_checkpoint(run, 2).folder.name == "iter_0000002"
    assert find_checkpoint(run / "iter_0000002").folder == run / "iter_0000002"
    assert find_checkpoint(run).format == "native"
    with pytest.raises(CheckpointError, match=r"change --ckpt-step 3 to one of: 2, 4"):
        find_checkpoint(run, 3)


def test_a_checkpoint_in_another_format_is_refused_by_name(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"in the native format, not in Hugging Face's format; change --loader"):
        find_checkpoint(run, expected=("hf",))


def test_a_tracker_file_that_names_nothing_is_not_taken_for_an_older_checkpoint(tmp_path: Path) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(CheckpointError, match="names iter_0000009, and there is no such folder"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [None, "", "four"])
def test_a_lost_tracker_file_is_no_choice_of_ours(text: str | None, tmp_path: Path) -> None:
    for iteration in (2, 4):
        write_small(tmp_path, small_common(iteration=iteration, has_optimizer=False))
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    if text is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"name one of its iterations with --ckpt-step: 2, 4$"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path, 4).folder == tmp_path / "iter_0000004"


@pytest.mark.parametrize("text", ["", "four"])
def test_a_release_beside_a_lost_tracker_file_is_not_taken_unasked(text: str, tmp_path: Path) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    (tmp_path / "iter_0000002").rename(tmp_path / "release")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    with pytest.raises(CheckpointError, match=r"name \S*/release, or write 'release' to that file$"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "release").folder == tmp_path / "release"
    tracker.write_text("release")
    assert find_checkpoint(tmp_path).folder == tmp_path / "release"


def test_an_iteration_is_found_without_a_look_at_the_tracker_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"

    def refuse(directory: Path) -> list[int]:
        raise AssertionError(f"{directory} was listed")

    monkeypatch.setattr(checkpoint_folder, "complete_iterations", refuse)
    assert find_checkpoint(tmp_path).folder == tmp_path / "iter_0000002"
    tracker.unlink()
    tracker.mkdir()
    assert find_checkpoint(tmp_path, 2).folder == tmp_path / "iter_0000002"
    with pytest.raises(CheckpointError, match="is a folder, not a file"):
        find_checkpoint(tmp_path)


def test_progress_is_told_at_intervals_with_its_rate() -> None:
    now, lines = 100.0, []
    progress = ByteProgress("writing", 4_000_000_000, lines.append, clock=lambda: now)
    progress.add(500_000_000)
    assert lines == []
    now = 102.5
    progress.add(500_000_000)
    now = 103.0
    progress.add(2_000_000_000)
    assert lines == ["  writing:  25% of 4.00 GB at 400 MB/s"]
    now = 110.0
    progress.add(3_000_000_000)
    assert lines[1] == "  writing: 100% of 4.00 GB at 600 MB/s"
    progress.finish()
    assert lines[2] == "  writing: 6.00 GB in 10.0 s at 600 MB/s"
