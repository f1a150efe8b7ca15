"""Measure the training step: this project against itself and, where it is there, megatron-core.

In each round the contestants are fresh processes that run in turns of some seconds, while all others are stopped: A B C
A B C ... Medians over all measured steps are printed with their quartiles, and written as JSON and Markdown under
benchmarks/results. Steps in which a contestant was stopped are not counted.

    python benchmarks/step/run.py --reference-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import markdown, steps_of, summarize
from turns import start_stopped, take_turns
from workload import Workload, add_workload_arguments, workload_of, workload_options

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_OURS, _REFERENCE, _FLOOR = "ours.py", "megatron_core_reference.py", "floor.py"


@dataclass(frozen=True)
class Contestant:
    """Name one thing to measure: whose code, on which workload, by how many processes of how many threads."""

    name: str
    workload: Workload
    script: str
    threads: int
    copies: int = 1
    """Number of independent runs at the same time."""

    @property
    def num_processes(self) -> int:
        """Return the number of processes of one run."""
        return self.workload.tensor_model_parallel_size

    @property
    def is_reference(self) -> bool:
        """Return whether megatron-core is measured."""
        return self.script == _REFERENCE

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens one step of all runs trains on."""
        return self.workload.tokens_per_step * self.copies


def contestants(base: Workload, dtypes: list[str], threads: int) -> list[Contestant]:
    """Return all contestants, in the order in which each round runs them."""
    result = []
    for dtype in dtypes if base.num_experts else ():
        few = replace(base, dtype=dtype)
        dense = replace(few, num_experts=0)
        result.append(Contestant(f"ours {dtype}, dense of the same active parameters", dense, _OURS, threads))
        result.append(Contestant(f"ours {dtype}, experts", few, _OURS, threads))
        result.append(
            Contestant(f"megatron-core {dtype}, experts (SequentialMLP), fused AdamW", few, _REFERENCE, threads)
        )
    for dtype in () if base.num_experts else dtypes:
        one = replace(base, dtype=dtype)
        two = replace(one, tensor_model_parallel_size=2)
        result.append(Contestant(f"ours {dtype}", one, _OURS, threads))
        if base.is_gated:  # In GPT-2's layers there is nothing to compile on a CPU.
            result.append(Contestant(f"ours {dtype}, --compile", replace(one, is_compiled=True), _OURS, threads))
        result.append(Contestant(f"megatron-core {dtype}", replace(one, fused_adam=False), _REFERENCE, threads))
        result.append(Contestant(f"megatron-core {dtype}, fused AdamW", one, _REFERENCE, threads))
        result.append(Contestant(f"floor {dtype}: GEMMs, attention and update alone", one, _FLOOR, threads))
        result.append(Contestant(f"ours {dtype}, two independent processes", one, _OURS, 1, copies=2))
        sequence_parallel = replace(two, sequence_parallel=True)
        result.append(Contestant(f"ours {dtype}, TP 2", two, _OURS, 1))
        result.append(Contestant(f"ours {dtype}, TP 2, sequence parallel", sequence_parallel, _OURS, 1))
        result.append(Contestant(f"megatron-core {dtype}, TP 2, fused AdamW", two, _REFERENCE, 1))
    return result


def start(contestant: Contestant, options: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the stopped processes of all runs of a contestant, which print to files next to their results."""
    python = str(options.reference_python) if contestant.is_reference else sys.executable
    command = [python, str(_HERE / contestant.script), *workload_options(contestant.workload)]
    command += ["--num-warmup", str(options.num_warmup), "--num-steps", str(options.num_steps)]
    if contestant.is_reference:
        command += ["--initial-weights", str(folder / "weights.npz")]
    processes = []
    for output in outputs_of(contestant, folder):
        output.parent.mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(contestant.threads)}
        if contestant.num_processes > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(contestant.num_processes)
        for rank in range(contestant.num_processes):
            if contestant.num_processes > 1:
                environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with output.with_suffix(f".{rank}.txt").open("wb") as printed:
                processes.append(
                    start_stopped(
                        [*command, "--output", str(output)], env=environment, stdout=printed, stderr=subprocess.STDOUT
                    )
                )
    return processes


def outputs_of(contestant: Contestant, folder: Path) -> list[Path]:
    """Return where the runs of a contestant write, each process with a suffix."""
    return [folder / re.sub(r"\W+", "-", contestant.name) / f"run-{copy}" for copy in range(contestant.copies)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(several: list[Contestant], options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run some contestants once, in turns, and return what each of their processes measured, by contestant."""
    try:
        take_turns([start(contestant, options, folder) for contestant in several], options.turn)
    except subprocess.CalledProcessError as error:
        printed = [path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob("*/*.txt"))]
        raise SystemExit("\n".join([f"a contestant failed with status {error.returncode}:", *printed])) from None
    return {
        contestant.name: [
            json.loads(output.with_suffix(f".{rank}.json").read_text())
            for output in outputs_of(contestant, folder)
            for rank in range(contestant.num_processes)
        ]
        for contestant in several
    }


