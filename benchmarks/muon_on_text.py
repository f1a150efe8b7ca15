"""Compare Muon with AdamW on the quickstart's model and text: a sweep of rates each, seeds, and iterations to a loss.

    python benchmarks/muon_on_text.py --runs FOLDER --output benchmarks/results/muon_on_text

Both optimizers are tried at as many learning rates with the first seed. With the best of them each is trained with all
seeds, and Muon also on schedules of 40 to 85 % of the iterations. A run whose metrics are in FOLDER is not made
again. Losses are of the whole validation set, at the end of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine

_REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = """
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --seq-length 128 --max-position-embeddings 128 --init-method-std 0.05 --distributed-backend gloo
    --split 90,5,5
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --hidden-dropout 0 --attention-dropout 0 --log-interval 100
    --eval-iters 1 --full-validation --eval-interval 1000000
"""
_RULES = {
    "adam": (),
    "muon": ("--optimizer", "muon", "--muon-nesterov", "--muon-extra-scale-factor", "0.2"),
}
_RATES = {"adam": (2e-3, 4e-3, 8e-3, 16e-3), "muon": (4e-3, 8e-3, 16e-3, 32e-3)}
_SHARES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
"""Lengths of Muon's schedules as shares of AdamW's."""


@dataclass(frozen=True)
class Plan:
    """Hold what one run is."""

    rule: str
    rate: float
    seed: int
    iterations: int
    batch_size: int

    @property
    def name(self) -> str:
        """Return the run's name in the folder."""
        return f"{self.rule}-{self.rate:g}-{self.seed}-{self.iterations}x{self.batch_size}"


@dataclass(frozen=True)
class Trained:
    """Hold a run's validation loss at its end."""

    plan: Plan
    loss: float


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where text and metrics are kept")
    parser.add_argument("--iterations", type=int, default=400, metavar="N", help="iterations of a run (400)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1234, 1235, 1236], metavar="N", help="(1234 1235 1236)"
    )
    for rule, rates in _RATES.items():
        parser.add_argument(f"--{rule}-rates", type=float, nargs="+", default=rates, metavar="X", help="of the sweep")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="samples of an iteration (16)")
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md (print only)")
    return parser


def run_script(words: Sequence[str | Path]) -> str:
    """Run a script of the repository with one CPU thread, and return what it printed."""
    environment = dict(os.environ) | {"MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"status {done.returncode} from: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def prepare_text(folder: Path) -> tuple[str | Path, ...]:
    """Make the quickstart's tokens where they are not there; return the flags that name them."""
    tokenizer: tuple[str | Path, ...] = ("--tokenizer-type", "GPT2BPETokenizer")
    tokenizer += ("--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt")
    if not (folder / "quickstart_text_document.idx").exists():
        run_script(["examples/prepare_quickstart_text.py", "--output-dir", folder])
        source = ("--input", folder / "quickstart.jsonl", "--output-prefix", folder / "quickstart")
        run_script(["tools/preprocess_data.py", *source, *tokenizer, "--append-eod", "--workers", "1"])
    return (*tokenizer, "--data-path", folder / "quickstart_text_document")


def _train(plan: Plan, folder: Path, data: Sequence[str | Path]) -> Trained:
    metrics = folder / f"{plan.name}.jsonl"
    if not metrics.exists():
        part = metrics.with_suffix(".part")
        part.unlink(missing_ok=True)
        words = ["pretrain_gpt.py", *MODEL.split(), *data, *_RULES[plan.rule], "--metrics-jsonl", part]
        words += ["--lr", str(plan.rate), "--min-lr", str(plan.rate / 10), "--seed", str(plan.seed)]
        size = str(plan.batch_size)
        words += ["--train-iters", str(plan.iterations), "--micro-batch-size", size, "--global-batch-size", size]
        run_script(words)
        part.rename(metrics)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [line["lm_loss"] for line in lines if line.get("split") == "validation"]
    trained = Trained(plan, losses[-1])
    print(f"{plan.name}: {trained.loss:.4f}", flush=True)
    return trained


def _table(sweep: Sequence[Trained], seeds: Sequence[tuple[Trained, Sequence[Trained]]], header: str) -> str:
    rows = [header, "", "| optimizer | rate | validation loss |", "|---|---|---|"]
    rows += [f"| {run.plan.rule} | {run.plan.rate:g} | {run.loss:.4f} |" for run in sweep]
    first, of_muon = seeds[0]
    lengths = [run.plan.iterations for run in of_muon]
    rows += [
        "",
        f"| seed | AdamW, {first.plan.iterations} | {' | '.join(f'Muon, {length}' for length in lengths)} | "
        "iterations of Muon to AdamW's loss |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    for adam, runs in seeds:
        reached = next((run.plan.iterations for run in runs if run.loss <= adam.loss), None)
        share = "not reached" if reached is None else f"at most {reached} ({reached / adam.plan.iterations:.0%})"
        losses = " | ".join(f"{run.loss:.4f}" for run in runs)
        rows.append(f"| {adam.plan.seed} | {adam.loss:.4f} | {losses} | {share} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Train all runs, and write and print what came of them."""
    arguments = _build_parser().parse_args(argv)
    folder = arguments.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data, length, first = prepare_text(folder), arguments.iterations, arguments.seeds[0]
    size = arguments.batch_size
    swept = {"adam": arguments.adam_rates, "muon": arguments.muon_rates}
    sweep = [
        _train(Plan(rule, rate, first, length, size), folder, data) for rule, rates in swept.items() for rate in rates
    ]
    best = {
        rule: min((run for run in sweep if run.plan.rule == rule), key=lambda run: run.loss).plan.rate for rule in swept
    }
    seeds = [
        (
            _train(Plan("adam", best["adam"], seed, length, size), folder, data),
            [_train(Plan("muon", best["muon"], seed, round(share * length), size), folder, data) for share in _SHARES],
        )
        for seed in arguments.seeds
    ]
    header = (
        f"The quickstart's model (4 layers of width 128) and text, {length} iterations of {size} x 128 tokens, losses "
        f"of the whole validation set; sweep with seed {first}. Muon: {' '.join(_RULES['muon'])}."
    )
    table = _table(sweep, seeds, header)
    print(table)
    if arguments.output is not None:
        setting = {"model": " ".join(MODEL.split()), "torch": torch.__version__, "machine": describe_machine()}
        runs = [asdict(run) for run in (*sweep, *(run for adam, of_muon in seeds for run in (adam, *of_muon)))]
        report = json.dumps({"setting": setting, "runs": runs}, indent=1)
        arguments.output.with_suffix(".json").write_text(report + "\n", encoding="utf-8")
        arguments.output.with_suffix(".md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
