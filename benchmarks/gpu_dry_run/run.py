"""Predict training steps on GPUs that are not there: what each layer launches and moves, memory, waits, time and MFU.

    python benchmarks/gpu_dry_run/run.py --output benchmarks/results/gpu_dry_run_DATE [--before EARLIER.json]

Every figure is a prediction of the dry run (docs/simulation.md), for the tree as it is: run it before and after a
change to see what the change is worth on paper. What a layer costs is the difference between four layers and two. With
the figures of an earlier run, those of the same cases stand beside the new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config.arguments import resolve_arguments
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import find_gpu
from megatron.planner.simulation.fake_cuda import load_fake_cuda

GPT2_345M = (
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--micro-batch-size", "8", "--vocab-size", "50257"),
)
WITHOUT_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
LLAMA_8B = (
    *("--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32", "--group-query-attention"),
    *("--num-query-groups", "8", "--ffn-hidden-size", "14336", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--seq-length", "8192", "--max-position-embeddings", "8192"),
    *("--micro-batch-size", "1", "--vocab-size", "128256", "--make-vocab-size-divisible-by", "128"),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
)
FP8 = ("--fp8-format", "hybrid", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max")
TENSORWISE = ("--fp8-recipe", "tensorwise")
COMMON = (
    *("--train-iters", "10", "--lr", "1e-4", "--bf16", "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--eval-iters", "0"),
)


_PHASES = ("forward", "backward")
_NUM_LINES = 10


@dataclass(frozen=True)
class Case:
    """Name a model and a layout, of which rank 0 is run."""

    name: str
    world_size: int
    flags: tuple[str, ...]


CASES = (
    Case("GPT-2 345M, one GPU", 1, (*GPT2_345M, "--global-batch-size", "16")),
    # Multiples of 1/16 leave attention to cuDNN (docs/attention.md).
    Case(
        "GPT-2 345M, attention dropout 1/8",
        1,
        (*GPT2_345M, "--attention-dropout", "0.125", "--global-batch-size", "16"),
    ),
    Case("GPT-2 345M without dropout", 1, (*GPT2_345M, *WITHOUT_DROPOUT, "--global-batch-size", "16")),
    # The optimizer's share of a step falls with the number of micro-batches: two above, sixteen here.
    Case("GPT-2 345M, batch 128", 1, (*GPT2_345M, "--global-batch-size", "128")),
    Case("GPT-2 345M without dropout, batch 128", 1, (*GPT2_345M, *WITHOUT_DROPOUT, "--global-batch-size", "128")),
    Case("8B, TP 1 · DP 8", 8, (*LLAMA_8B, "--global-batch-size", "32")),
    Case(
        "8B, TP 2 + SP · DP 4",
        8,
        (*LLAMA_8B, "--global-batch-size", "16", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    Case(
        "8B, TP 2 + SP · DP 4, communication beside products and the update",
        8,
        (
            *(*LLAMA_8B, "--global-batch-size", "16", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--tp-comm-overlap", "--overlap-param-gather-with-optimizer-step"),
        ),
    ),
    Case("8B, TP 1 · DP 8, fp8 delayed", 8, (*LLAMA_8B, "--global-batch-size", "32", *FP8)),
    Case("8B, TP 1 · DP 8, fp8 tensorwise", 8, (*LLAMA_8B, "--global-batch-size", "32", *FP8, *TENSORWISE)),
    Case(
        "8B, TP 2 + SP · DP 4, fp8 delayed, parameters gathered in fp8",
        8,
        (
            *(*LLAMA_8B, *FP8, "--fp8-param-gather", "--global-batch-size", "16"),
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ),
    ),
)


def predict(case: Case, gpu_name: str, num_layers: int | None = None) -> dict[str, Any]:
    """Return the report of a dry run, with so many layers in place of the model's own."""
    import pretrain_gpt
    from megatron.planner.simulation.dry_run import dry_run
    from megatron.planner.simulation.estimate import EstimatedRun, estimate_step, kernel_count, kind_of
    from megatron.planner.simulation.report import to_json
    from megatron.planner.simulation.roofline import operation_seconds

    flags = [*case.flags, *COMMON] + ([] if num_layers is None else ["--num-layers", str(num_layers)])
    config = with_known_vocabulary(resolve_arguments(flags, case.world_size).config)
    gpu = find_gpu(gpu_name)
    run = dry_run(config, 0, gpu, pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    report = to_json(EstimatedRun(run, estimate_step(run, gpu)), gpu)
    passes = [operation for operation in run.record.operations if operation.phase in ("forward", "backward")]
    report["pass_kernels"] = sum(map(kernel_count, passes)) / run.num_microbatches
    report["pass_memory_bytes"] = (
        sum(operation.num_bytes for operation in passes if kind_of(operation) == "memory") / run.num_microbatches
    )
    report["line_ms"] = {phase: defaultdict[str, float](float) for phase in _PHASES}
    for operation in passes:
        report["line_ms"][operation.phase][operation.where] += operation_seconds(operation, gpu) * 1e3
    return report


def measure(case: Case, gpu_name: str) -> dict[str, Any]:
    """Return the figures of one case."""
    whole, four, two = (predict(case, gpu_name, num_layers) for num_layers in (None, 4, 2))
    return {
        "case": case.name,
        "gpu": whole["gpu"],
        "kernels_a_layer": (four["pass_kernels"] - two["pass_kernels"]) / 2,
        "gb_outside_products_and_attention_a_layer": (four["pass_memory_bytes"] - two["pass_memory_bytes"]) / 2e9,
        "gb_outside_products_and_attention_a_step": whole["by_kind"]["memory"]["bytes"] / 1e9,
        "kernels_a_step": whole["kernels"],
        "waits_a_step": len(whole["waits"]),
        "waits": whole["waits"],
        "peak_gib": whole["peak_bytes"] / 2**30,
        "peak_holders_gib": {name: size / 2**30 for name, size in whole["peak_holders"].items()},
        "fits": whole["fits"],
        "predicted_ms": whole["predicted_ms"],
        "kernel_ms": whole["kernel_ms"],
        "communication_ms": whole["communication_ms"],
        "by_kind_ms": {kind: part["ms"] for kind, part in whole["by_kind"].items()},
        "by_phase": whole["by_phase"],
        "mfu": whole["mfu"],
        "hidden_communication_ms": whole["hidden_communication_ms"],
        "dearest_lines_ms": {phase: _dearest(whole["line_ms"][phase]) for phase in _PHASES},
    }


def _dearest(lines: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(lines.items(), key=lambda line: -line[1])[:_NUM_LINES])


def to_table(results: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown: a table, with those of before above the new ones, and the dearest lines."""
    earlier = {result["case"]: result for result in before}
    lines = [
        "# Predicted steps",
        "",
        "Predictions of the dry run (docs/simulation.md), not measurements. What a layer costs is of one micro-batch, "
        "forward and backward; all kernels, and the GB outside products and attention. Figures of before are of the "
        "dry run of then, whose estimate may have had other assumptions.",
        "",
        "| case | GPU | kernels a layer | GB a layer | GB a step | waits a step | peak GiB | step ms | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result["case"] in earlier:
            lines.append(_row(f"{result['case']}, before", earlier[result["case"]]))
        lines.append(_row(result["case"], result))
    for result in results:
        lines += ["", f"{result['case']}: milliseconds of a step by line."]
        for phase, dearest in result["dearest_lines_ms"].items():
            lines += ["", f"| {phase} | ms |", "|---|---|"]
            lines += [f"| {where or 'autograd'} | {milliseconds:.1f} |" for where, milliseconds in dearest.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, result: Mapping[str, Any]) -> str:
    return (
        f"| {name} | {result['gpu']} | {result['kernels_a_layer']:.0f} | "
        f"{result['gb_outside_products_and_attention_a_layer']:.2f} | "
        f"{result['gb_outside_products_and_attention_a_step']:.0f} | {result['waits_a_step']} | "
        f"{result['peak_gib']:.2f}{'' if result['fits'] else ' (does not fit)'} | {result['predicted_ms']:.1f} | "
        f"{result['mfu']:.1%} |"
    )


def main() -> None:
    """Predict all cases, and write the figures to OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--output", type=Path, help="path without its ending")
    parser.add_argument("--before", type=Path, help="the JSON file of an earlier run")
    arguments = parser.parse_args()
    before = [] if arguments.before is None else json.loads(arguments.before.read_text())
    load_fake_cuda()
    results = [measure(case, arguments.gpu) for case in CASES]
    table = to_table(results, before)
    print(table)
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    main()
