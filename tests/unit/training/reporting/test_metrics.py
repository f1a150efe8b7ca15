"""Metrics files that a run finds, and what are none."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.training.loggers.metrics import MetricsWriter, set_superseded_lines_aside


def test_a_file_that_is_no_text_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=re.escape(f"--metrics-jsonl {path} holds no text; give the name of")):
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
        logging=SimpleNamespace(tensorboard_dir=None, wandb_project="", mlflow_experiment=""),
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
