"""Measure iterations of a small model on CPU: this project, nanoGPT (or a plain torch model), and their floor.

    python benchmarks/step/nanogpt.py --nanogpt PATH --output benchmarks/results/nanogpt_cpu_DATE

PATH is a checkout of nanoGPT. Its own ``train.py`` runs and prints the time of each iteration. Without it a plain torch
model of the same shape takes its place, and is named so. The floor is the same GEMMs, attention and optimizer update
alone, with the faster of torch's two GEMM libraries. The contestants of a round are fresh processes that run in turns
of some seconds, while the others are stopped: on a shared machine the speed changes by half within minutes, for all of
them. A time is the mean of ten iterations of the smallest model, and one iteration of the others. The first 50
iterations (5 of the larger models) are not counted, nor are times of more than twice the median, in which the process
was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floor import floor_step
from turns import start_stopped, take_turns

if TYPE_CHECKING:
    import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_ROLES = ("ours", "other", "floor")


@dataclass(frozen=True)
class Shape:
    """A model and its batch; float32, no dropout, no biases, as in nanoGPT's recipe for a CPU."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    batch_size: int
    vocab_size: int
    num_warmup: int
    iterations: int
    interval: int
    """Iterations per measured time."""

    @property
    def name(self) -> str:
        """Return the sizes on one line."""
        return (
            f"{self.num_layers} layers × {self.hidden_size}, {self.num_heads} heads, {self.seq_length} positions, "
            f"batch {self.batch_size}, vocabulary {self.vocab_size}"
        )


SHAPES = {
    "nanogpt-cpu": Shape(4, 128, 4, 64, 12, 65, 50, 450, 10),
    "6x384": Shape(6, 384, 6, 256, 16, 65, 5, 30, 1),
    "12x768": Shape(12, 768, 12, 512, 2, 65, 5, 30, 1),
}


