"""Compare hybrid models with a dense one on the quickstart's text: validation loss at equal parameters, and step time.

    python benchmarks/hybrid_on_text.py --runs FOLDER --output benchmarks/results/hybrid_on_text

The dense model is the quickstart's. In the hybrid ones three of four attention layers are gated delta-net layers, or
Mamba-2 layers; their feed-forward is narrower, so that all have nearly the same number of parameters. Losses are of
the whole validation set at the end of a run. Steps of 1,024 positions are timed with one thread, alternately.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.muon_on_text import MODEL, prepare_text, run_script

_DELTA_NET = """
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --ffn-hidden-size 308
    --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32
"""
_MAMBA = """
    --num-layers 8 --hybrid-override-pattern M-M-M-*- --ffn-hidden-size 258
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-state-dim 32 --mamba-num-groups 1
"""
_MODELS = {"dense": "", "gated delta-net, 3 of 4 layers": _DELTA_NET, "Mamba-2, 3 of 4 layers": _MAMBA}
_RATES = (4e-3, 8e-3)
_TIMED = """
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 2 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --train-iters 12 --lr 1e-3
"""


def _train(folder: Path, name: str, words: Sequence[str | Path]) -> list[dict[str, object]]:
    """Return the lines of a run's metrics file; a run whose metrics are in the folder is not made again."""
    metrics = folder / f"{name}.jsonl"
    if not metrics.exists():
        part = metrics.with_suffix(".part")
        part.unlink(missing_ok=True)
        output = run_script(["pretrain_gpt.py", *MODEL.split(), *words, "--metrics-jsonl", part, "--log-interval", "1"])
        metrics.with_suffix(".log").write_text(output, encoding="utf-8")
        part.rename(metrics)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def _loss(folder: Path, name: str, flags: str, data: Sequence[str | Path], rate: float, iterations: int) -> float:
    size = ["--micro-batch-size", "16", "--global-batch-size", "16", "--train-iters", str(iterations)]
    lines = _train(
        folder,
        f"{name.split(',')[0]}-{rate:g}-{iterations}",
        [*flags.split(), *data, *size, "--lr", str(rate), "--min-lr", str(rate / 10)],
    )
    return [float(str(line["lm_loss"])) for line in lines if line.get("split") == "validation"][-1]


def _step_ms(folder: Path, name: str, flags: str, number: int) -> float:
    lines = _train(folder, f"{name.split(',')[0]}-step-{number}", [*flags.split(), *_TIMED.split()])
    times = [float(str(line["step_time_s"])) * 1e3 for line in lines if "step_time_s" in line]
    return statistics.median(times[2:])


def main(argv: Sequence[str] | None = None) -> None:
    """Train all models, time their steps, and write and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where text and metrics are kept")
    parser.add_argument("--iterations", type=int, default=400, metavar="N", help="iterations of a run (400)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="alternating rounds of timed steps (3)")
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md (print only)")
    arguments = parser.parse_args(argv)
    folder = arguments.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare_text(folder)
    losses = {
        name: {rate: _loss(folder, name, flags, data, rate, arguments.iterations) for rate in _RATES}
        for name, flags in _MODELS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in _MODELS}
    for number in range(arguments.rounds):
        for name, flags in _MODELS.items():
            times[name].append(_step_ms(folder, name, flags, number))
    table = _table(folder, losses, times, arguments.iterations)
    print(table)
    if arguments.output is not None:
        setting = {"model": " ".join(MODEL.split()), "torch": torch.__version__, "machine": describe_machine()}
        report = json.dumps({"setting": setting, "losses": losses, "step_ms": times}, indent=1)
        arguments.output.with_suffix(".json").write_text(report + "\n", encoding="utf-8")
        arguments.output.with_suffix(".md").write_text(table, encoding="utf-8")


def _table(folder: Path, losses: dict[str, dict[float, float]], times: dict[str, list[float]], iterations: int) -> str:
    best, step = min(losses["dense"].values()), statistics.median(times["dense"])
    rates = " | ".join(f"loss, rate {rate:g}" for rate in _RATES)
    rows = [
        f"The quickstart's text, {iterations} iterations of 16 x 128 tokens, losses of the whole validation set.",
        f"Steps of 2 x 1,024 positions, one thread, medians [smallest–largest] of rounds, {describe_machine()}.",
        "",
        f"| model | parameters | {rates} | best ÷ dense | step, ms | step ÷ dense |",
        "|---" * (5 + len(_RATES)) + "|",
    ]
    for name, of_rates in losses.items():
        log = (folder / f"{name.split(',')[0]}-{_RATES[0]:g}-{iterations}.log").read_text(encoding="utf-8")
        found = re.search(r"number of parameters[^:]*:\s*([0-9,]+)", log)
        values = " | ".join(f"{loss:.4f}" for loss in of_rates.values())
        middle = statistics.median(times[name])
        spread = f"{middle:.0f} [{min(times[name]):.0f}–{max(times[name]):.0f}]"
        ratio = min(of_rates.values()) / best
        number = "" if found is None else found[1]
        rows.append(f"| {name} | {number} | {values} | {ratio:.3f} | {spread} | {middle / step:.2f} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
