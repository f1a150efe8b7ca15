"""What a search found: a table of the fastest choices, why others were dropped, and the launch command of the best."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.planner.links import GPUS_A_MACHINE
from megatron.planner.search import Candidate, Search

_MIB = 2**20
_DAY = 86400
_HEADS = "tp  pp  cp  dp vpp  schedule       micro  recompute  sharding     prec.   MFU %  TFLOP/s   ms/step   tokens/s"


def describe_ranking(found: Search, shown: Sequence[Candidate], train_tokens: int | None) -> Iterator[str]:
    """Yield the table; its columns are fixed, and days are there where a number of tokens is given."""
    has_experts = any(each.choice.ep is not None for each in shown)
    heads = _HEADS.replace("  dp", "  dp  ep") if has_experts else _HEADS
    yield f"rank  {heads}" + ("      days" if train_tokens else "") + "  MiB left  layers"
    for number, each in enumerate(shown, 1):
        yield f"{number:4}  {_row(each, train_tokens)}"
    yield ""
    yield (
        f"{found.num_choices} choices, of which {found.num_predicted} were predicted, and {len(found.candidates)} of "
        "these fit; times and memory are predictions"
    )
    yield from _dropped(found)


def launch_command(words: Sequence[str], world_size: int) -> str:
    """Return the command that starts a run on machines of eight GPUs, or as many alike with fewer as there must be."""
    here = max(size for size in range(1, GPUS_A_MACHINE + 1) if world_size % size == 0)
    launcher = ["torchrun", "--nproc-per-node", str(here)]
    if world_size > here:
        launcher += ["--nnodes", str(world_size // here), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return shlex.join([*launcher, "pretrain_gpt.py", *words])


def ranking_json(found: Search, train_tokens: int | None) -> dict[str, Any]:
    """Return every choice as JSON-ready values: those that fit in order, the others with their reason."""
    return {
        "ranked": [
            dataclasses.asdict(each.choice)
            | {
                "pipeline_schedule": each.config.pipeline_schedule,
                "ms_per_step": 1e3 * each.seconds,
                "tokens_per_second": each.tokens_per_second,
                "tflops_per_gpu": each.prediction.tflops,
                "mfu": each.mfu,
                "days": _days(each, train_tokens),
                "margin_mib": each.margin_bytes / _MIB,
                "used_mib": (each.prediction.used_bytes or 0) / _MIB,
            }
            for each in found.ranked
        ],
        "dropped": [
            dataclasses.asdict(each.choice) | {"kind": each.kind, "reason": each.reason} for each in found.dropped
        ],
        "predicted": found.num_predicted,
    }


def _row(each: Candidate, train_tokens: int | None) -> str:
    choice, days = each.choice, _days(each, train_tokens)
    experts = "" if choice.ep is None else f"{choice.ep:3} "
    row = (
        f"{choice.tp:2} {choice.pp:3} {choice.cp:3} {each.config.data_parallel_size:3} {experts}{choice.chunks:3}  "
        f"{each.config.pipeline_schedule:13} {choice.micro_batch_size:6}  {choice.recompute:9}  {choice.sharding:11}  "
        f"{choice.precision:5}  {100 * each.mfu:6.1f} {each.prediction.tflops:8.1f} {1e3 * each.seconds:9.1f} "
        f"{each.tokens_per_second:10.0f}"
    )
    return (
        row + ("" if days is None else f"{days:10.1f}") + f"{each.margin_bytes // _MIB:10}  {choice.describe_split()}"
    )


def _days(each: Candidate, train_tokens: int | None) -> float | None:
    return None if train_tokens is None else train_tokens / each.tokens_per_second / _DAY


def _dropped(found: Search) -> Iterator[str]:
    """Yield how many choices were dropped for what, with one of each kind."""
    counts = Counter(each.kind for each in found.dropped)
    for kind, count in counts.most_common():
        example = next(each for each in found.dropped if each.kind == kind)
        yield f"dropped, {kind}: {count}, such as {example.choice.describe()}: {example.reason}"
