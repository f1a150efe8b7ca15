"""Train a small model of 8 experts and a dense one of the same active parameters on text, and compare them.

    python benchmarks/experts_on_text.py [--seeds 1234 1235 1236] [--aux-loss-coeffs 0.01 0.1] [--output STEM]

The text is this project's own documents, cut at their headings; of ten sections the last is for validation. Tokens are
bytes. All models of a seed see the same samples. Written are validation losses, and the shares of the even load that
experts are given, as JSON and as a table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_REPOSITORY = Path(__file__).resolve().parents[1]
_MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --seq-length 128 --max-position-embeddings 128
    --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 8 --distributed-backend gloo
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 16 --global-batch-size 16
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --split 90,10,0 --log-interval 50
    --eval-iters 20 --eval-interval 100000
"""
_EXPERTS = """
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-load-balancing-type aux_loss
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff
"""
_LAST = 20
"""Over how many iterations at the end shares of the load are averaged, too."""


@dataclass(frozen=True)
class Trained:
    """Hold how one run ended; ``loads`` are the least and the largest share of the even load, of all layers' experts.

    The first pair is of the last iteration, the second of each expert's mean over the last iterations. ``coefficient``
    is the weight of the auxiliary loss, None of the dense model.
    """

    coefficient: float | None
    seed: int
    train_loss: float
    validation_loss: float
    loads: tuple[tuple[float, float], tuple[float, float]] | None


def _sections() -> list[bytes]:
    """Return the sections of the documents that git tracks, in the order of their names."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    texts = [(_REPOSITORY / name).read_text(encoding="utf-8") for name in sorted(listed.stdout.split())]
    return [part.encode() for text in texts for part in re.split(r"(?m)^(?=#+ )", text) if len(part) > 1]


def _write_tokens(sections: Sequence[bytes], prefix: Path) -> None:
    """Write the sections as token files, those for validation last."""
    last = [section for number, section in enumerate(sections) if number % 10 == 9]
    first = [section for number, section in enumerate(sections) if number % 10 != 9]
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for section in (*first, *last):
            builder.add_document(np.frombuffer(section, dtype=np.uint8).astype(np.uint16))
        builder.finalize()


def _train(coefficient: float | None, seed: int, num_iterations: int, prefix: Path) -> Trained:
    """Train a model of experts with an auxiliary loss of this weight, or the dense one where it is None."""
    metrics = prefix.parent / f"{coefficient}-{seed}.jsonl"
    words = [*_MODEL.split(), *((*_EXPERTS.split(), str(coefficient)) if coefficient is not None else ())]
    words += ["--seed", str(seed), "--train-iters", str(num_iterations)]
    words += ["--data-path", str(prefix), "--metrics-jsonl", str(metrics)]
    environment = dict(os.environ) | {"MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *words]
    done = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"status {done.returncode} from: {' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in line]
    steps = [line for line in lines if "split" not in line]
    (validation,) = [line["lm_loss"] for line in lines if line.get("split") == "validation"]
    loads = None
    if coefficient is not None:
        shares = np.array([list(line["expert_load"].values()) for line in steps[-_LAST:]])
        at_end, mean = shares[-1], shares.mean(axis=0)
        loads = (float(at_end.min()), float(at_end.max())), (float(mean.min()), float(mean.max()))
    return Trained(coefficient, seed, steps[-1]["lm_loss"], validation, loads)


def _table(runs: Sequence[Trained], header: str) -> str:
    rows = [
        header,
        "",
        f"| model | auxiliary loss's weight | seed | validation loss | load at the end | mean of the last {_LAST} |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        loads = ("", "") if run.loads is None else [f"{least:.2f} to {most:.2f}" for least, most in run.loads]
        model = "dense | " if run.coefficient is None else f"experts | {run.coefficient:g}"
        rows.append(f"| {model} | {run.seed} | {run.validation_loss:.4f} | {' | '.join(loads)} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Train all runs, and write and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="iterations of a run (300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235, 1236], metavar="N", help="seeds")
    parser.add_argument(
        "--aux-loss-coeffs", type=float, nargs="+", default=[1e-2, 1e-1], metavar="X", help="of experts (0.01 0.1)"
    )
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md (print only)")
    arguments = parser.parse_args(argv)
    sections = _sections()
    content = b"".join(sections)
    header = (
        f"4 layers of width 128, {arguments.iterations} iterations of 16 x 128 bytes, fp32. Dense feed-forwards of "
        "width 256, or 8 experts of 128, top 2, with an auxiliary loss. Text: this project's documents, "
        f"{len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}. Load: the least and the largest share "
        "of the even load over all 32 experts."
    )
    setting = {
        "num_bytes": len(content),
        "iterations": arguments.iterations,
        "model": " ".join(_MODEL.split()),
        "experts": " ".join(_EXPERTS.split()),
        "torch": torch.__version__,
        "machine": describe_machine(),
    }
    runs: list[Trained] = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "text"
        _write_tokens(sections, prefix)
        for seed in arguments.seeds:
            for coefficient in (None, *arguments.aux_loss_coeffs):
                runs.append(_train(coefficient, seed, arguments.iterations, prefix))
                print(runs[-1], flush=True)
                if arguments.output is not None:
                    report = json.dumps({"setting": setting, "runs": [asdict(run) for run in runs]}, indent=1)
                    arguments.output.with_suffix(".json").write_text(report + "\n", encoding="utf-8")
                    arguments.output.with_suffix(".md").write_text(_table(runs, header), encoding="utf-8")
    print(_table(runs, header))


if __name__ == "__main__":
    main()
