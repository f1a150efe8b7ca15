"""Metrics files, progress logs, and the largest attention logit."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.train_state import TrainState
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import single_rank_group
from megatron.core.transformer import qk_clip
from megatron.training.callbacks.layer_statistics import AttentionLogits
from megatron.training.callbacks.progress_log import PROGRESS_FILE, ProgressLog
from megatron.training.loggers.metrics import MetricsWriter, set_superseded_lines_aside


def test_a_file_that_is_no_text_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ConfigurationError, match=re.escape(f"--metrics-jsonl {path} is not a text file; use a different file name")
    ):
        set_superseded_lines_aside(path, 0)
    assert path.read_bytes() == b"\xff\xfe\x00"


def test_a_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_text", lambda path, **_: read.append(path) or "")
    set_superseded_lines_aside(Path("/dev/zero"), 0)
    assert not read


def test_figures_that_are_not_finite_are_null_within_others_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config: Any = SimpleNamespace(
        logging=SimpleNamespace(tensorboard_dir=None, wandb_project="", mlflow_experiment="", loggers=()),
        world_size=1,
        metrics_jsonl=str(path),
        checkpoint=SimpleNamespace(save=str(tmp_path)),
    )
    with MetricsWriter(config, Device("cpu"), 0) as metrics:
        stragglers = {"factor": math.inf, "milliseconds": {"data": [1.0, -math.inf]}}
        metrics.write({"loss": math.nan, "stragglers": stragglers})
    assert json.loads(path.read_text()) == {
        "loss": None,
        "stragglers": {"factor": None, "milliseconds": {"data": [1.0, None]}},
    }


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


LENGTH, BATCH, HEADS, GROUPS, WIDTH = 11, 3, 6, 2, 5
WORLD = single_rank_group(("dp",))
MASK = torch.eye(LENGTH, dtype=torch.bool)[None, None]
PATTERNS = {
    "causal": AttentionPattern(),
    "both directions": AttentionPattern(is_causal=False),
    "window": AttentionPattern(window=3),
    "documents": AttentionPattern(document_ids=torch.arange(LENGTH).div(4, rounding_mode="floor").expand(BATCH, -1)),
    "mask": AttentionPattern(mask=MASK),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_largest_is_that_of_the_whole_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_clip, "_BLOCK_ELEMENTS", 4 * BATCH * HEADS * LENGTH)  # 4 queries a block, then 3
    pattern, random = PATTERNS[name], torch.Generator().manual_seed(3)
    query = torch.randn(LENGTH, BATCH, HEADS, WIDTH, generator=random)
    key = torch.randn(LENGTH, BATCH, GROUPS, WIDTH, generator=random)
    query[0, :, 0] = 9.0 * key[-1, :, 0]  # the largest of all is where most patterns forbid to look
    every_key = key.repeat_interleave(HEADS // GROUPS, dim=2)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, every_key) / WIDTH**0.5
    visible = pattern.matrix(LENGTH, LENGTH, torch.device("cpu"))
    expected = (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).max().item()
    assert visible is None or expected < scores.max().item()  # the pattern matters

    logits = AttentionLogits((), torch.device("cpu"))
    logits.observe(query, key, pattern, WORLD)
    assert logits.take(WORLD) is None  # it was off
    logits.is_on = True
    logits.observe(query / 2, key, pattern, WORLD)
    logits.observe(query, key, pattern, WORLD)
    assert logits.take(WORLD) == pytest.approx(expected, rel=1e-6)
    assert logits.take(WORLD) is None
