"""Train a small model on a text in bfloat16, each recipe of FP8 and NVFP4, and compare the losses on validation text.

    python benchmarks/float8_on_text.py TEXT.jsonl --about "what the text is" --output benchmarks/results/float8_on_text

The tokens are the bytes of the file's documents: a line of jsonl has one under "text", another file is one document.
All runs of a seed begin with the same weights and see the same samples. Written are the losses as JSON and as a table;
the text is named by its SHA-256 and by ``--about``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_REPOSITORY = Path(__file__).resolve().parents[1]
_MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 8 --distributed-backend gloo
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8 --global-batch-size 8 --bf16
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --split 90,10,0 --log-interval 50
    --eval-iters 20 --eval-interval 100000
"""
_FLOAT8 = "--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-recipe"
_NVFP4 = "--fp4-format e2m1"
_REFERENCE = "bfloat16"
_FLAGS = {
    **{recipe: f"{_FLOAT8} {recipe}" for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")},
    "nvfp4": _NVFP4,
    "nvfp4-ends-in-bfloat16": f"{_NVFP4} --first-last-layers-bf16",
}
"""Flags of each recipe; the last one keeps the first and last layers in bfloat16."""


@dataclass(frozen=True)
class Trained:
    """Hold how one run ended."""

    recipe: str
    seed: int
    train_loss: float
    validation_loss: float


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="FILE", help="a text, as jsonl or as it is")
    parser.add_argument("--about", required=True, metavar="WORDS", help="what the text is, for the results")
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="iterations of a run (300)")
    parser.add_argument(
        "--recipes", nargs="+", choices=list(_FLAGS), default=list(_FLAGS), metavar="RECIPE", help="recipes (all)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], metavar="N", help="seeds (1234)")
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md (print only)")
    return parser


def _documents(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    if path.suffix != ".jsonl":
        yield content
        return
    for line in content.splitlines():
        yield json.loads(line)["text"].encode()


def _write_tokens(path: Path, prefix: Path) -> int:
    """Write the bytes of the documents as token files; return how many there are."""
    num_tokens = 0
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for document in _documents(path):
            builder.add_document(np.frombuffer(document, dtype=np.uint8).astype(np.uint16))
            num_tokens += len(document)
        builder.finalize()
    return num_tokens


def _train(recipe: str, seed: int, num_iterations: int, prefix: Path) -> Trained:
    metrics = prefix.parent / f"{recipe}-{seed}.jsonl"
    words = [
        *_MODEL.split(),
        *_FLAGS.get(recipe, "").split(),
        "--seed",
        str(seed),
        "--train-iters",
        str(num_iterations),
    ]
    words += ["--data-path", str(prefix), "--metrics-jsonl", str(metrics)]
    environment = dict(os.environ) | {"MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *words]
    done = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"status {done.returncode} from: {' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in line]
    train_losses = [line["lm_loss"] for line in lines if "split" not in line]
    validation_losses = [line["lm_loss"] for line in lines if line.get("split") == "validation"]
    return Trained(recipe, seed, train_losses[-1], validation_losses[-1])


def _table(runs: Sequence[Trained], header: str) -> str:
    reference = {run.seed: run.validation_loss for run in runs if run.recipe == _REFERENCE}
    rows = [header, "", "| recipe | seed | validation loss | against bfloat16 |", "|---|---|---|---|"]
    for run in runs:
        difference = run.validation_loss / reference[run.seed] - 1
        rows.append(f"| {run.recipe} | {run.seed} | {run.validation_loss:.4f} | {difference:+.2%} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Train all runs, and write and print what came of them."""
    arguments = _build_parser().parse_args(argv)
    digest = hashlib.sha256(arguments.text.read_bytes()).hexdigest()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "text"
        num_tokens = _write_tokens(arguments.text, prefix)
        for seed in arguments.seeds:
            for recipe in (_REFERENCE, *arguments.recipes):
                runs.append(_train(recipe, seed, arguments.iterations, prefix))
                print(runs[-1], flush=True)
    setting = {
        "text": arguments.about,
        "text_sha256": digest,
        "num_tokens": num_tokens,
        "iterations": arguments.iterations,
        "model": " ".join(_MODEL.split()),
        "flags": {recipe: _FLAGS[recipe] for recipe in arguments.recipes},
        "torch": torch.__version__,
        "machine": describe_machine(),
    }
    header = (
        f"4 layers of width 128, {arguments.iterations} iterations of 8 x 128 bytes. Text: {arguments.about}, "
        f"{num_tokens:,} bytes, SHA-256 of the file {digest}."
    )
    table = _table(runs, header)
    print(table)
    if arguments.output is not None:
        report = json.dumps({"setting": setting, "runs": [asdict(run) for run in runs]}, indent=1)
        arguments.output.with_suffix(".json").write_text(report + "\n", encoding="utf-8")
        arguments.output.with_suffix(".md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
