"""Measure checkpoints: saving and loading beside others, training beside an asynchronous save, memory over 30 saves.

    python benchmarks/checkpointing/run.py --folder FOLDER_ON_THE_DISK_TO_MEASURE

Each measurement runs in processes of its own; medians with quartiles are printed, and written as JSON and Markdown
under benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tables import markdown

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def measure(script: str, words: list[str], folder: Path, threads: int) -> dict[str, Any]:
    """Run a measurement in a process of its own, on an empty folder, and return its figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = folder / "figures.json"
    command = [sys.executable, str(_HERE / script), *words, "--folder", str(folder / "files"), "--output", str(output)]
    print(f"--- {script} {' '.join(words)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, env=environment, check=True)
    figures: dict[str, Any] = json.loads(output.read_text())
    shutil.rmtree(folder)
    return figures


def describe_machine(folder: Path) -> dict[str, str]:
    """Return what of the machine the figures depend on."""
    fields = {}
    for line in subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    described: dict[str, str] = {name: fields[name] for name in ("Model name", "CPU(s)") if name in fields}
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    commit = subprocess.run(["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        **described,
        "kernel": platform.release().partition("-")[0],
        "file system": kind.stdout.strip(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder by default")
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--num-saves", type=int, default=30, help="saves in a row, for the memory")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--hardware", default="cpu", help="word for the hardware in the names of the result files")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    # GPT-2 small saved beside others; the step benchmark's model trained beside its saves.
    large = ["--num-layers", "12", "--hidden-size", "768", "--num-attention-heads", "12"]
    model = ["--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4"] if options.small else []
    rounds = ["--num-rounds", str(options.num_rounds)]
    saves = ["--num-saves", str(options.num_saves)]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "measured"
        result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": describe_machine(Path(name)),
            "load_average_before": os.getloadavg()[0],
            "rounds": options.num_rounds,
            "save_and_load": measure("save_and_load.py", [*(model or large), *rounds], folder, threads=1),
            "beside_training": measure("beside_training.py", [*model, *rounds], folder, threads=1),
            "memory": measure("memory_of_saves.py", [*model, *saves], folder, threads=1),
            "memory_async": measure("memory_of_saves.py", [*model, *saves, "--async-save"], folder, threads=1),
        }
        result["load_average_after"] = os.getloadavg()[0]
    options.results.mkdir(parents=True, exist_ok=True)
    stem = options.results / f"checkpointing_{options.hardware}_{result['date']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
