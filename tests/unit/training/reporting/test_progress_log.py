"""The throughputs of a progress log: of this job, and since the first of the latest jobs of its world size."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from megatron.checkpoint.train_state import TrainState
from megatron.training.callbacks.progress_log import PROGRESS_FILE, ProgressLog


def hours_ago(hours: int, gpus: int, text: str) -> str:
    moment = datetime.now() - timedelta(hours=hours)
    return f"{moment:%Y-%m-%d %H:%M:%S}\tJob ID: 7\t# GPUs: {gpus}\t{text}\n"


def test_cumulative_throughput_counts_from_the_first_of_the_latest_jobs(tmp_path: Path) -> None:
    (tmp_path / PROGRESS_FILE).write_text(
        hours_ago(9, 4, "Starting job")
        + hours_ago(8, 2, "Starting job")
        + hours_ago(7, 2, "Saved checkpoint\tIteration: 5\tFloating-point operations: 1.00e+17")
        + "a line that nobody wrote\n"
        + hours_ago(6, 4, "Starting job")
        + hours_ago(5, 4, "Starting job")
        + hours_ago(4, 4, "Saved checkpoint\tIteration: 8\tFloating-point operations: 2.00e+17")
    )
    log = ProgressLog(tmp_path, world_size=4, job_id="9", seq_length=1000)
    log.start(TrainState(iteration=8, floating_point_operations_so_far=2.0e17))
    now = TrainState(iteration=20, consumed_train_samples=3_250_000, floating_point_operations_so_far=1.0e18)
    log.save(now, is_async=True)
    started, saved = (tmp_path / PROGRESS_FILE).read_text().splitlines()[-2:]
    assert started.endswith("\tJob ID: 9\t# GPUs: 4\tStarting job")
    found = re.fullmatch(
        r"[\d :-]+\tJob ID: 9\t# GPUs: 4\tSaving async checkpoint\tIteration: 20\tJob throughput: (\S+) TFLOP/s/GPU\t"
        r"Cumulative throughput: (\S+) TFLOP/s/GPU\tFloating-point operations: 1.00e\+18\tTokens \(in billions\): 3.25",
        saved,
    )
    assert found is not None
    # The job of a moment ago did 8e17 operations at once; those of 4 GPUs 9e17 in 6 hours.
    assert float(found[1]) > 1000.0
    assert float(found[2]) == pytest.approx(9.0e17 / (6 * 3600) / 4 / 1e12, abs=0.1)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    ProgressLog(tmp_path / "file", world_size=1, job_id="", seq_length=8).start(TrainState())
    assert capsys.readouterr().out.startswith(f"WARNING: cannot write {tmp_path / 'file' / PROGRESS_FILE}: ")
