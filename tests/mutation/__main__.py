"""Measure how many planted faults the tests find.

    python -m tests.mutation record FOLDER --seed N   draw mutants, and run all tests but the long ones to see which
                                                      of them execute the places of the mutants
    python -m tests.mutation run FOLDER --seed N      run these tests with each mutant
    python -m tests.mutation report FOLDER --seed N   print the results

``record`` takes about 15 minutes on two cores, ``run`` about half a minute per mutant. A ``run`` that is repeated takes
the results that are there. A test that also fails without the mutant does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

from tests.mutation.mutants import REPOSITORY, Mutant, draw
from tests.mutation.probes import with_probes

LIMIT_S = 600.0
"""The time that the tests of one mutant may take; a mutant that passes until then is not found."""
SHORTEST_HANG_S = 60.0
HANG_FACTOR = 20.0
"""A test hangs if it takes this many times what it took in the record, and at least `SHORTEST_HANG_S`."""
ALL_BUT_LONG = "not long and not gpu"
LEFT_OUT = ("tests/unit/repository", "tests/recipes")
"""Tests of the repository's rules and of patches to it, which fail in a copy without its history."""


@dataclass
class Record:
    """The tests that execute each mutant's place, and the seconds that each test took.

    ``places`` is the number of the mutants' places that a test executes, and ``order`` its number in the collection.
    """

    tests: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    places: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, num_mutants: int) -> Record:
        """Read what the test processes noted."""
        record = cls()
        for text in (folder / "seconds.jsonl").read_text().splitlines():
            test, seconds = json.loads(text)
            record.seconds[test] = seconds
        for path in folder.glob("*.hits"):
            names = json.loads(path.with_suffix(".tests").read_text())
            record.order |= {name: number for number, name in enumerate(names)}
            hits = path.read_bytes()[8:]
            of_file: dict[str, list[str]] = defaultdict(list)
            for test in names:
                if "::" in test:
                    of_file[test.partition("::")[0]].append(test)
            for number, name in enumerate(names):
                for place in range(num_mutants) if name and not name.startswith(LEFT_OUT) else ():
                    if hits[number * num_mutants + place]:
                        record.add(place, [name] if "::" in name else of_file[name])
        return record

    def add(self, place: int, tests: Iterable[str]) -> None:
        """Note that tests execute a mutant's place."""
        for test in set(tests) - self.tests[place]:
            self.tests[place].add(test)
            self.places[test] += 1

    def tests_of(self, place: int) -> list[str]:
        """Return the tests that execute a mutant's place, file by file.

        The files come first whose tests execute few of all mutants' places: these examine this place most closely.
        """
        files: dict[str, list[str]] = defaultdict(list)
        for test in self.tests[place]:
            files[test.partition("::")[0]].append(test)

        def breadth(file: str) -> float:
            return sum(self.places[test] for test in files[file]) / len(files[file])

        return [
            test
            for file in sorted(files, key=lambda file: (breadth(file), file))
            for test in sorted(files[file], key=self.order.__getitem__)
        ]

    def limits(self, tests: Sequence[str]) -> dict[str, float]:
        """Return the seconds after which each test hangs."""
        return {test: max(SHORTEST_HANG_S, HANG_FACTOR * self.seconds.get(test, 0.0)) for test in tests}


