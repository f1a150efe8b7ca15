"""Measure index building and reading: this project against megatron-core, with the same arrays.

Each round runs every task on both sides, one after the other, each in a fresh process, on the same files. A process
calls what it measures once uncounted, then some times. Medians over all calls with their quartiles are printed, and
written as JSON and Markdown under benchmarks/results. It ends with status 1 where arrays differ.

    python benchmarks/data/index/run.py --reference-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
sys.path.insert(0, str(_ROOT))
# Memory that the first call touched is used again by the next ones: a virtual machine may get its memory only as it is
# touched, which takes longer than building an index.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36)}

from tasks import NUM_EPOCHS, SEQUENCE_LENGTH, Task, large_samples, tasks, write_inputs  # noqa: E402

from benchmarks.machine import describe_machine  # noqa: E402


def run_once(side: str, python: str, task: Task, folder: Path, repeats: int) -> dict[str, Any]:
    """Run a task on one side in a fresh process."""
    environment = {**os.environ, **_KEEP_MEMORY, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)  # each side has its own package of the same name
    script = "ours.py" if side == "ours" else "megatron_core_reference.py"
    if side == "ours":
        environment["PYTHONPATH"] = str(_ROOT)
    command = [python, str(_HERE / script), task.name, str(folder), str(repeats)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, {task.name}: ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"lower_quartile": quartiles[0], "median": quartiles[1], "upper_quartile": quartiles[2]}


def summarize(task: Task, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare the two sides of a task."""
    summary: dict[str, Any] = {"task": task.name, "count": task.count}
    for clock, ratio in (("seconds", "ratio"), ("processor_seconds", "processor_ratio")):
        times = {side: spread([each for one in results for each in one[clock]]) for side, results in runs.items()}
        summary[clock] = times
        summary[ratio] = times["reference"]["median"] / times["ours"]["median"] if len(runs) > 1 else None
    digests = {one["digest"] for results in runs.values() for one in results}
    summary["identical"] = len(digests) == 1 if len(runs) > 1 else None
    summary["ratio_wanted"], summary["seconds_wanted"] = task.ratio_wanted, task.seconds_wanted
    return summary


def markdown(report: dict[str, Any]) -> str:
    """Set the results out as a table."""

    def time_of(summary: dict[str, Any], side: str) -> str:
        if side not in summary["seconds"]:
            return "–"
        spans = summary["seconds"][side]
        unit, factor = ("ms", 1e3) if spans["median"] < 1.0 else ("s", 1.0)
        low, middle, high = (spans[key] * factor for key in ("lower_quartile", "median", "upper_quartile"))
        return f"{middle:.3g} {unit} [{low:.3g}–{high:.3g}]"

    def ratio_of(summary: dict[str, Any], name: str) -> str:
        return "–" if summary[name] is None else f"{summary[name]:.1f}"

    version = report["reference_version"]
    lines = [
        f"# Index building and reading, {report['date']}",
        "",
        f"{report['num_documents']} documents, {NUM_EPOCHS} epochs, {report['num_samples']} samples of "
        f"{SEQUENCE_LENGTH} tokens. {report['rounds']} alternating rounds in fresh processes, each {report['repeats']} "
        "calls after one that does not count, in the memory that this one touched. Medians of all calls, quartiles in "
        f"brackets. Opening is of a cached index. The reference is megatron-core {version or '(not run)'}.",
        "",
        f"Machine: {report['machine']}. Load average before the runs: {report['load_average'][0]:.1f}.",
        "",
        "| task | samples a call | ours | megatron-core | ratio | of processor time | wanted | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in report["results"]:
        wanted = "–" if one["ratio_wanted"] is None else f"{one['ratio_wanted']:g} x"
        if one["seconds_wanted"] is not None:
            wanted = f"{one['seconds_wanted'] * 1e3:g} ms"
        same = {True: "yes", False: "NO", None: "–"}[one["identical"]]
        cells = [one["task"], one["count"] or "–", time_of(one, "ours"), time_of(one, "reference")]
        cells += [ratio_of(one, "ratio"), ratio_of(one, "processor_ratio"), wanted, same]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", help="python of an environment with megatron-core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="calls a process")
    parser.add_argument("--num-documents", type=int, default=5_000_000)
    parser.add_argument("--only", default="", help="run the tasks whose names this regular expression finds")
    parser.add_argument("--output-dir", type=Path, default=_ROOT / "benchmarks" / "results")
    parser.add_argument("--work-dir", type=Path, help="folder for some GB of files that are removed afterwards")
    options = parser.parse_args()
    sides = {"ours": sys.executable}
    if options.reference_python is None:
        print("SKIPPED: megatron-core, for --reference-python was not given")
    else:
        sides["reference"] = options.reference_python
    load_average = os.getloadavg()
    selected = [task for task in tasks() if re.search(options.only, task.name)]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {task.name: {side: [] for side in sides} for task in selected}
    with tempfile.TemporaryDirectory(dir=options.work_dir) as name:
        folder = Path(name)
        write_inputs(folder, options.num_documents)
        num_samples = large_samples(folder)
        for number in range(options.rounds):
            for task in selected:
                times = []
                for side, python in sides.items():
                    runs[task.name][side].append(run_once(side, python, task, folder, options.repeats))
                    times.append(f"{side} {statistics.median(runs[task.name][side][-1]['seconds']):.4g} s")
                print(f"round {number + 1}, {task.name}: {', '.join(times)}", flush=True)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": load_average,
        "num_documents": options.num_documents,
        "num_samples": num_samples,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "reference_version": runs[selected[0].name]["reference"][0]["version"] if "reference" in sides else None,
        "results": [summarize(task, runs[task.name]) for task in selected],
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    target = options.output_dir / f"index_cpu_{report['date']}"
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    if any(one["identical"] is False for one in report["results"]):
        raise SystemExit("arrays differ")


if __name__ == "__main__":
    main()
