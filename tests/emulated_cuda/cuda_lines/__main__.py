"""Measure which of the lines that only CUDA devices execute run on the emulator.

    python -m tests.emulated_cuda.cuda_lines run       run all scenarios on emulated devices and on the CPU
    python -m tests.emulated_cuda.cuda_lines report    print the last run's figures, and the lines that do not run

A line is for CUDA only if a condition on the device, or a call of ``torch.cuda``, says so (see ``finding.py``), or if
a scenario executes it on emulated devices and no scenario does on the CPU. ``run`` takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.emulated_cuda.cuda_lines.argued import ARGUED, reason
from tests.emulated_cuda.cuda_lines.finding import SIMULATION, Found, all_found
from tests.emulated_cuda.scenarios.hits import all_statements, record
from tests.emulated_cuda.scenarios.listed import SCENARIOS
from tests.emulated_cuda.scenarios.running import STATEMENTS, Scenario, Servers

RESULTS = Path(__file__).with_name("results.json")


def measure(
    recorded: Path | None = None, recorded_on_cpu: Path | None = None, scenarios: Sequence[Scenario] = SCENARIOS
) -> dict[str, Any]:
    """Run the scenarios on emulated devices and on the CPU, and return the figures and what does not run.

    The files are those of `record`.
    """
    with Servers(observes=STATEMENTS) as servers:
        emulated = record(servers, scenarios, file=recorded)
    with Servers(emulated=False, observes=STATEMENTS) as servers:
        without_triton = [each for each in scenarios if not each.triton]
        on_cpu = record(servers, without_triton, may_fail=True, file=recorded_on_cpu)
    cpu_hits = on_cpu.hits()
    compared = {name for name, result in on_cpu.results.items() if not result.fault}
    seen_on_cuda_alone = emulated.hits(compared) - cpu_hits
    found = all_found()
    statements = [
        each
        for each in found
        if (each.is_cuda_only or each.number in seen_on_cuda_alone)
        and each.number not in cpu_hits
        and not each.path.startswith(SIMULATION)
    ]
    return summary(statements, emulated.hits())


def summary(statements: Sequence[Found], hits: set[int]) -> dict[str, Any]:
    """Return how many lines the statements have and how many of them run, and the statements that do not."""
    heads = all_statements()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    missing = []
    for each in statements:
        head = heads[each.number]
        lines = head.end_line - head.line + 1
        counts[each.path][0] += lines
        counts[each.path][1] += lines * (each.number in hits)
        if each.number not in hits:
            text = ast.unparse(each.node).splitlines()[0]
            missing.append({"path": each.path, "function": each.scope, "line": head.line, "lines": lines, "text": text})
    return {"files": {path: tuple(count) for path, count in sorted(counts.items())}, "missing": missing}


def key_of(row: Mapping[str, Any]) -> str:
    """Return the name of the function of a statement."""
    return f"{row['path']}:{row['function']}"


def unexplained(results: Mapping[str, Any]) -> list[str]:
    """Return the lines that do not run and have no reason, and reasons that no line needs."""
    keys = [key_of(row) for row in results["missing"]]
    found = [
        f"{row['path']}:{row['line']} does not run on the emulator, and has no reason: {row['text']}"
        for row, key in zip(results["missing"], keys)
        if reason(key) is None
    ]
    return found + [
        f"every line runs, but there is a reason why not: {start}"
        for start in ARGUED
        if not any(key.startswith(start) for key in keys)
    ]


def report(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    total, run = (sum(count[place] for count in results["files"].values()) for place in (0, 1))
    yield f"{run} of {total} lines for CUDA only run on the emulator ({run / max(total, 1):.1%})."
    yield ""
    yield "| file | lines | run |"
    yield "|---|---|---|"
    yield from (f"| {path} | {count[0]} | {count[1]} |" for path, count in results["files"].items())
    yield ""
    yield "| line | code | why it does not run |"
    yield "|---|---|---|"
    for row in results["missing"]:
        end = row["line"] + row["lines"] - 1
        place = f"{row['path']}:{row['line']}" + (f"-{end}" if end > row["line"] else "")
        yield f"| {place} | `{row['text'].replace('|', '/')}` | {reason(key_of(row)) or 'no reason'} |"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    for name, device in (("--recorded", "emulated devices"), ("--recorded-on-cpu", "the CPU")):
        parser.add_argument(name, type=Path, help=f"file that keeps what runs on {device}, for unchanged source")
    given = parser.parse_args()
    if given.action == "run":
        results = measure(given.recorded, given.recorded_on_cpu)
        given.results.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(given.results.read_text())
    print("\n".join(report(results)))
    faults = unexplained(results)
    print("\n".join(faults), file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
