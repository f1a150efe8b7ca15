"""Remove each synchronization of the project, one at a time, and see whether the emulator of CUDA reports it.

    python -m tests.emulated_cuda.synchronizations list      print every call, and those that are listed apart
    python -m tests.emulated_cuda.synchronizations run       remove each of the others, and write the results
    python -m tests.emulated_cuda.synchronizations report    print the results as a table

``run`` first runs all scenarios to see which of them execute each call. Then it runs those, the quickest first, without
the call. It takes about an hour on two cores. With ``--only`` it examines the calls whose names match, and keeps the
other results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.emulated_cuda.scenarios.hits import record
from tests.emulated_cuda.scenarios.listed import SCENARIOS
from tests.emulated_cuda.scenarios.running import CALLS, Result, Scenario, Servers, difference
from tests.emulated_cuda.synchronizations.calls import Call, all_calls, removable_calls
from tests.emulated_cuda.synchronizations.known import NOT_REPORTED, apart

RESULTS = Path(__file__).with_name("results.jsonl")


def examine(
    call: Call, servers: Servers, scenarios: Sequence[Scenario], expected: Mapping[str, Result]
) -> dict[str, object]:
    """Remove one call, and return which of the scenarios shows it first and what it says.

    That the host waits less often than before, or that memory is freed later, proves no wait necessary.
    ``expected`` are the results of the unchanged program, by the scenarios' names.
    """
    number = [each.key for each in removable_calls()].index(call.key)
    for scenario in scenarios:
        result = servers.of(scenario).run(scenario, removed=number)
        shown = difference(result, expected[scenario.name], counts_costs=False)
        if shown and not result.fault:
            other = difference(servers.of(scenario).run(scenario), expected[scenario.name])
            assert not other, f"scenario {scenario.name!r} differs from run to run: {other}"
        if shown:
            return {"call": call.key, "scenarios": len(scenarios), "scenario": scenario.name, "report": shown}
    return {"call": call.key, "scenarios": len(scenarios), "scenario": None, "report": None}


def run(
    path: Path, only: str = "", recorded: Path | None = None, scenarios: Sequence[Scenario] = SCENARIOS
) -> list[dict[str, object]]:
    """Examine the calls whose names match, and write the results of all calls to a file.

    ``recorded`` is the file of `record`.
    """
    calls = removable_calls()
    chosen = [call for call in calls if re.search(only, call.key)]
    rows: list[dict[str, object]] = []
    known = {row["call"]: row for row in read(path)} if only else {}
    named = {scenario.name: scenario for scenario in scenarios}
    with Servers(observes=CALLS) as servers:
        recording = record(servers, scenarios, file=recorded)
        for call in chosen:
            executing = [named[name] for name in recording.executing(calls.index(call)) if name in named]
            row = examine(call, servers, executing, recording.results)
            known[call.key] = row
            print(f"{row['scenario'] or 'NOT REPORTED'} | {call.key} | {row['report']}", flush=True)
            rows = [known[call.key] for call in calls if call.key in known]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def read(path: Path = RESULTS) -> list[dict[str, object]]:
    """Return the results in a file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def unexplained(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the calls that were neither reported nor have a reason, and reasons that are out of date."""
    reported = {str(row["call"]) for row in rows if row["scenario"]}
    calls = {call.key for call in removable_calls()}
    found = [f"not reported, and without a reason: {key}" for key in sorted(calls - reported - NOT_REPORTED.keys())]
    found += [f"reported, but listed with a reason: {key}" for key in sorted(NOT_REPORTED.keys() & reported)]
    found += [f"listed, but there is no such call: {key}" for key in sorted(NOT_REPORTED.keys() - calls)]
    return found


def table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield the lines of the report."""
    reported = sum(bool(row["scenario"]) for row in rows)
    yield f"{reported} of {len(rows)} removals are reported."
    yield ""
    yield "| call | scenario | report |"
    yield "|---|---|---|"
    for row in rows:
        reason = NOT_REPORTED.get(str(row["call"]), "no reason")
        text = row["report"] or f"not reported: {reason}"
        yield f"| `{row['call']}` | {row['scenario'] or ''} | {str(text).replace('|', '/')} |"


def listed() -> Iterator[str]:
    """Yield a line for each call."""
    for call in all_calls():
        known = apart(call.key)
        yield f"{call.path}:{call.line}: {call.text}" + ("" if known is None else f" ({known[0]}: {known[1]})")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "run", "report"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--only", default="", help="regular expression of the names of the calls to examine")
    parser.add_argument("--scenarios", default="", help="regular expression of the names of the scenarios to run")
    parser.add_argument("--recorded", type=Path, help="file that keeps what scenarios execute, for unchanged source")
    given = parser.parse_args()
    if given.action == "list":
        print("\n".join(listed()))
        return 0
    scenarios = [scenario for scenario in SCENARIOS if re.search(given.scenarios, scenario.name)]
    if given.action == "run":
        rows = run(given.results, given.only, given.recorded, scenarios)
    else:
        rows = read(given.results)
    print("\n".join(table(rows)))
    faults = unexplained(rows)
    print("\n".join(faults), file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