class Workplace:
    """A copy of the repository in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "build", ".mypy_cache", ".pytest_cache")
        shutil.copytree(REPOSITORY, folder, ignore=ignored, symlinks=True)
        self.folder = folder
        self._number_of_writes = 0

    def write(self, path: str, text: str) -> None:
        """Write a source file with a time of change that no compiled file has."""
        file = self.folder / path
        file.write_text(text, encoding="utf-8")
        self._number_of_writes += 1
        changed_at = 1_000_000_000 + self._number_of_writes
        os.utime(file, (changed_at, changed_at))

    def failing_test(self, tests: Mapping[str, float], limit_s: float) -> str | None:
        """Run tests, each with its limit, until the first failure; return it, and None if all pass or the time ends."""
        if not tests:
            return None
        with tempfile.TemporaryDirectory() as folder:
            listed = Path(folder) / "tests.json"
            listed.write_text(json.dumps(dict(tests)))
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.mutation.listed_tests"]
            command += ["-p", "no:cacheprovider", "-o", f"addopts=--import-mode=importlib --basetemp={folder}/t"]
            environment = os.environ | {
                "MUTATION_TESTS": str(listed),
                "PYTHONPATH": str(self.folder),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": folder,
            }
            process = subprocess.Popen(
                [*command, "-m", ALL_BUT_LONG, *files],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None
        if process.returncode == 0:
            return None
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failures[0].split(" - ")[0] if failures else f"pytest ended with status {process.returncode}"


def record_places(folder: Path, mutants: Sequence[Mutant]) -> int:
    """Run all tests but the long ones in a copy with a probe at each mutant's place; return pytest's exit status."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        workplace = Workplace(Path(temporary) / "copy")
        for path in sorted({mutant.path for mutant in mutants}):
            its_own = [(number, mutant) for number, mutant in enumerate(mutants) if mutant.path == path]
            workplace.write(path, with_probes((REPOSITORY / path).read_text(encoding="utf-8"), its_own))
        environment = os.environ | {
            "MUTATION_RECORD": str(folder.resolve()),
            "MUTATION_PLACES": str(len(mutants)),
            "PYTHONPATH": os.pathsep.join((str(workplace.folder / "tests/mutation/hook"), str(workplace.folder))),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.hits", "-m", ALL_BUT_LONG]
        command += ["--numprocesses", "3", "--dist", "loadfile", *(f"--ignore={folder}" for folder in LEFT_OUT)]
        return subprocess.run(command, cwd=workplace.folder, env=environment, check=False).returncode


def default_tests() -> set[str]:
    """Return the names of the tests that run by default."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return {line for line in listed.splitlines() if "::" in line}


def run_mutants(mutants: Sequence[Mutant], record: Record, default: set[str], results: Path, jobs: int) -> None:
    """Test each mutant that has no result yet, and append its result."""
    done = {json.loads(line)["mutant"] for line in results.read_text().splitlines()} if results.exists() else set()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        free: Queue[Workplace] = Queue()
        for number in range(jobs):
            free.put(Workplace(Path(folder) / str(number)))

        def examine(place: int) -> None:
            mutant = mutants[place]
            workplace = free.get()
            try:
                result = _examine(mutant, record, place, default, workplace)
            finally:
                free.put(workplace)
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['found_by_default'] or result['found_by_full'] or 'SURVIVES'}  {mutant}", flush=True)

        list(pool.map(examine, [place for place, mutant in enumerate(mutants) if str(mutant) not in done]))


def _examine(mutant: Mutant, record: Record, place: int, default: set[str], workplace: Workplace) -> dict[str, object]:
    """Return which test of the default set, and if none which further test, fails with this mutant."""
    tests = record.tests_of(place)
    start = time.monotonic()
    first = _find(mutant, record.limits([test for test in tests if test in default]), workplace)
    further = None
    if first is None:
        further = _find(mutant, record.limits([test for test in tests if test not in default]), workplace)
    return {
        "mutant": str(mutant),
        "tests": len(tests),
        "default_tests": sum(test in default for test in tests),
        "found_by_default": first,
        "found_by_full": first or further,
        "seconds": round(time.monotonic() - start, 1),
    }


def _find(mutant: Mutant, limits: dict[str, float], workplace: Workplace) -> str | None:
    """Return the first test that fails with the mutant and passes without it."""
    source = (REPOSITORY / mutant.path).read_text(encoding="utf-8")
    left = dict(limits)
    while left:
        workplace.write(mutant.path, mutant.apply(source))
        try:
            found = workplace.failing_test(left, LIMIT_S)
        finally:
            workplace.write(mutant.path, source)
        if found is None:
            return None
        # The tests of the file before it may matter; an error of the collection names the file.
        name = found.partition(" ")[2]
        file = name.partition("::")[0]
        of_file = [test for test in left if test.startswith(file)]
        again = of_file[: of_file.index(name) + 1] if name in of_file else of_file
        if not again or workplace.failing_test({test: left[test] for test in again}, LIMIT_S) is None:
            return found
        for test in again:
            del left[test]
    return None


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (E. B. Wilson, JASA 22, 1927)."""
    if not trials:
        return 0.0, 1.0
    z, share = 1.959964, successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (middle - half) / (1 + z * z / trials), (middle + half) / (1 + z * z / trials)


def report(results: Path) -> Iterator[str]:
    """Yield the lines of the report."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    full = [row for row in rows if row["found_by_full"]]
    default = [row for row in rows if row["found_by_default"]]
    for name, found, trials in (("full of all", full, len(rows)), ("default of full", default, len(full))):
        low, high = interval(len(found), trials)
        yield f"{name}: {len(found)} of {trials}, {len(found) / max(trials, 1):.1%} ({low:.1%} to {high:.1%})"
    for row in rows:
        if not row["found_by_default"]:
            fate = f"found by {row['found_by_full']}" if row["found_by_full"] else "survives"
            yield f"{row['mutant']}: {fate} ({row['tests']} tests execute it)"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "run", "report"))
    parser.add_argument("folder", type=Path, help="where the records and the results are; one per seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150, help="number of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants that are tested at the same time")
    given = parser.parse_args()
    results = given.folder / "results.jsonl"
    mutants = draw(given.seed, given.count)
    if given.action == "record":
        return record_places(given.folder, mutants)
    if given.action == "run":
        run_mutants(mutants, Record.read(given.folder, len(mutants)), default_tests(), results, given.jobs)
    print("\n".join(report(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
