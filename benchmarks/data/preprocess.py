"""Measure tools/preprocess_data.py against the bare tokenizer that it uses, with as many threads.

    python benchmarks/data/preprocess.py --data ../shared/data

Both run alternately, each time in a fresh process. The bare tokenizer is given texts in memory, and only its encoding
is timed. The tool reads jsonl from disk and ends with a published data set, checksums included; it is timed twice: as a
whole command, and from the start of its workers to its end, which leaves out importing, loading the vocabulary and
trying the engine on a sample. Results go to benchmarks/results as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from preprocess_text import KINDS, write_text

from benchmarks.machine import describe_machine

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# What Megatron's own tool was measured at, for one worker, on this kind of machine and text; it is no package.
_MEGATRON_DOCUMENTS_S, _MEGATRON_MB_S = 142.0, 2.7


def run(command: list[object], environment: dict[str, str]) -> tuple[str, float]:
    """Run a command and return what it prints and the seconds that it takes."""
    start = time.perf_counter()
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout, time.perf_counter() - start


def run_bare(text: Path, data: Path, threads: int, environment: dict[str, str]) -> dict[str, Any]:
    """Time the bare tokenizer once."""
    files = [data / "gpt2-vocab.json", data / "gpt2-merges.txt"]
    output, _ = run([sys.executable, _HERE / "bare_tokenizer.py", text, *files, threads], environment)
    result: dict[str, Any] = json.loads(output)
    return result


def run_tool(text: Path, data: Path, workers: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Time the tool once; what it wrote the last time is gone, as it is for whoever runs it."""
    for last in folder.glob("out*"):
        last.unlink()
    command: list[object] = [sys.executable, _ROOT / "tools" / "preprocess_data.py", "--input", text]
    command += ["--output-prefix", folder / "out", "--append-eod", "--workers", workers]
    command += ["--vocab-file", data / "gpt2-vocab.json", "--merge-file", data / "gpt2-merges.txt"]
    command += ["--tokenizer-engine", "gigatoken"]
    output, command_s = run(command, environment)
    done = re.search(r"Done: (\d+) documents .*, ([\d.]+) s\.", output)
    tokens = re.search(r"documents, (\d+) tokens", output)
    assert done is not None
    assert tokens is not None, output
    return {
        "elapsed_s": float(done[2]),
        "command_s": command_s,
        "num_documents": int(done[1]),
        "num_tokens": int(tokens[1]) - int(done[1]),  # without the ends of documents
    }


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def measure(kind: str, workers: int, text: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both alternately and compare medians."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare, tool = [], []
    for _ in range(options.rounds):
        bare.append(run_bare(text, options.data, workers, environment))
        tool.append(run_tool(text, options.data, workers, folder, environment))
    assert bare[0]["num_tokens"] == tool[0]["num_tokens"], "the two differ in their tokens"
    text_bytes = bare[0]["text_bytes"]
    num_documents = tool[0]["num_documents"]
    result = {
        "kind": kind,
        "workers": workers,
        "text_bytes": text_bytes,
        "file_bytes": text.stat().st_size,
        "num_documents": num_documents,
        "num_tokens": bare[0]["num_tokens"],
        "bare_s": [one["elapsed_s"] for one in bare],
        "tool_s": [one["elapsed_s"] for one in tool],
        "command_s": [one["command_s"] for one in tool],
    }
    for name in ("bare", "tool", "command"):
        seconds = quartiles(result[f"{name}_s"])
        result[f"{name}_mb_s"] = [text_bytes / 1e6 / value for value in reversed(seconds)]
        result[f"{name}_documents_s"] = num_documents / seconds[1]
    result["share_of_bare"] = result["tool_mb_s"][1] / result["bare_mb_s"][1]
    result["share_of_bare_by_round"] = quartiles(
        [one / other for one, other in zip(result["bare_s"], result["tool_s"])]
    )
    result["times_megatron_per_core"] = result["command_documents_s"] / workers / _MEGATRON_DOCUMENTS_S
    return result


def markdown(report: dict[str, Any]) -> str:
    """Set the results out as a table."""

    def rate(values: list[float]) -> str:
        return f"{values[1]:.0f} [{values[0]:.0f}–{values[2]:.0f}]"

    def share(values: list[float]) -> str:
        return f"{values[1]:.2f} [{values[0]:.2f}–{values[2]:.2f}]"

    lines = [
        f"# Preprocessing, {report['date']}",
        "",
        "GPT2BPETokenizer, --append-eod, --tokenizer-engine gigatoken; "
        f"{report['rounds']} alternating rounds in fresh processes. MB of text a "
        "second: medians, quartiles in brackets. *Tool*: from the start of the workers to the published data set with "
        "its checksums; *command*: with start-up. Megatron's own tool: "
        f"{_MEGATRON_DOCUMENTS_S:.0f} documents a second ({_MEGATRON_MB_S} MB/s), one worker, repeated text.",
        "",
        f"Machine: {report['machine']}. Load average before the runs: {report['load_average'][0]:.1f}. Versions: "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + ".",
        "",
        "| text | workers | MB | bare MB/s | tool MB/s | share of bare | by round | command MB/s | "
        "command documents/s | "
        "× Megatron per core |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in report["results"]:
        times = f"{one['times_megatron_per_core']:.0f}" if one["kind"] == "repeated" else "–"
        lines.append(
            f"| {one['kind']} | {one['workers']} | {one['text_bytes'] / 1e6:.0f} | {rate(one['bare_mb_s'])} | "
            f"{rate(one['tool_mb_s'])} | {one['share_of_bare']:.2f} | {share(one['share_of_bare_by_round'])} | "
            f"{rate(one['command_mb_s'])} | "
            f"{one['command_documents_s']:.0f} | {times} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all kinds of text at all numbers of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of wikitext2.jsonl and GPT-2's two files")
    parser.add_argument("--megabytes", type=int, default=200, help="least size of the input")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-dir", type=Path, default=_HERE.parent / "results")
    options = parser.parse_args()
    load_average = os.getloadavg()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in options.kinds:
            text = folder / f"{kind}.jsonl"
            write_text(options.data / "wikitext2.jsonl", kind, options.megabytes * 1_000_000, text)
            for workers in options.workers:
                results.append(measure(kind, workers, text, options, folder))
            text.unlink()
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": load_average,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("gigatoken", "numpy")},
        "rounds": options.rounds,
        "results": results,
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    target = options.output_dir / f"preprocess_cpu_{report['date']}"
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
