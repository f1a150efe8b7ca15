"""Apply each patch of a folder to a copy of the tree, and run what executes the changed lines until something finds it.

python -m tests.emulated_cuda.planted_faults FOLDER [--jobs 2] [--only NAME ...] [--scenarios-only]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.emulated_cuda.planted_faults.patches import PatchError, apply_patch, copy_tree, restore, scenarios_of
from tests.emulated_cuda.scenarios.hits import Recording, all_statements, read_recorded, record
from tests.emulated_cuda.scenarios.listed import SCENARIOS
from tests.emulated_cuda.scenarios.running import MEMORY, NOTHING, STATEMENTS, TIMED_OUT, Scenario, Servers, difference

FURTHER_TESTS = (
    "tests/unit/emulated_cuda/test_emulated_cuda.py",
    "tests/unit/emulated_cuda/test_features.py",
    "tests/distributed/verification/test_emulated_layouts.py",
    "tests/unit/emulated_cuda/test_programs.py",
    "tests/unit/core/test_device.py",
    "tests/unit/core/ops/test_attention_block.py",
    "tests/unit/core/ops/test_triton_offsets.py",
    "tests/unit/core/ops/test_attention_choice.py",
    "tests/unit/core/ops/test_flash_attention_selection.py",
    "tests/unit/core/ops/test_gemm.py",
    "tests/unit/core/ops/test_triton_programs.py",
)
"""Tests besides the scenarios: those on emulated devices, of devices, and of kernels and their choice by GPU."""
_RECORDED = "recorded.jsonl"
_REPETITIONS = 2
"""How often a scenario is repeated that timed out or differed in memory: it must differ each time."""


def record_all(folder: Path, scenarios: Sequence[Scenario], jobs: int) -> Recording:
    """Run the unchanged program in each scenario twice, and return what each executes and the results.

    The second run is compared with the first. What a folder has of earlier runs of the same source is taken.

    Raises:
        AssertionError: a scenario fails without a patch, or its results vary.
    """
    file = folder / _RECORDED
    known = read_recorded(file)
    missing = [scenario for scenario in scenarios if scenario.name not in known]
    lock = threading.Lock()

    def run_some(some: Sequence[Scenario]) -> None:
        with Servers(observes=STATEMENTS) as observing, Servers(observes=NOTHING) as servers:
            for scenario in some:
                recording = record(observing, [scenario])
                result = recording.results[scenario.name]
                varying = difference(servers.of(scenario).run(scenario), result)
                assert not varying, f"scenario {scenario.name!r} varies without a patch: {varying}"
                with lock, file.open("a") as lines:
                    values = {**dataclasses.asdict(result), "hits": sorted(result.hits)}
                    lines.write(json.dumps([scenario.name, values]) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_some, [missing[start::jobs] for start in range(jobs)]))
    return Recording(read_recorded(file))


def run_until_found(names: Sequence[str], recorded: Path) -> tuple[str, str] | None:
    """Run scenarios of this tree until one shows something else than was recorded: its name, and what it shows."""
    expected = read_recorded(recorded)
    named = {scenario.name: scenario for scenario in SCENARIOS}
    with Servers() as servers:
        for name in names:
            scenario = named[name]
            try:
                shown = difference(servers.of(scenario).run(scenario), expected[name])
                for _ in range(_REPETITIONS):
                    # The host may have been busy, or memory was read before the work of another rank had ended.
                    if shown == TIMED_OUT or shown.startswith(f"{MEMORY} is "):
                        shown = difference(servers.of(scenario).run(scenario), expected[name])
            except RuntimeError as error:
                shown = f"server: {error}"
            if shown:
                return name, shown
    return None


def find(patch: Path, tree: Path, recording: Recording, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what finds the fault of a patch, in a copy of the tree that is restored afterwards."""
    begin = time.monotonic()
    files = apply_patch(patch, tree)
    try:
        names = scenarios_of(files, tree, all_statements(), recording, SCENARIOS)
        recorded = arguments.folder / _RECORDED
        found = _in_tree(tree, ["-m", __package__, str(recorded), "--run", json.dumps(names)])
        place, shown = (
            json.loads(found.stdout.splitlines()[-1]) if found.stdout.strip() else ("the runner", found.stderr)
        )
        if not place and not arguments.scenarios_only:
            place, shown = _in_further_tests(tree)
    finally:
        restore(files, tree)
    seconds = round(time.monotonic() - begin)
    return {"patch": patch.stem, "scenarios": len(names), "found_by": place, "shows": shown[:600], "seconds": seconds}


def _in_tree(tree: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True, check=False)


def _in_further_tests(tree: Path) -> tuple[str, str]:
    for file in FURTHER_TESTS:
        command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long and not gpu", file]
        result = _in_tree(tree, command)
        if result.returncode != 0:
            lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return file, (lines or result.stdout.splitlines() or [result.stderr])[-1]
    return "", ""


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return 0 if every fault is found."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the patches; results are written there")
    parser.add_argument("--jobs", type=int, default=1, help="patches that are tried at a time")
    parser.add_argument("--only", nargs="+", default=[], help="names of patches, without .patch")
    parser.add_argument("--scenarios-only", action="store_true", help="leave the further tests out")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.run is not None:
        print(json.dumps(run_until_found(json.loads(arguments.run), arguments.folder) or ("", "")))
        return 0
    patches = [
        path for path in sorted(arguments.folder.glob("*.patch")) if path.stem in (arguments.only or [path.stem])
    ]
    recording = record_all(arguments.folder, SCENARIOS, arguments.jobs)
    trees: SimpleQueue[Path] = SimpleQueue()
    lock, num_found = threading.Lock(), 0

    def try_patch(patch: Path) -> bool:
        tree = trees.get()
        try:
            row = find(patch, tree, recording, arguments)
        except PatchError as error:
            row = {"patch": patch.stem, "scenarios": 0, "found_by": "", "shows": f"not tried: {error}", "seconds": 0}
        finally:
            trees.put(tree)
        with lock:
            print(f"{row['patch']}: {row['found_by'] or 'NOT FOUND'} | {row['shows'][:200]}", flush=True)
            with (arguments.folder / "found.jsonl").open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        return bool(row["found_by"])

    with tempfile.TemporaryDirectory(prefix="planted-faults-") as place:
        for number in range(arguments.jobs):
            copy_tree(Path(place) / str(number))
            trees.put(Path(place) / str(number))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            num_found = sum(pool.map(try_patch, patches))
    print(f"{num_found} of {len(patches)} found")
    return 0 if num_found == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
