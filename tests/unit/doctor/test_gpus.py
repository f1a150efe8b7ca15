"""What is made of nvidia-smi's answers, which follow its documented csv format, and of what torch sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.cli.doctor.gpus import FIELDS, TorchCuda, examine_gpus, parse_driver
from megatron.cli.doctor.host_checks import Finding

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
        ({"memory.used": "30211 MiB"}, "warning", "end the process"),
        ({"temperature.gpu": "91"}, "warning", "cooling"),
        ({"pcie.link.width.current": "8"}, "warning", "less than 16 lanes"),
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
        (TorchCuda("13.0"), "wrong", "GPUs", "sees none of 2"),
        (replace(H100S, peers=((), ())), "warning", "peers", "0-1 go through the machine's memory"),
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
