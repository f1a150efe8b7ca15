"""Fit the planner's constants on measured runs, and tell how far its predictions are: of those runs, and of others.

    python benchmarks/planner/run.py --output benchmarks/results/planner_DATE

measured_runs.json holds runs that users of Megatron with transformer-engine measured. Five constants are fitted on the
rows that are scored: two of memory, three of time. Predictions with the committed constants, with constants that are
fitted anew, and of each model with constants that are fitted without it, stand beside each other. published_runs.json
and other_runs.json (of the form that tools/plan.py --evaluate reads) hold what other implementations' makers published;
nothing is fitted on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner.published import published_records
from megatron.planner.evaluation import EvaluatedRun, MeasuredRun, describe_errors, evaluate, read_runs
from megatron.planner.implementations import MEGATRON_TE, NATIVE, FittedTimes
from megatron.planner.prediction import HOPPER_MACHINES, Platform

HERE = Path(__file__).resolve().parent
_MIB = 2**20
_ROUNDS = 25
_PULL = 0.02
EXPECTED_MIB = (5000.0, 2000.0)
"""Where the fit of memory starts: nvidia-smi adds about 6,000 MiB to tensors, in half of the rows beside interleaved
stages. Rows of interleaved stages alone do not tell the two numbers apart; their difference then stays as it is here.
"""
_CLOSE = 0.01
"""Errors below this weigh as their squares, larger ones as their sizes: an odd row pulls no more than others."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write PREFIX.json and PREFIX.md", metavar="PREFIX")
    arguments = parser.parse_args()
    runs = read_runs(HERE / "measured_runs.json")
    lines, results = report(runs)
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        text = "\n".join(["# The planner beside measured runs", "", "```", *lines, "```", ""])
        arguments.output.with_suffix(".md").write_text(text)


def report(runs: Sequence[MeasuredRun]) -> tuple[list[str], dict[str, Any]]:
    """Return what is printed and what is written."""
    committed = predictions(runs, MEGATRON_TE.times, HOPPER_MACHINES)
    times, platform = fit(runs)
    lines = ["with the committed constants", *describe_errors(committed)]
    lines += ["", f"fitted anew: {_shown(times)}, {_shown(platform)}"]
    lines += describe_errors(predictions(runs, times, platform))
    lines += ["", "each model with constants that are fitted on the other models"]
    left_out: list[EvaluatedRun] = []
    for name in dict.fromkeys(run.model_name for run in runs):
        others = [run for run in runs if run.model_name != name]
        left_out += predictions([run for run in runs if run.model_name == name], *fit(others))
    lines += describe_errors(left_out)
    lines += ["", "each run, with the committed constants (error of memory, of time; left out: of memory, of time)"]
    without = {each.run.id: each for each in left_out}
    lines += [_row(each, without[each.run.id]) for each in committed if each.run.measured.outcome in ("ok", "oom")]
    peers = evaluate(published_records(HERE / "published_runs.json"))
    lines += ["", "published by other makers; nothing is fitted on them"]
    lines += [f"{each.run.id:16} {_percent(each.time_error):>8}  {each.prediction.reason or ''}" for each in peers]
    others = evaluate(read_runs(HERE / "other_runs.json"))
    lines += ["", "more that was published; nothing is fitted on them"]
    lines += [_told(each) for each in others]
    results = {
        "constants": {"times": dataclasses.asdict(times), "platform": dataclasses.asdict(platform)},
        "runs": [each.to_json() for each in committed],
        "left_out": [each.to_json() for each in left_out],
        "published": [each.to_json() for each in peers],
        "others": [each.to_json() for each in others],
    }
    return lines, results


def predictions(runs: Sequence[MeasuredRun], times: FittedTimes, platform: Platform) -> Sequence[EvaluatedRun]:
    """Predict runs with other constants than those of transformer-engine's profile."""
    fitted = [run for run in runs if run.fields.switch("flash_attention", default=True)]
    others = [run for run in runs if run not in fitted]
    profile = dataclasses.replace(MEGATRON_TE, times=times)
    return [*evaluate(fitted, profile, platform=platform), *evaluate(others, platform=platform)]


def fit(runs: Sequence[MeasuredRun]) -> tuple[FittedTimes, Platform]:
    """Return the constants under which the scored rows have the smallest errors."""
    scored = [run for run in runs if run.fields.switch("flash_attention", default=True)]
    in_time = [run for run in scored if run.measured.scores_time and run.measured.ms_per_iter]
    in_memory = [run for run in scored if run.measured.scores_memory and run.measured.memory_mib]
    names = [field.name for field in dataclasses.fields(FittedTimes)]

    def time_errors(values: np.ndarray) -> list[float]:
        times = FittedTimes(**dict(zip(names, values.tolist())))
        return [_log(each.time_error) for each in predictions(in_time, times, HOPPER_MACHINES)]

    def memory_errors(values: np.ndarray) -> list[float]:
        held, fragments = (int(value * _MIB) for value in values)
        platform = Platform(held_bytes=held, fragment_bytes=fragments)
        return [_log(each.memory_error) for each in predictions(in_memory, MEGATRON_TE.times, platform)]

    times = _least_errors(time_errors, np.array([getattr(NATIVE.times, name) for name in names]))
    held, fragments = _least_errors(memory_errors, np.array(EXPECTED_MIB)).tolist()
    platform = Platform(held_bytes=round(held) * _MIB, fragment_bytes=round(fragments) * _MIB)
    return FittedTimes(**{name: round(float(value), 3) for name, value in zip(names, times)}), platform


def _least_errors(errors_of: Callable[[np.ndarray], list[float]], start: np.ndarray) -> np.ndarray:
    """Return the values that make errors smallest, by reweighted Gauss-Newton steps of the values' logarithms."""
    values = start.copy()
    for _ in range(_ROUNDS):
        errors = np.array(errors_of(values))
        slopes = np.stack(
            [
                (np.array(errors_of(values * np.where(np.arange(len(values)) == i, 1.01, 1.0))) - errors)
                / math.log(1.01)
                for i in range(len(values))
            ],
            axis=1,
        )
        weights = np.sqrt(1 / np.maximum(np.abs(errors), _CLOSE))
        # What no row decides stays near where it started.
        slopes = np.vstack([slopes * weights[:, None], _PULL * np.eye(len(values))])
        missing = np.concatenate([-errors * weights, _PULL * np.log(start / values)])
        step = np.linalg.lstsq(slopes, missing, rcond=None)[0]
        values = values * np.exp(np.clip(step, -0.3, 0.3))
    return values


def _log(error: float | None) -> float:
    assert error is not None, "only scored rows are fitted"
    return math.log1p(error)


def _row(each: EvaluatedRun, left_out: EvaluatedRun) -> str:
    errors = "".join(
        f"{_percent(error):>9}"
        for error in (each.memory_error, each.time_error, left_out.memory_error, left_out.time_error)
    )
    outcome = {True: "", False: "WRONG", None: "(not scored)"}[each.is_outcome_right]
    measured = each.run.measured.outcome
    return f"{each.run.id:16}{each.run.model_name:14}{errors}   {measured} -> {each.prediction.outcome} {outcome}"


def _told(each: EvaluatedRun) -> str:
    notes = "; ".join(each.run.fields.values["notes"])
    return f"{each.run.id:28} {_percent(each.time_error):>8}  {each.prediction.reason or notes}".rstrip()


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}%"


def _shown(constants: FittedTimes | Platform) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(constants).items())


if __name__ == "__main__":
    main()
