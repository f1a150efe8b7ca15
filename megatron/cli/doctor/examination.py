"""Run all health checks of a node, and the checks that the ranks of a run make together."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from megatron.cli.doctor.benchmarks import REDUCTIONS, measure_collective, measure_host_copies, measure_peer_copies
from megatron.cli.doctor.gpus import TorchCuda, examine_gpus, query_driver, query_torch
from megatron.cli.doctor.host_checks import (
    Finding,
    examine_data,
    examine_machine,
    examine_network,
    examine_save,
    interface_names,
    judge,
)
from megatron.cli.doctor.software_checks import examine_environment, examine_software
from megatron.core.available_cores import count_cores
from megatron.core.collectives import all_gather_objects, all_reduce, barrier
from megatron.core.device import Device, select_device
from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group
from megatron.training import LaunchEnvironment, initialize_distributed, shut_down

_MAX_SKEW_S = 1.0
_QUICK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class RankFacts:
    """Description of one rank; ``seconds`` is its clock after a barrier."""

    rank: int
    host: str
    device: str
    versions: tuple[tuple[str, str], ...]
    seconds: float


def examine_ranks(group: Group, device: Device, backend: str, nccl: str | None) -> list[Finding]:
    """Check an all-reduce over the group and compare its ranks; collective, with the same result on every rank."""
    total = torch.full((1,), float(group.rank + 1), device=device.torch_device)
    all_reduce(total, group)
    versions = (("python", platform.python_version()), ("torch", torch.__version__), ("nccl", nccl or "none"))
    barrier(group)
    facts = RankFacts(group.rank, platform.node(), f"{device.kind} {device.index}", versions, time.time())
    ranks = all_gather_objects(facts, group)
    # Only NCCL uses different algorithms for the two reductions.
    reductions = REDUCTIONS if backend == "nccl" else REDUCTIONS[:1]
    speeds = [measure_collective("all_reduce", _QUICK_BYTES, group, device, each) for each in reductions]
    shown = ", ".join(f"{each.upper()} {speed.bus_bytes_per_s / 1e9:.2f}" for each, speed in zip(reductions, speeds))
    expected = group.size * (group.size + 1) / 2
    text = f"{backend} over {group.size} ranks, {shown} GB/s per rank"
    sums = all_gather_objects(total.item(), group)
    wrong = [str(rank) for rank, value in enumerate(sums) if value != expected]
    remedy = (
        f"ranks {', '.join(wrong)} received a wrong sum ({expected:.0f} is correct): check the NCCL_* variables and "
        "the network"
    )
    return [judge("all-reduce", bool(wrong), text, remedy, "wrong"), *compare_ranks(ranks)]


def compare_ranks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield findings on the clocks, versions and devices of the ranks."""
    first = min(ranks, key=lambda each: each.seconds)
    last = max(ranks, key=lambda each: each.seconds)
    skew = last.seconds - first.seconds
    hosts = sorted({each.host for each in ranks})
    text = f"the clocks of {len(hosts)} nodes differ by at most {skew:.3f} s, including the time of the barrier"
    remedy = f"rank {last.rank} on {last.host} is ahead of rank {first.rank} on {first.host}: run chrony or ntpd"
    yield judge("clocks", skew > _MAX_SKEW_S, text, remedy)
    for name in dict(ranks[0].versions):
        counts = Counter(dict(each.versions)[name] for each in ranks)
        text = f"{name} " + ", ".join(f"{version} on {count} ranks" for version, count in sorted(counts.items()))
        odd = counts.most_common()[-1][0]
        where = next(each for each in ranks if dict(each.versions)[name] == odd)
        remedy = f"rank {where.rank} on {where.host} has {odd}: install the same version on all nodes"
        yield judge("versions", len(counts) > 1, text, remedy, "wrong")
    places = Counter((each.host, each.device) for each in ranks if not each.device.startswith("cpu"))
    shared = [f"{device} of {host}" for (host, device), count in places.items() if count > 1]
    text = f"{len(places)} devices for {len(ranks)} ranks" if places else f"{len(ranks)} ranks on CPUs"
    remedy = f"{', '.join(shared)} has several ranks: start one rank per GPU with torchrun --nproc-per-node"
    yield judge("devices", bool(shared), text, remedy, "wrong")


_COPY_BYTES = 256 * 2**20
_MIN_HOST_GB_S = 4.0
_MIN_PEER_GB_S = 8.0
_TIMEOUT_MINUTES = 2


