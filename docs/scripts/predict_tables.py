"""Print the predictions on the pages about parallelism and memory; with --check, compare them with the pages.

python docs/scripts/predict_tables.py [--check]

The rows of the tables are predicted as ``megatron explain`` predicts their flags. The pages are
docs/choosing_parallelism.md and docs/out_of_memory.md. A page's table may have a further column, with notes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.explain import build_parser
from megatron.cli.planner_arguments import find_platform, read_planned_run
from megatron.planner import NATIVE, explain, trace_in_this_process

DOCS = Path(__file__).resolve().parents[1]
TP, PP, CP, EP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context", "expert-model"))
SP = "--sequence-parallel"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
ZERO_1 = "--use-distributed-optimizer"
SHARDING = "--data-parallel-sharding-strategy"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"
ALL_LAYERS = f"{FULL} uniform --recompute-num-layers 1"

LAYOUTS = {
    "--model-preset llama3.1-8b --seq-length 8192 --global-batch-size 128 --world-size 8": {
        "DP 8": "",
        "DP 8, ZeRO-2": f"{SHARDING} optim_grads",
        "DP 8, FSDP": f"{SHARDING} optim_grads_params",
        "DP 8, full recomputation": ALL_LAYERS,
        "PP 2, DP 4": f"{PP} 2",
        "PP 4, DP 2": f"{PP} 4",
        "PP 4, DP 2, 2 virtual stages": f"{PP} 4 {VIRTUAL} 2",
        "TP 2, DP 4": f"{TP} 2 {SP}",
        "TP 4, DP 2": f"{TP} 4 {SP}",
        "TP 8": f"{TP} 8 {SP}",
        "CP 2, DP 4": f"{CP} 2",
        "CP 4, DP 2": f"{CP} 4",
    },
    "--model-preset llama3.1-70b --seq-length 8192 --global-batch-size 256 --world-size 64": {
        "TP 4, PP 4, CP 2, DP 2, 10 virtual stages (best)": f"{TP} 4 {SP} {PP} 4 {CP} 2 {VIRTUAL} 10",
        "TP 4, PP 4, CP 2, DP 2, 2 virtual stages": f"{TP} 4 {SP} {PP} 4 {CP} 2 {VIRTUAL} 2",
        "FSDP over 64 GPUs, full recomputation": f"{SHARDING} optim_grads_params {ALL_LAYERS}",
        "TP 8, PP 4, DP 2, 5 virtual stages": f"{TP} 8 {SP} {PP} 4 {VIRTUAL} 5",
        "TP 4, PP 8, DP 2, 5 virtual stages": f"{TP} 4 {SP} {PP} 8 {VIRTUAL} 5",
        "TP 8, DP 8": f"{TP} 8 {SP}",
    },
    "--model-preset mixtral-8x7b --seq-length 4096 --global-batch-size 256 --world-size 64": {
        "PP 2, EP 8, DP 32, 8 virtual stages (best)": f"{PP} 2 {EP} 8 {VIRTUAL} 8",
        "PP 2, EP 8, DP 32, 1F1B": f"{PP} 2 {EP} 8",
        "PP 4, EP 4, DP 16, 4 virtual stages": f"{PP} 4 {EP} 4 {VIRTUAL} 4",
        "TP 8 (experts sharded by TP), DP 8": f"{TP} 8 {SP}",
        "EP 8, DP 64": f"{EP} 8",
    },
    "--model-preset llama3.1-8b --seq-length 131072 --global-batch-size 8 --world-size 64": {
        "TP 8, DP 8": f"{TP} 8 {SP}",
        "TP 4, CP 8, DP 2": f"{TP} 4 {SP} {CP} 8",
        "TP 4, CP 16": f"{TP} 4 {SP} {CP} 16",
    },
}
"""The runs of choosing_parallelism.md, and the name and the flags of each layout."""
OF_LAYOUTS = (
    f"--bf16 --micro-batch-size 1 --lr 3e-4 --mock-data --gpu h100-80gb {ZERO_1} --overlap-grad-reduce "
    "--overlap-param-gather"
)


@dataclass(frozen=True)
class Change:
    """Flags that change the memory of a run, and further flags of the run.

    ``also`` are flags of the run with and without the change, ``before`` those of the run without it. ``time`` is
    written instead of the change of the step time, if the planner does not predict that.
    """

    flags: str
    also: str = f"--bf16 {ZERO_1} --micro-batch-size 1"
    before: str = ""
    time: str = ""


CHANGES = (
    Change("--bf16", f"{ZERO_1} --micro-batch-size 1 {TP} 2 {SP}"),
    Change(ZERO_1, "--bf16 --micro-batch-size 1"),
    Change("--micro-batch-size 1", f"--bf16 {ZERO_1}", "--micro-batch-size 2"),
    Change(SP, f"--bf16 {ZERO_1} --micro-batch-size 1 {TP} 2"),
    Change(f"{SELECTIVE} layernorm"),
    Change("--grad-reduce-in-bf16"),
    Change(f"{TP} 2 {SP}"),
    Change(f"{SHARDING} optim_grads"),
    Change(f"{SHARDING} optim_grads_params"),
    Change(f"{CP} 2"),
    Change(f"{PP} 2"),
    Change(f"{SELECTIVE} layernorm mlp"),
    Change(f"{FULL} block --recompute-num-layers 16"),
    Change(ALL_LAYERS),
    Change("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", time="not predicted"),
    Change("--optimizer-cpu-offload", time="optimizer step on the host not included"),
    Change("--cpu-offloading --cpu-offloading-num-layers 8"),
)
"""The rows of out_of_memory.md."""
OF_CHANGES = "--model-preset llama3.1-8b --seq-length 8192 --global-batch-size 64 --mock-data --world-size 8 --gpu h200"


@dataclass(frozen=True)
class Predicted:
    """Memory of the GPU that needs the most, and step time and throughput, which are 0 for a run that does not fit."""

    mib: float
    seconds: float
    tokens_per_second: float


def predict(flags: str) -> Predicted:
    """Predict the run with these flags of ``megatron explain``.

    Raises:
        ConfigurationError: the flags are invalid.
    """
    arguments, words = build_parser(1).parse_known_args(flags.split())
    parsed = read_planned_run(words, arguments.world_size)
    explanation = explain(parsed.config, parsed.notes, find_platform(arguments.gpu), NATIVE)
    prediction = explanation.prediction
    assert prediction.used_bytes is not None
    seconds = 0.0 if prediction.time is None else prediction.time.total
    return Predicted(prediction.used_bytes / 2**20, seconds, explanation.tokens_per_second or 0.0)


def layout_table(run: str) -> Iterator[str]:
    """Yield the lines of the table of one run's layouts."""
    yield "| layout | memory, MiB | ms per step | tokens/s |"
    yield "|---|---:|---:|---:|"
    for name, flags in LAYOUTS[run].items():
        found = predict(f"{run} {OF_LAYOUTS} {flags}")
        time = f"{1000 * found.seconds:,.0f} | {found.tokens_per_second:,.0f}" if found.seconds else "out of memory |"
        yield f"| {name} | {int(found.mib):,} | {time} |"