def train_ours(shape: Shape) -> list[float]:
    """Return the milliseconds per iteration that `pretrain_gpt.py` logs, one number per interval."""
    flags = [
        *("--num-layers", shape.num_layers, "--hidden-size", shape.hidden_size),
        *("--num-attention-heads", shape.num_heads, "--seq-length", shape.seq_length),
        *("--max-position-embeddings", shape.seq_length, "--micro-batch-size", shape.batch_size),
        *("--global-batch-size", shape.batch_size, "--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", shape.vocab_size - 1, "--make-vocab-size-divisible-by", 1),
        *("--disable-bias-linear", "--hidden-dropout", 0, "--attention-dropout", 0),
        *("--lr", 1e-3, "--min-lr", 1e-4, "--lr-warmup-iters", 10, "--lr-decay-iters", 2000, "--adam-beta2", 0.99),
        *("--weight-decay", 0.1, "--clip-grad", 1.0),
        *("--train-iters", shape.iterations, "--log-interval", shape.interval),
        *("--eval-interval", 1_000_000, "--eval-iters", 0),
    ]
    command = [sys.executable, str(_ROOT / "pretrain_gpt.py"), *map(str, flags)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=_ROOT)
    return [float(found) for found in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", done.stdout)]


def train_nanogpt(shape: Shape, nanogpt: Path) -> list[float]:
    """Return the milliseconds per iteration that nanoGPT's `train.py` prints, one mean per interval.

    The settings are those of its recipe for a CPU, with another shape. The data set has random tokens.
    """
    import numpy as np

    settings = {
        "device": "cpu",
        "compile": False,
        "dtype": "float32",
        "dropout": 0.0,
        "log_interval": 1,
        "eval_iters": 1,
        "eval_interval": 1_000_000,
        "max_iters": shape.iterations - 1,
        "lr_decay_iters": 2000,
        "block_size": shape.seq_length,
        "batch_size": shape.batch_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.hidden_size,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("configurator.py", "config"):
            Path(folder, name).symlink_to(nanogpt.resolve() / name)
        data = Path(folder, "data", "shakespeare_char")
        data.mkdir(parents=True)
        tokens = np.random.default_rng(1).integers(0, shape.vocab_size, 100_000, dtype=np.uint16)
        for name in ("train", "val"):
            tokens.tofile(data / f"{name}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": shape.vocab_size, "itos": {}, "stoi": {}}))
        command = [sys.executable, str(nanogpt.resolve() / "train.py"), "config/train_shakespeare_char.py"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    times = [float(found) for found in re.findall(r"^iter .* time ([0-9.]+)ms", done.stdout, re.MULTILINE)]
    return [statistics.mean(times[at : at + shape.interval]) for at in range(0, len(times), shape.interval)]


def train_plain(shape: Shape) -> list[float]:
    """Return the milliseconds per iteration of a plain torch model in nanoGPT's loop, one number per interval."""
    import torch

    torch.manual_seed(1)
    tokens = torch.randint(0, shape.vocab_size, (100_000,))
    model, optimizer = _plain_model(shape)

    def iterate() -> None:
        starts = torch.randint(len(tokens) - shape.seq_length, (shape.batch_size,))
        x = torch.stack([tokens[i : i + shape.seq_length] for i in starts])
        y = torch.stack([tokens[i + 1 : i + 1 + shape.seq_length] for i in starts])
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _timed(iterate, shape)


def _timed(iterate: Callable[[], None], shape: Shape) -> list[float]:
    times = []
    for _ in range(shape.iterations // shape.interval):
        start = time.perf_counter()
        for _ in range(shape.interval):
            iterate()
        times.append((time.perf_counter() - start) * 1e3 / shape.interval)
    return times


def _plain_model(shape: Shape) -> tuple[Any, Any]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = shape.hidden_size
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
            self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, h = x.shape
            qkv = self.qkv(self.norms[0](x)).view(b, s, 3, shape.num_heads, h // shape.num_heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(context.transpose(1, 2).reshape(b, s, h))
            output: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norms[1](x))))
            return output

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
            self.positions = nn.Embedding(shape.seq_length, shape.hidden_size)
            self.layers = nn.Sequential(*(Layer() for _ in range(shape.num_layers)))
            self.norm = nn.LayerNorm(shape.hidden_size, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            logits = self.norm(self.layers(hidden)) @ self.tokens.weight.t()
            return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def train_floor(shape: Shape) -> list[float]:
    """Return the milliseconds of the GEMMs, attention and the update alone, one number per interval."""
    import torch

    step = floor_step(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        seq_length=shape.seq_length,
        batch_size=shape.batch_size,
        vocab_size=shape.vocab_size,
        dtype=torch.float32,
    )
    return _timed(step, shape)


def _measure(shape: str, threads: int, nanogpt: Path | None, turn_s: float) -> dict[str, list[float]]:
    """Run all contestants in turns, each in a fresh process, and return their times after the warm-up."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for role in _ROLES:
            command = [sys.executable, __file__, "--role", role, "--shapes", shape]
            command += ["--output", f"{folder}/{role}.json"] + ([] if nanogpt is None else ["--nanogpt", str(nanogpt)])
            processes.append([start_stopped(command, env=environment, stdout=subprocess.DEVNULL)])
        take_turns(processes, turn_s)
        times = {role: json.loads(Path(f"{folder}/{role}.json").read_text(encoding="utf-8")) for role in _ROLES}
    return {
        role: _undisturbed(values[SHAPES[shape].num_warmup // SHAPES[shape].interval :])
        for role, values in times.items()
    }


def _undisturbed(times: list[float]) -> list[float]:
    limit = 2 * statistics.median(times)
    return [time for time in times if time <= limit]


def _markdown(result: dict[str, Any]) -> str:
    lines = [f"# Iterations of small models on {result['machine']}, {result['date']}", ""]
    lines += [
        f"torch {result['torch']}, {result['threads']} threads, float32, no dropout, no biases. Milliseconds per",
        f"iteration: median [quartiles], in {result['rounds']} rounds of alternating turns of {result['turn_s']:g} s.",
        f"Times of the smallest model are means of ten iterations. Load average {result['load_average']}.",
        "",
        "| model | ours | " + result["other"] + " | floor | other ÷ ours | ours ÷ floor |",
        "|---|---|---|---|---|---|",
    ]
    for name, times in result["times"].items():
        middle = {role: statistics.median(values) for role, values in times.items()}
        cells = []
        for role in _ROLES:
            low, _, high = statistics.quantiles(times[role], n=4, method="inclusive")
            cells.append(f"{middle[role]:.1f} [{low:.1f}–{high:.1f}]")
        ratios = (middle["other"] / middle["ours"], middle["ours"] / middle["floor"])
        lines.append("| " + " | ".join([SHAPES[name].name, *cells, *(f"{ratio:.2f}" for ratio in ratios)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--nanogpt", type=Path, metavar="PATH", help="a checkout of nanoGPT; default: a plain torch model"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=float, default=4.0, metavar="SECONDS", help="how long a contestant runs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="writes PATH.json and PATH.md")
    parser.add_argument("--role", choices=_ROLES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        shape = SHAPES[options.shapes[0]]
        train = {
            "ours": train_ours,
            "other": train_plain if options.nanogpt is None else partial(train_nanogpt, nanogpt=options.nanogpt),
            "floor": train_floor,
        }[options.role]
        options.output.write_text(json.dumps(train(shape)), encoding="utf-8")
        return
    sys.path.insert(0, str(_ROOT))
    import torch

    from benchmarks.machine import describe_machine

    times: dict[str, dict[str, list[float]]] = {name: {role: [] for role in _ROLES} for name in options.shapes}
    for number in range(options.rounds):
        for name, of_shape in times.items():
            for role, values in _measure(name, options.threads, options.nanogpt, options.turn).items():
                of_shape[role] += values
                print(f"round {number + 1}, {name}, {role}: {statistics.median(values):.1f} ms", flush=True)
    result = {
        "machine": describe_machine(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "threads": options.threads,
        "rounds": options.rounds,
        "turn_s": options.turn,
        "load_average": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "other": "plain torch model" if options.nanogpt is None else "nanoGPT",
        "times": times,
    }
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = _markdown(result)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
