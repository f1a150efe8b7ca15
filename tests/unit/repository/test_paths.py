"""The script that counts the files and functions that everyday operations enter."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.repository.source_tree import REPOSITORY


def test_every_operation_is_measured_from_its_first_file_on() -> None:
    script = REPOSITORY / "docs" / "scripts" / "measure_paths.py"
    output = subprocess.run([sys.executable, script, "--files"], capture_output=True, text=True, check=True).stdout
    counts: dict[str, int] = {}
    files: dict[str, list[str]] = {}
    title = ""
    for line in output.splitlines()[1:]:
        if line.startswith("    "):
            files[title].append(line.strip())
        elif line:
            title = line[:36].strip()
            counts[title], files[title] = int(line.split()[-3]), []
    assert {title: len(entered) for title, entered in files.items()} == counts
    assert {title: entered[0] for title, entered in files.items()} == {
        "argv → configuration": "megatron/config/arguments.py",
        "configuration → model and optimizer": "megatron/training/model_setup.py",
        "token ids → loss": "megatron/training/gpt.py",
        "gradient → update": "megatron/core/timers.py",
        "optimizer state → disk": "megatron/training/checkpointing.py",
    }
    assert "megatron/core/optimizer/optimizer.py" in files["gradient → update"]
    assert "megatron/core/dist_checkpointing/shard_file.py" in files["optimizer state → disk"]
