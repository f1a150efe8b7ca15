"""Compare the planned peak of memory with the peak of a dry run on a simulated H100 (NVFP4: B200), layout by layout.

    python benchmarks/planner/beside_dry_run.py --output benchmarks/results/planner_beside_dry_run_DATE

Models are GPT-2 345M, Llama-3.1 8B with eight layers, Llama-3.1 70B with four layers per stage, a model of experts, and
one with multi-latent attention. The first rank of the first and of the last stage is run for each layout. Nothing is
measured: both figures are predictions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_dry_run.run import COMMON, FP8, GPT2_345M, LLAMA_8B, TENSORWISE
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import B200, H100, Gpu
from megatron.planner.simulation.fake_cuda import load_fake_cuda

if TYPE_CHECKING:
    from megatron.planner.verified_stage import VerifiedStage

LLAMA_70B = (
    *(*LLAMA_8B, "--num-layers", "80", "--hidden-size", "8192", "--num-attention-heads", "64"),
    *("--ffn-hidden-size", "28672"),
)
AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PAIRS = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3")
PARTS = ("--recompute-granularity", "selective", "--recompute-modules", "moe_act", "shared_experts")
ZERO_BUBBLE = ("--pipeline-schedule", "zero-bubble")
SHARDED = ("--data-parallel-sharding-strategy", "optim_grads")
FULLY = ("--data-parallel-sharding-strategy", "optim_grads_params")
COPIES = ("--num-distributed-optimizer-instances", "2")
FURTHER = ("--mtp-num-layers", "2")
TWO_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
EXPERTS_OF_FOUR = (
    *("--expert-model-parallel-size", "4", "--moe-layer-freq", "2", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-shared-expert-intermediate-size", "1536"),
)
EXPERTS = (
    *("--num-layers", "4", "--hidden-size", "2048", "--num-attention-heads", "32", "--kv-channels", "128"),
    *("--group-query-attention", "--num-query-groups", "4", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--position-embedding-type", "rope", "--max-position-embeddings", "4096"),
    *("--seq-length", "4096", "--vocab-size", "151935", "--num-experts", "64", "--moe-router-topk", "8"),
    *("--moe-ffn-hidden-size", "768", "--moe-token-dispatcher-type", "alltoall"),
)
LATENT = (
    *("--num-layers", "4", "--hidden-size", "2048", "--num-attention-heads", "16", "--swiglu"),
    *("--ffn-hidden-size", "8192", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--max-position-embeddings", "4096", "--seq-length", "4096"),
    *("--vocab-size", "102399", "--untie-embeddings-and-output-weights", "--multi-latent-attention"),
    *("--q-lora-rank", "1536", "--kv-lora-rank", "512", "--qk-head-dim", "128", "--qk-pos-emb-head-dim", "64"),
    *("--v-head-dim", "128", "--qk-layernorm"),
)
SPARSE = (
    *("--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", "16", "--dsa-indexer-head-dim", "128"),
    *("--dsa-indexer-topk", "1024", "--dsa-indexer-loss-coeff", "1e-2"),
)
NVFP4 = ("--fp4-format", "e2m1")
ADAPTERS = ("--lora-rank", "16", "--load", "somewhere", "--finetune")
_MIB = 2**20


@dataclass(frozen=True)
class LayoutCase:
    """Name a command line and the pipeline stages that are run."""

    name: str
    flags: tuple[str, ...]
    world_size: int
    stages: tuple[int, ...]

    @property
    def gpu(self) -> Gpu:
        """Return the type of the simulated GPU."""
        return B200 if NVFP4[0] in self.flags else H100

    def config(self) -> RunConfig:
        """Return what the command line resolves to."""
        return with_known_vocabulary(resolve_arguments(self.flags, self.world_size, needs_files=False).config)


def layout_cases() -> Iterator[LayoutCase]:
    """Yield distinct layouts of all three models."""
    for tp, pp, more in itertools.product((1, 2), (1, 2), ((), FULL)):
        yield _case("345M", (*GPT2_345M, *COMMON), (tp, pp, 1), tp * pp, 8 * pp, more)
    yield _case("345M", (*GPT2_345M, *COMMON), (1, 1, 1), 4, 64, (*SHARDED, "--overlap-grad-reduce"))
    eight = (*LLAMA_8B, *COMMON, "--num-layers", "8")
    for tp, pp, cp, more in (
        *((2, 1, 1, more) for more in ((), AGAIN, FULL, BLOCK, (*FP8, *TENSORWISE), NVFP4, ADAPTERS, SHARDED)),
        *((tp, 1, 1, ()) for tp in (1, 4)),
        *((2, 1, 2, more) for more in ((), ("--cp-comm-type", "all_gather"))),
        *((2, 1, 1, more) for more in (("--qk-layernorm",), ("--norm-placement", "sandwich"))),
        *((1, 2, 1, more) for more in ((), AGAIN, ("--decoder-last-pipeline-num-layers", "3"))),
        (1, 2, 1, ("--pipeline-model-parallel-layout", "Ettt|tttttL")),
        (1, 4, 1, ()),
        *((2, 2, 1, more) for more in (TWO_CHUNKS, (*TWO_CHUNKS, *SHARDED), ("--delay-wgrad-compute",))),
        *((2, 2, 1, (*ZERO_BUBBLE, *more)) for more in ((), FULL, FP8)),
        (1, 4, 1, ZERO_BUBBLE),
        *((1, 1, 1, (*FULLY, *more)) for more in ((), FULL, COPIES, NVFP4)),
        (2, 2, 1, (*FULLY, *TWO_CHUNKS)),
        (2, 1, 1, (*FULLY, *COPIES)),
        (1, 2, 1, (*FULLY, *COPIES)),
        (1, 1, 1, COPIES),
        *((2, 2, 1, more) for more in (FURTHER, (*FURTHER, *FULL), (*FURTHER, *ZERO_BUBBLE))),
        (2, 1, 2, FURTHER),
    ):
        yield _case("8B", eight, (tp, pp, cp), 8, 4 * 8 // (tp * pp * cp), more)
    latent = (*LATENT, *COMMON)
    for sizes, more in (
        ((1, 1, 1), ()),
        ((2, 1, 1), ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")),
        ((1, 1, 2), ("--cp-comm-type", "all_gather")),
        ((2, 1, 1), (*FP8, *TENSORWISE)),
        ((1, 2, 1), ("--mtp-num-layers", "1")),
        ((1, 1, 1), FULLY),
    ):
        yield _case("MLA", latent, sizes, 4, 16, more)
    for sizes, more in (((1, 1, 1), FULL), ((2, 1, 1), ("--dsa-indexer-layer-freq", "2"))):
        yield _case("MLA", (*latent, *SPARSE), sizes, 4, 16, more)
    seventy = (*LLAMA_70B, *COMMON)
    for sizes, world, more in (
        ((1, 2, 1), 16, ("--expert-model-parallel-size", "8")),
        ((2, 1, 1), 8, ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")),
        ((1, 1, 1), 4, ("--moe-token-dispatcher-type", "allgather", "--num-experts", "32")),
        ((2, 1, 1), 8, (*EXPERTS_OF_FOUR, "--recompute-granularity", "selective", "--recompute-modules", "moe")),
        ((1, 1, 1), 8, (*EXPERTS_OF_FOUR, *FP8, *TENSORWISE)),
        ((1, 1, 1), 8, (*EXPERTS_OF_FOUR, *PARTS)),
        ((1, 1, 1), 8, (*EXPERTS_OF_FOUR, *FULL, "--moe-router-score-function", "sigmoid")),
        ((1, 1, 1), 8, (*EXPERTS_OF_FOUR, *PAIRS)),
        ((1, 2, 1), 16, ("--expert-model-parallel-size", "8", *FURTHER)),
        ((1, 1, 1), 8, (*EXPERTS_OF_FOUR, *FULLY)),
    ):
        yield _case("MoE", (*EXPERTS, *COMMON), sizes, world, 4 * world, more)
    for tp, pp, more in (
        *((8, 1, more) for more in ((), FULL)),
        (8, 2, ()),
        (4, 2, AGAIN),
        (8, 2, ZERO_BUBBLE),
        (4, 2, SHARDED),
    ):
        layers = ("--num-layers", str(4 * pp))
        yield _case("70B", (*seventy, *layers), (tp, pp, 1), 16, 8, more)


def _case(
    model: str, flags: Sequence[str], sizes: tuple[int, int, int], world_size: int, batch: int, more: Sequence[str]
) -> LayoutCase:
    tp, pp, cp = sizes
    layout = ("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))
    layout += ("--context-parallel-size", str(cp), *(("--sequence-parallel",) if tp > 1 else ()))
    told = " ".join(word.removeprefix("--") for word in more)
    return LayoutCase(
        name=f"{model} tp {tp} pp {pp} cp {cp} of {world_size} {told}".strip(),
        flags=(*flags, *layout, "--global-batch-size", str(batch), *more),
        world_size=world_size,
        stages=tuple(sorted({0, pp - 1})),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the layouts whose names hold this", metavar="WORDS")
    parser.add_argument("--output", type=Path, help="write PREFIX.json and PREFIX.md", metavar="PREFIX")
    arguments = parser.parse_args()
    load_fake_cuda()
    results = [
        (case, verified) for case in layout_cases() if arguments.only in case.name for verified in _verified(case)
    ]
    errors = [abs(verified.memory_error) for _, verified in results]
    summary = (
        f"{len({case.name for case, _ in results})} layouts, {len(results)} ranks: memory is {_percent(max(errors))} "
        f"off at worst, {_percent(sum(errors) / len(errors))} on average; "
        f"{sum(not verified.unlike for _, verified in results)} send as planned"
    )
    print(summary)
    if arguments.output is not None:
        rows = [{"layout": case.name, "flags": case.flags, **verified.to_json()} for case, verified in results]
        arguments.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        table = "\n".join(_row(case, verified) for case, verified in results)
        head = "| layout | stage | planned, MiB | dry run, MiB | error | sent |\n|---|---:|---:|---:|---:|---|"
        text = f"# Planned memory and dry runs\n\n{summary}\n\n{head}\n{table}\n"
        arguments.output.with_suffix(".md").write_text(text)


def _verified(case: LayoutCase) -> Iterator[VerifiedStage]:
    import pretrain_gpt
    from megatron.planner.verified_stage import verify_stage

    config = case.config()
    for stage in case.stages:
        start = time.monotonic()
        verified = verify_stage(config, stage, case.gpu, pretrain_gpt.provide_model, pretrain_gpt.forward_step)
        print(f"{_row(case, verified)} {time.monotonic() - start:.1f} s", flush=True)
        yield verified


def _row(case: LayoutCase, verified: VerifiedStage) -> str:
    sent = "as planned" if not verified.unlike else "; ".join(name for name, _, _ in verified.unlike)
    return (
        f"| {case.name} | {verified.stage} | {verified.planned.total // _MIB} | {verified.peak_bytes // _MIB} | "
        f"{100 * verified.memory_error:+.2f} % | {sent} |"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


if __name__ == "__main__":
    main()
