"""`megatron doctor`: each check of a machine, well and not well, and what nvidia-smi and torch say of its GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from megatron.cli.doctor.benchmarks import (
    OPERATIONS,
    REDUCING,
    REDUCTIONS,
    Bandwidth,
    measure_collective,
    measure_host_copies,
    measure_peer_copies,
    time_work,
)
from megatron.cli.doctor.doctor import main
from megatron.cli.doctor.examination import RankFacts, compare_ranks
from megatron.cli.doctor.gpus import FIELDS, TorchCuda, examine_gpus, parse_driver
from megatron.cli.doctor.host_checks import (
    Finding,
    examine_data,
    examine_machine,
    examine_network,
    examine_save,
    file_system_of,
    gloo_interfaces,
    nccl_interfaces,
)
from megatron.cli.doctor.software_checks import examine_environment, examine_software
from megatron.core.available_cores import count_cores
from megatron.core.device import Device
from megatron.core.process_group import CollectiveCall
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import tensor_parallel_group
from tests.harness.training_run import REPOSITORY, launch_prefix, run_command

MOUNTS = """/dev/sda1 / ext4 rw 0 0
overlay /box overlay rw 0 0
server:/home /home/my\\040data nfs4 rw 0 0
tmpfs /home/my\\040data/fast tmpfs rw 0 0
"""


def subjects(findings: list[Finding], status: str) -> list[str]:
    return [each.subject for each in findings if each.status == status]


@pytest.mark.parametrize(
    ("environment", "warned", "remedy"),
    [
        ({"NCCL_SOCKET_IFNAMES": "eth0"}, "NCCL_SOCKET_IFNAMES", "use NCCL_SOCKET_IFNAME"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "unset"),
        ({"NCCL_DEBUG": "info"}, "NCCL_DEBUG", "NCCL_DEBUG=WARN"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "unset"),
        ({"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS", "OMP_NUM_THREADS=4"),
        ({"MEGATRON_DEVICE": "cpu"}, "MEGATRON_DEVICE", "unset"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "CUDA_DEVICE_MAX_CONNECTIONS", "=1"),
    ],
)
def test_a_variable_that_harms_is_named(environment: Mapping[str, str], warned: str, remedy: str) -> None:
    findings = list(examine_environment(environment, 4, 16, (9, 0)))
    assert subjects(findings, "warning") == [warned]
    assert any(remedy in finding.remedy for finding in findings)


def test_variables_of_nccl_and_of_plugins_are_no_problem() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "NCCL_FASTRAK_NUM_FLOWS": "2", "NCCL_P2P_DISABLE": "0"}
    findings = list(examine_environment(environment, 1, 2, None))
    assert subjects(findings, "warning") == []
    assert findings[0].text == "3 variables; unknown, perhaps of a plugin: NCCL_FASTRAK_NUM_FLOWS".replace("3", "4")


@pytest.mark.parametrize("name", ["sys/fs/cgroup/memory.{}", "sys/fs/cgroup/memory/job/memory.{}"])
def test_a_container_limits_cores_and_memory(name: str, tmp_path: Path) -> None:
    is_old = "job" in name
    names = ("limit_in_bytes", "usage_in_bytes") if is_old else ("max", "current")
    files = {name.format(each): f"{size * 2**30}\n" for each, size in zip(names, (5, 3), strict=True)} | {
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\n",
        "proc/self/cgroup": "4:memory:/job\n0::/\n" if is_old else "0::/\n",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert count_cores(tmp_path) == 1
    findings = list(examine_machine(2, True, tmp_path))
    assert {"cores", "memory"} <= set(subjects(findings, "warning"))
    assert ("2.0 of 64.0 GiB are available, the container is limited to 5.0 GiB") in [
        finding.text for finding in findings
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/etc", "ext4"), ("/box/run", "overlay"), ("/home/my data/a", "nfs4"), ("/home/my data/fast/b", "tmpfs")],
)
def test_the_file_system_of_a_path_is_the_nearest(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_folder_to_save_to_is_tried_and_left_as_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.cli.doctor.host_checks.PROBE_BYTES", 2**20)
    findings = list(examine_save(tmp_path / "not" / "there", f"x {tmp_path.resolve()} overlay rw 0 0\n"))
    assert "is lost with the container" in findings[0].text
    assert findings[0].status == "warning"
    assert subjects(findings, "wrong") == []
    texts = [finding.text for finding in findings]
    assert "a rename replaces a file" in texts
    assert "a file can be mapped" in texts
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for folder in ("file", "file/run", "loop/run", "a" * 300, "dangling", "dangling/run"):
        (finding,) = examine_save(tmp_path / folder, "")
        assert finding.status == "wrong"
        assert finding.text.startswith("cannot be created: ")
    assert next(examine_data(str(tmp_path / ("a" * 300)), "")).text == "cannot be checked: File name too long"


def test_token_files_must_be_there_and_hold_something(tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    assert next(examine_data(prefix, "")).text == f"corpus.bin and corpus.idx not found in {tmp_path}"
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).write_bytes(b"")
    assert next(examine_data(prefix, "")).text == "corpus.bin and corpus.idx without content"
    Path(prefix + ".idx").unlink()
    assert next(examine_data(prefix, "")).text == f"corpus.idx not found in {tmp_path}; corpus.bin without content"
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).write_bytes(b"data")
    assert next(examine_data(prefix, "")).status == "ok"


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("eth", ["eth0", "eth1"]), ("=eth", []), ("=eth1", ["eth1"]), ("^eth,lo", ["ib0"]), ("ib,lo", ["lo", "ib0"])],
)
def test_nccl_chooses_interfaces_by_prefix_name_or_exclusion(value: str, chosen: list[str]) -> None:
    assert nccl_interfaces(value, ["lo", "eth0", "eth1", "ib0"]) == chosen


def test_names_interfaces_and_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        environment = {
            "MASTER_ADDR": "no.such.host.invalid",
            "MASTER_PORT": str(taken.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo,eth9",
        }
        findings = list(examine_network(environment, ["lo"], is_launched=False))
    assert {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", "port"} <= set(subjects(findings, "wrong"))
    assert gloo_interfaces("lo", ["lo"]) == ["lo"]
    assert subjects(list(examine_network({}, ["lo"], is_launched=True)), "skipped") == ["port"]


def test_packages_that_cannot_be_imported_are_said() -> None:
    findings = list(examine_software(lambda name: "wrong ELF class" if name in ("torch", "triton") else None))
    assert "torch" in subjects(findings, "wrong")
    assert all("wrong ELF class" in finding.text for finding in findings if finding.subject == "torch")


def test_ranks_that_differ_are_named() -> None:
    same = RankFacts(0, "a", "cuda 0", (("torch", "2.13.0"),), 100.0)
    assert subjects(list(compare_ranks([same, replace(same, rank=1, device="cuda 1")])), "ok") == [
        "clocks",
        "versions",
        "devices",
    ]
    late = replace(same, rank=1, host="b", seconds=103.0)
    other = replace(same, rank=2, versions=(("torch", "2.12.0"),))
    findings = list(compare_ranks([same, late, other]))
    assert subjects(findings, "warning") == ["clocks"]
    assert subjects(findings, "wrong") == ["versions", "devices"]
    assert "rank 1 on b is ahead of rank 0 on a" in findings[0].remedy
    assert "rank 2 on a has 2.12.0" in findings[1].remedy


def measure_all() -> list[Bandwidth]:
    group = tensor_parallel_group()
    return [measure_collective(operation, 24_000, group, Device("cpu")) for operation in OPERATIONS]


@pytest.mark.full
def test_bandwidths_of_collectives_are_the_same_on_every_rank() -> None:
    first, *others = run_distributed(3, measure_all)
    assert others == [first, first]
    assert [each.operation for each in first] == list(OPERATIONS)
    assert {each.num_bytes for each in first} == {24_000}
    reduced, gathered, _, sent = (replace(each, seconds=2.0).bus_bytes_per_s for each in first)
    assert (reduced, gathered, sent) == pytest.approx((16_000, 8_000, 12_000))


def test_copies_to_a_device_are_timed() -> None:
    found = measure_host_copies(Device("cpu"), 4096)
    assert list(found) == ["host to device", "device to host"]
    assert all(each.seconds > 0 for each in found.values())
    between = measure_peer_copies([Device("cpu", 0), Device("cpu", 1)], 4096)
    assert sorted(between) == [(0, 1), (1, 0)]
    assert all(each.num_bytes == 4096 for each in between.values())


def test_the_command_answers_in_lines_and_in_json(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr("megatron.cli.doctor.software_checks.why_not_importable", lambda module: None)
    assert main(["--data-path", "0.3", str(tmp_path / "none")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "wrong   port: MASTER_PORT is '0'; use a number from 1 to 65535" in lines
    assert lines[-1].startswith("2 wrong, ")
    assert main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["wrong"] == 1
    assert {"status", "subject", "text", "remedy"} == set(report["findings"][0])


@pytest.mark.full
def test_processes_are_examined_together(tmp_path: Path) -> None:
    command = [*launch_prefix(2), REPOSITORY / "tools" / "doctor.py", "--backend", "nccl", "--save", tmp_path]
    result = run_command(command, env={"MEGATRON_DEVICE": "cpu"}).check()
    lines = result.stdout.splitlines()
    assert "warning backend: nccl needs CUDA: gloo is used; omit --backend" in lines
    assert any(line.startswith("ok      all-reduce: gloo over 2 ranks") for line in lines)
    assert "ok      devices: 2 ranks on CPUs" in lines
    assert sum(line.startswith("ok      python: ") for line in lines) == 1
    assert "skipped port: the launcher uses it" in lines


def test_the_command_runs_as_users_call_it() -> None:
    result = run_command([sys.executable, "tools/doctor.py", "--sava", "x"])
    assert result.returncode == 2
    assert result.stderr == "error: unrecognized arguments: --sava x; there is no --sava; did you mean --save?\n"
    assert os.linesep in run_command([sys.executable, "tools/doctor.py", "--help"]).check().stdout


class EventClock:
    """Be CUDA's events: 40 ms pass between any two, whatever the host's clock says."""

    recorded: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded.append("event")

    def synchronize(self) -> None:
        self.recorded.append("wait")

    def elapsed_time(self, end: EventClock) -> float:
        return 40.0


def test_work_on_cuda_is_timed_by_events_around_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", EventClock)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    EventClock.recorded.clear()
    seconds = time_work(lambda: EventClock.recorded.append("launch"), Device("cuda"), repeats=1)
    assert seconds == pytest.approx(0.004)
    once = ["event", *["launch"] * 10, "event", "wait"]
    assert EventClock.recorded == once * 2


def reductions_measured() -> list[tuple[str, ...]]:
    calls: list[CollectiveCall] = []
    group = replace(tensor_parallel_group(), observer=calls.append)
    found = []
    for operation in REDUCING:
        for reduction in REDUCTIONS:
            calls.clear()
            measure_collective(operation, 4096, group, Device("cpu"), reduction)
            found.append((operation, reduction, *sorted({call.reduction for call in calls})))
    calls.clear()
    measure_collective("all_reduce", 4096, group, Device("cpu"))
    return [*found, ("default", *sorted({call.reduction for call in calls}))]


def test_a_reduction_is_measured_as_runs_use_it() -> None:
    assert run_distributed(2, reductions_measured)[0] == [
        ("all_reduce", "sum", "sum"),
        ("all_reduce", "avg", "avg"),
        ("reduce_scatter", "sum", "sum"),
        ("reduce_scatter", "avg", "avg"),
        ("default", "sum"),
    ]


UNITS = {
    "memory.total": "MiB",
    "memory.used": "MiB",
    "clocks.sm": "MHz",
    "clocks.max.sm": "MHz",
    "clocks.applications.graphics": "MHz",
}
HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65.06",
    "memory.total": "81559 MiB",
    "memory.used": "4 MiB",
    "persistence_mode": "Enabled",
    "compute_mode": "Default",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "mig.mode.current": "Disabled",
    "clocks.sm": "345 MHz",
    "clocks.max.sm": "1980 MHz",
    "clocks.applications.graphics": "[N/A]",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "temperature.gpu": "31",
}
H100S = TorchCuda("13.0", "2.28.9", (HEALTHY["name"],) * 2, ((9, 0),) * 2, ("sm_80", "sm_90"), ((1,), (0,)))


def answer(*gpus: dict[str, str]) -> str:
    header = ", ".join(f"{name} [{UNITS[name]}]" if name in UNITS else name for name in FIELDS)
    rows = [
        ", ".join(({"index": str(index)} | HEALTHY | gpu)[name] for name in FIELDS) for index, gpu in enumerate(gpus)
    ]
    return "\n".join([header, *rows]) + "\n"


def problems(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.status, each.subject) for each in findings if each.status != "ok"]


def test_units_are_left_out_of_the_names() -> None:
    first, second = parse_driver(answer({}, {"memory.total": "40960 MiB"}))
    assert (first["index"], first["memory.total"]) == ("0", "81559 MiB")
    assert (second["index"], second["memory.total"]) == ("1", "40960 MiB")


def test_healthy_gpus_have_no_problem() -> None:
    findings = list(examine_gpus(answer({}, {}), H100S, "0,1"))
    assert problems(findings) == []
    lines = [finding.describe() for finding in findings]
    assert "ok      GPUs: torch sees 2 of 2 (CUDA_VISIBLE_DEVICES=0,1): NVIDIA H100 80GB HBM3" in lines
    assert "ok      peers: 1 of 1 pairs reach each other's memory" in lines
    assert "ok      driver: 580.65.06, torch is built for CUDA 13.0" in lines


@pytest.mark.parametrize(
    ("change", "status", "remedy"),
    [
        ({"persistence_mode": "Disabled"}, "warning", "nvidia-smi -pm 1"),
        ({"ecc.mode.current": "Disabled"}, "warning", "nvidia-smi -e 1"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "wrong", "its memory is failing"),
        ({"mig.mode.current": "Enabled"}, "warning", "-mig 0"),
        ({"compute_mode": "Prohibited"}, "wrong", "-c 0"),
        ({"memory.used": "30211 MiB"}, "warning", "stop the process"),
        ({"temperature.gpu": "91"}, "warning", "cooling"),
        ({"pcie.link.width.current": "8"}, "warning", "fewer than 16 lanes"),
        ({"clocks.applications.graphics": "1200 MHz"}, "warning", "up to 1980 MHz"),
    ],
)
def test_a_gpu_that_is_not_well_is_named(change: dict[str, str], status: str, remedy: str) -> None:
    findings = list(examine_gpus(answer({}, change), H100S, None))
    assert problems(findings) == [(status, "GPU 1")]
    assert remedy in findings[-1].remedy


@pytest.mark.parametrize(
    ("seen", "status", "subject", "text"),
    [
        (TorchCuda(None), "wrong", "GPUs", "built for the CPU"),
        (TorchCuda("13.0"), "wrong", "GPUs", "sees none of the 2"),
        (replace(H100S, peers=((), ())), "warning", "peers", "0-1 communicate through host memory"),
        (replace(H100S, architectures=("sm_80", "sm_86")), "wrong", "architecture", "kernels for 9.0"),
        (replace(H100S, names=("A", "B")), "warning", "GPUs", "run on equal GPUs"),
        (replace(H100S, capabilities=((7, 0), (9, 0)), architectures=("sm_70", "sm_90")), "warning", "bf16", "--fp16"),
    ],
)
def test_what_torch_lacks_is_said(seen: TorchCuda, status: str, subject: str, text: str) -> None:
    findings = list(examine_gpus(answer({}, {}), seen, None))
    assert problems(findings) == [(status, subject)]
    assert any(text in finding.describe() for finding in findings)


def test_ptx_runs_on_later_gpus() -> None:
    seen = replace(H100S, architectures=("sm_80", "compute_80"))
    assert problems(list(examine_gpus(answer({}, {}), seen, None))) == []


@pytest.mark.parametrize(("driver", "is_old"), [("570.86.15", True), ("580.12", False)])
def test_a_driver_older_than_torchs_cuda_is_wrong(driver: str, is_old: bool) -> None:
    findings = list(examine_gpus(answer({"driver_version": driver}), H100S, None))
    assert problems(findings) == ([("wrong", "driver")] if is_old else [])


def test_without_a_driver_nothing_is_looked_at() -> None:
    assert problems(list(examine_gpus(None, TorchCuda(None), None))) == [("skipped", "GPUs")]


def test_a_driver_that_does_not_answer_is_said() -> None:
    assert ("warning", "nvidia-smi") in problems(list(examine_gpus("", H100S, None)))
