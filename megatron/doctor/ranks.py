"""What the processes of a run must have in common: clocks, versions, a backend that works, a device for each."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_objects, all_reduce, barrier
from megatron.core.device import Device
from megatron.core.process_group import Group
from megatron.doctor.bandwidth import REDUCTIONS, measure_collective
from megatron.doctor.finding import Finding, judge

_MAX_SKEW_S = 1.0
_QUICK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class RankFacts:
    """Hold what one process says of itself; ``seconds`` is its clock when all had met."""

    rank: int
    host: str
    device: str
    versions: tuple[tuple[str, str], ...]
    seconds: float


def examine_ranks(group: Group, device: Device, backend: str, nccl: str | None) -> list[Finding]:
    """Return how the processes of the group fit together, the same on every rank; collective."""
    total = torch.full((1,), float(group.rank + 1), device=device.torch_device)
    all_reduce(total, group)
    versions = (("python", platform.python_version()), ("torch", torch.__version__), ("nccl", nccl or "none"))
    barrier(group)
    facts = RankFacts(group.rank, platform.node(), f"{device.kind} {device.index}", versions, time.time())
    ranks = all_gather_objects(facts, group)
    # NCCL alone computes the two reductions by different algorithms.
    reductions = REDUCTIONS if backend == "nccl" else REDUCTIONS[:1]
    speeds = [measure_collective("all_reduce", _QUICK_BYTES, group, device, each) for each in reductions]
    shown = ", ".join(f"{each.upper()} {speed.bus_bytes_per_s / 1e9:.2f}" for each, speed in zip(reductions, speeds))
    expected = group.size * (group.size + 1) / 2
    text = f"{backend} over {group.size} ranks, {shown} GB/s per rank"
    sums = all_gather_objects(total.item(), group)
    wrong = [str(rank) for rank, value in enumerate(sums) if value != expected]
    remedy = f"the sum {expected:.0f} was not what ranks {', '.join(wrong)} got: look at NCCL_* and the network"
    return [judge("all-reduce", bool(wrong), text, remedy, "wrong"), *compare_ranks(ranks)]


def compare_ranks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield where processes differ that should not."""
    first = min(ranks, key=lambda each: each.seconds)
    last = max(ranks, key=lambda each: each.seconds)
    skew = last.seconds - first.seconds
    hosts = sorted({each.host for each in ranks})
    text = f"{len(hosts)} machines are {skew:.3f} s apart at most, the barrier's own time included"
    remedy = f"rank {last.rank} on {last.host} is ahead of rank {first.rank} on {first.host}: run chrony or ntpd"
    yield judge("clocks", skew > _MAX_SKEW_S, text, remedy)
    for name in dict(ranks[0].versions):
        counts = Counter(dict(each.versions)[name] for each in ranks)
        text = f"{name} " + ", ".join(f"{version} on {count} ranks" for version, count in sorted(counts.items()))
        odd = counts.most_common()[-1][0]
        where = next(each for each in ranks if dict(each.versions)[name] == odd)
        remedy = f"rank {where.rank} on {where.host} has {odd}: install the same everywhere"
        yield judge("versions", len(counts) > 1, text, remedy, "wrong")
    places = Counter((each.host, each.device) for each in ranks if not each.device.startswith("cpu"))
    shared = [f"{device} of {host}" for (host, device), count in places.items() if count > 1]
    text = f"{len(places)} devices for {len(ranks)} ranks" if places else f"{len(ranks)} ranks on CPUs"
    remedy = f"{', '.join(shared)} has several ranks: start one for each GPU with torchrun --nproc-per-node"
    yield judge("devices", bool(shared), text, remedy, "wrong")