@dataclass(frozen=True)
class Request:
    """Subjects to check; ``backend`` None selects the device's default backend."""

    environment: Mapping[str, str]
    launch: LaunchEnvironment
    save: Path | None = None
    data_prefixes: Sequence[str] = ()
    backend: str | None = None


def examine(request: Request) -> list[Finding]:
    """Return the findings on this node or, with several ranks, on all nodes and on their communication.

    With several ranks the function is collective, and rank 0 has the complete result. With several nodes, the name of
    the node precedes the subject of each finding.
    """
    seen = query_torch()
    findings: list[Finding] = []
    if not request.launch.local_rank:
        findings = list(_examine_here(request, seen))
    return findings if request.launch.world_size == 1 else _examine_together(request, seen, findings)


def _examine_here(request: Request, seen: TorchCuda) -> Iterator[Finding]:
    environment, launch = request.environment, request.launch
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    local_processes = int(local) if local.isdecimal() and int(local) else 1
    capability = min(seen.capabilities, default=None)
    mounts_file = Path("/proc/mounts")
    mounts = mounts_file.read_text() if mounts_file.exists() else ""
    yield from examine_software()
    yield from examine_gpus(query_driver(), seen, environment.get("CUDA_VISIBLE_DEVICES"))
    yield from _examine_copies(seen)
    yield from examine_environment(environment, local_processes, count_cores(), capability)
    yield from examine_machine(local_processes, bool(seen.names))
    yield from examine_network(environment, interface_names(), launch.world_size > 1)
    if request.save is None:
        yield Finding("skipped", "--save", "not set: no checkpoint folder is checked")
    else:
        yield from examine_save(request.save, mounts)
    if not request.data_prefixes:
        yield Finding("skipped", "--data-path", "not set: no token files are checked")
    for prefix in request.data_prefixes:
        yield from examine_data(prefix, mounts)


def _examine_copies(seen: TorchCuda) -> Iterator[Finding]:
    if not seen.names:
        yield Finding("skipped", "bandwidth", "there is no GPU for the copy test")
        return
    devices = [Device("cuda", index) for index in range(len(seen.names))]
    for device in devices:
        for name, found in measure_host_copies(device, _COPY_BYTES).items():
            speed = found.bus_bytes_per_s / 1e9
            remedy = "check the PCIe link and the NUMA node of the memory (nvidia-smi topo -m)"
            yield judge(f"GPU {device.index}", speed < _MIN_HOST_GB_S, f"{name} {speed:.1f} GB/s", remedy)
    if len(devices) > 1:
        speeds = {pair: each.bus_bytes_per_s / 1e9 for pair, each in measure_peer_copies(devices, _COPY_BYTES).items()}
        (source, target), slowest = min(speeds.items(), key=lambda item: item[1])
        text = f"from {slowest:.1f} GB/s (GPU {source} to {target}) to {max(speeds.values()):.1f} GB/s"
        yield judge("between GPUs", slowest < _MIN_PEER_GB_S, text, "check nvidia-smi topo -m and NCCL_P2P_DISABLE")


def _examine_together(request: Request, seen: TorchCuda, findings: Sequence[Finding]) -> list[Finding]:
    launch = request.launch
    try:
        device = select_device(launch.local_rank or 0)
        device.make_current()
        backend = request.backend or device.default_backend
        warning = initialize_distributed(launch, device, backend, _TIMEOUT_MINUTES)
        world = create_parallel_state(ParallelSizes(dp=launch.world_size), timedelta(minutes=_TIMEOUT_MINUTES)).world
        together = examine_ranks(world, device, "gloo" if warning else backend, seen.nccl)
        by_machine = all_gather_objects((platform.node(), list(findings)), world)
    except (ConfigurationError, RuntimeError, OSError) as error:
        first = str(error).splitlines()[0]
        remedy = "check that every node can reach MASTER_ADDR, and check NCCL_SOCKET_IFNAME and the firewall"
        text = f"rank {launch.rank} of {launch.world_size} cannot join: {first}"
        return [*findings, Finding("wrong", "processes", text, remedy)]
    finally:
        shut_down()
    warned = [Finding("warning", "backend", f"{backend} needs CUDA: gloo is used", "omit --backend")]
    several = len({host for host, _ in by_machine}) > 1
    here = [
        dataclasses.replace(finding, subject=f"{host} {finding.subject}") if several else finding
        for host, found in by_machine
        for finding in found
    ]
    return [*here, *(warned if warning else []), *together]