def change_table() -> Iterator[str]:
    """Yield the lines of the table of changes, without the notes."""
    yield "| change | memory | step time |"
    yield "|---|---:|---:|"
    for change in CHANGES:
        after = predict(f"{OF_CHANGES} {change.also} {change.flags}")
        before = predict(f"{OF_CHANGES} {change.also} {change.before}")
        time = change.time
        if not time and after.seconds and before.seconds:
            time = f"{100 * (after.seconds / before.seconds - 1):+.1f} %"
        yield f"| `{change.flags}` | {(after.mib - before.mib) / 1024:+.1f} GiB | {time} |".replace("|  |", "| |")


def differences(page: str, tables: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a message for each table that differs from the table at its place on the page."""
    blocks = [block.splitlines() for block in (DOCS / page).read_text(encoding="utf-8").split("\n\n")]
    shown = [block for block in blocks if block[:1] and block[0].startswith(tables[0][0])]
    if len(shown) != len(tables):
        yield f"{page}: {len(shown)} tables begin with {tables[0][0]}, but {len(tables)} are predicted"
    for table, block in zip(tables, shown):
        for number, row in enumerate(table):
            if number >= len(block) or not block[number].startswith(row):
                yield f"{page}: {block[number] if number < len(block) else 'a row is missing'}; predicted: {row}"
        if len(block) > len(table):
            yield f"{page}: {block[len(table)]}; the script has no such row"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or compare them with the pages, and return the exit status: 1 if a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the tables with the pages and print nothing else")
    is_check = parser.parse_args(argv).check
    trace_in_this_process()
    tables = {"choosing_parallelism.md": [list(layout_table(run)) for run in LAYOUTS]}
    tables["out_of_memory.md"] = [list(change_table())]
    if is_check:
        different = [line for page, of_page in tables.items() for line in differences(page, of_page)]
        print("".join(f"{line}\n" for line in different), end="", file=sys.stderr)
        return 1 if different else 0
    print("\n\n".join("\n".join(table) for of_page in tables.values() for table in of_page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
