"""Take GPT-2 345M through its life on one machine: train, save, load at another layout, convert, generate.

One step in bfloat16 at tensor 2 x pipeline 2, saved; loaded at tensor 4 for one more step; converted to one device by
tools/checkpoint/convert.py; 20 tokens by tools/text_generation_cli.py. Writes what it took as JSON and as a table.

    python benchmarks/real_345m/run.py --output benchmarks/results/real_345m

``--toy`` takes a model of seconds, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import describe_machine
from benchmarks.real_345m.process_memory import WatchedCommand, run_watched

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
NUM_NEW_TOKENS = 20


@dataclass(frozen=True)
class Phase:
    """Hold what one command of the run took."""

    name: str
    command: str
    wall_s: float
    peak_mib: dict[str, float]
    figures: dict[str, Any] = field(default_factory=dict)


def build_parser() -> argparse.ArgumentParser:
    """Declare the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json and STEM.md (print only)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the checkpoints here (a temporary folder)")
    parser.add_argument("--seq-length", type=int, default=1024, metavar="N", help="sequence length (1024)")
    parser.add_argument("--vocab-file", type=Path, metavar="FILE", help="GPT-2's vocabulary (ids as text)")
    parser.add_argument("--merge-file", type=Path, metavar="FILE", help="GPT-2's merges")
    parser.add_argument("--toy", action="store_true", help="a model of seconds")
    return parser


def model_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of the model, its data and its tokenizer, as users give them for GPT-2 345M."""
    shape = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16"
    if arguments.toy:
        shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"
    length = arguments.seq_length
    flags = f"""
        {shape} --seq-length {length} --max-position-embeddings {length} --mock-data --bf16
        --micro-batch-size 1 --global-batch-size 1 --lr 1.5e-4 --min-lr 1e-5 --train-samples 2
        --eval-iters 0 --log-interval 1 --distributed-backend gloo
    """.split()
    if arguments.vocab_file is not None:
        return [*flags, "--vocab-file", str(arguments.vocab_file), "--merge-file", str(arguments.merge_file)]
    return [*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256"]


def watch(command: Sequence[str]) -> WatchedCommand:
    """Run a command of the project with one thread a process where there are several."""
    environment = dict(os.environ) | {"MEGATRON_DEVICE": "cpu", "PYTHONUNBUFFERED": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    if "torch.distributed.run" in command:
        environment["OMP_NUM_THREADS"] = "1"
    return run_watched(command, environment, REPOSITORY)


def train(name: str, folder: Path, layout: str, exit_interval: int, flags: Sequence[str]) -> Phase:
    """Train up to an iteration and save."""
    words = [*flags, *layout.split(), "--save", str(folder), "--load", str(folder)]
    words += ["--exit-interval", str(exit_interval)]
    ran = watch([*TORCHRUN, "4", "pretrain_gpt.py", *words])
    step = [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "lm_loss" in line]
    step = [line for line in step if line.get("iteration") == exit_interval and "split" not in line]
    figures = {
        "loss": step[-1]["lm_loss"],
        "grad_norm": step[-1]["grad_norm"],
        "step_s": step[-1]["step_time_s"],
        "parameters": _parameter_counts(ran.output),
        "checkpoint_bytes": folder_bytes(folder / f"iter_{exit_interval:07d}"),
        "checkpoint_files": len(list((folder / f"iter_{exit_interval:07d}").glob("*.safetensors"))),
    }
    return Phase(name, f"torchrun × 4 pretrain_gpt.py {layout}", ran.wall_s, dict(ran.peak_mib), figures)


def convert(source: Path, target: Path) -> Phase:
    """Convert to the layout of one device."""
    words = ["--model-type", "GPT", "--loader", "megatron", "--saver", "megatron"]
    words += ["--load-dir", str(source), "--save-dir", str(target)]
    words += ["--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1", "--verify"]
    ran = watch([sys.executable, "tools/checkpoint/convert.py", *words])
    newest = max(target.glob("iter_*"))
    figures = {"checkpoint_bytes": folder_bytes(newest), "checkpoint_files": len(list(newest.glob("*.safetensors")))}
    return Phase("convert to one device", "tools/checkpoint/convert.py", ran.wall_s, dict(ran.peak_mib), figures)


def generate(folder: Path, has_text: bool) -> Phase:
    """Continue a text on one device."""
    prompt = "The castle stood on a hill" if has_text else "464 16669 6204 319 257 12788"
    words = ["--load", str(folder), "--prompt", prompt, "--tokens-to-generate", str(NUM_NEW_TOKENS), "--greedy"]
    ran = watch([sys.executable, "tools/text_generation_cli.py", *words])
    figures = {"text": ran.output.strip()}
    return Phase("generate 20 tokens", "tools/text_generation_cli.py", ran.wall_s, dict(ran.peak_mib), figures)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _parameter_counts(output: str) -> list[int]:
    lines = [line for line in output.splitlines() if "number of parameters on (tensor, pipeline)" in line]
    return [int(line.rsplit(":", 1)[1]) for line in lines]


def run(arguments: argparse.Namespace, folder: Path) -> list[Phase]:
    """Run all phases."""
    flags = model_flags(arguments)
    trained, converted = folder / "trained", folder / "converted"
    first, second = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 4",
    )
    phases = [train("first step, tensor 2 x pipeline 2", trained, first, 1, flags)]
    phases.append(train("second step, tensor 4", trained, second, 2, flags))
    phases.append(convert(trained, converted))
    phases.append(generate(converted, arguments.vocab_file is not None))
    return phases


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    rows = []
    for phase in result["phases"]:
        figures = phase["figures"]
        peaks = " / ".join(f"{peak:,.0f}" for peak in phase["peak_mib"].values())
        said = [f"{name} {figures[name]:.4f}" for name in ("loss", "grad_norm", "step_s") if name in figures]
        if "checkpoint_bytes" in figures:
            said.append(f"checkpoint {figures['checkpoint_bytes']:,} bytes in {figures['checkpoint_files']} files")
        if "text" in figures:
            said.append(figures["text"].replace("\n", " ⏎ ").replace("|", "\\|"))
        rows.append(f"| {phase['name']} | {phase['wall_s']:.1f} | {peaks} | {'; '.join(said)} |")
    head = [
        f"{result['model']}, bfloat16, sequence {result['seq_length']}, micro-batch 1, on {result['machine']}.",
        "",
        "| phase | wall s, start-up included | peak MiB of each process | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def main() -> int:
    """Run the whole life and report it."""
    arguments = build_parser().parse_args()
    if (arguments.vocab_file is None) != (arguments.merge_file is None):
        raise SystemExit("--vocab-file and --merge-file go together")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="real-345m-"))
    try:
        phases = run(arguments, folder)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    result = {
        "model": "toy" if arguments.toy else "GPT-2 345M",
        "seq_length": arguments.seq_length,
        "machine": f"{describe_machine()}, {_memory_gib():.0f} GiB",
        "phases": [asdict(phase) for phase in phases],
    }
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 0


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


if __name__ == "__main__":
    sys.exit(main())