def write_initial_weights(workload: Workload, path: Path) -> None:
    """Save the weights that all contestants start from, as one process makes them in float32."""
    whole = replace(workload, dtype="float32", tensor_model_parallel_size=1, sequence_parallel=False)
    command = [sys.executable, str(_HERE / "ours.py"), *workload_options(whole)]
    subprocess.run([*command, "--write-initial-weights", str(path)], check=True, stdout=subprocess.DEVNULL)


def describe(run: list[dict[str, Any]]) -> str:
    """Return a line about one run."""
    steps = [f"{step['wall_s']:.2f} s (others {step['others']:.0%})" for step in steps_of([run])]
    losses = run[0]["losses"]
    return ", ".join(steps) + (f"; final loss {losses[-1]:.6f}" if losses else "")


def describe_machine() -> dict[str, str]:
    """Return what of the machine the numbers depend on."""
    fields: dict[str, str] = {}
    for line in subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    names = ("Model name", "CPU family", "Model", "CPU(s)", "L2 cache", "L3 cache")
    described = {name: fields[name] for name in names if name in fields}
    commit = subprocess.run(["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {**described, "kernel": platform.release().partition("-")[0], "commit": commit.stdout.strip()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--reference-python", type=Path, help="python of an environment with megatron-core")
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--turn", type=float, default=15.0, metavar="SECONDS", help="how long a contestant runs")
    parser.add_argument("--threads", type=int, default=2, help="threads of a contestant of one process")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="run the contestants whose names this regular expression finds")
    parser.add_argument(
        "--max-others", type=float, default=0.5, help="count steps during which other work took at most this share"
    )
    parser.add_argument("--hardware", default="cpu", help="word for the hardware in the names of the result files")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    everyone = contestants(workload_of(options), options.dtypes, options.threads)
    selected = [contestant for contestant in everyone if re.search(options.only, contestant.name)]
    if options.reference_python is None:
        print("SKIPPED: megatron-core, for --reference-python was not given")
        selected = [contestant for contestant in selected if not contestant.is_reference]

    runs: dict[str, list[list[dict[str, Any]]]] = {contestant.name: [] for contestant in selected}
    loads = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A dense model among models of experts is not the reference's, and draws its own weights.
        write_initial_weights(selected[-1].workload, folder / "weights.npz")
        for number in range(options.num_rounds):
            loads.append(os.getloadavg()[0])
            for contestant, of_contestant in measure(selected, options, folder).items():
                runs[contestant].append(of_contestant)
                print(f"round {number + 1}, {contestant}: {describe(of_contestant)}", flush=True)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result = {
        "date": today,
        "machine": describe_machine(),
        "max_others": options.max_others,
        "load_average": {"min": min(loads), "max": max(loads)},
        "rounds": options.num_rounds,
        "turn_s": options.turn,
        "warmup_steps": options.num_warmup,
        "measured_steps": options.num_steps,
        "contestants": [
            {
                "name": contestant.name,
                "threads_per_process": contestant.threads,
                "workload": vars(contestant.workload),
                **summarize(contestant.tokens_per_step, runs[contestant.name], options.max_others),
            }
            for contestant in selected
        ],
    }
    options.results.mkdir(parents=True, exist_ok=True)
    kind = "experts_step" if options.num_experts else "step"
    stem = options.results / f"{kind}_{options.hardware}_{today}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
