"""How many cores a process may use, how many of them are idle, and how many threads its operations take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.core import available_cores
from megatron.core.available_cores import count_cores, measure_idle_cores, threads_per_process

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/job/step\n", {"job/cpu.max": "350000 100000", "job/step/cpu.max": "max 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_quota_of_a_container_counts_in_whole_cores(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_cores, "_allowed", lambda: set(range(64)))
    written = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}}
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cores(tmp_path) == expected


def test_idle_cores_are_those_of_the_affinity_during_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    # The columns are user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice.
    stat.write_text("cpu  9\ncpu0 10 0 0 50 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu2 0 0 0 7 0 0 0 0 0 0\nintr 1\n")
    later = "cpu  9\ncpu0 30 0 0 90 40 0 0 0 7 0\ncpu1 0 0 10 20 0 0 0 10 0 0\ncpu2 5 0 0 7 0 0 0 0 0 0\nintr 1\n"
    monkeypatch.setattr(available_cores, "_allowed", lambda: {0, 1})
    monkeypatch.setattr(available_cores.time, "sleep", lambda seconds: stat.write_text(later))
    assert measure_idle_cores(root=tmp_path) == pytest.approx(0.8 + 0.5)
    # Nothing moves any more: the system does not tell.
    assert measure_idle_cores(root=tmp_path) is None
    stat.unlink()
    monkeypatch.setattr(available_cores.time, "sleep", lambda seconds: None)
    assert measure_idle_cores(root=tmp_path) is None


def test_this_machine_tells_how_many_cores_are_idle() -> None:
    idle = measure_idle_cores(0.1)
    assert idle is None or 0.0 <= idle <= ALL


@pytest.mark.parametrize(
    ("most", "cores", "idle", "processes", "expected"),
    [
        (2, 2, 1.9, 1, 2),
        (2, 2, 1.5, 1, 1),
        (2, 2, 0.0, 1, 1),
        (2, 2, None, 1, 2),
        (16, 64, 64.0, 1, 16),
        (64, 64, 31.9, 4, 8),
        (64, 8, 40.0, 2, 4),
        (2, 2, 2.0, 8, 1),
    ],
)
def test_processes_share_the_idle_cores(
    most: int, cores: int, idle: float | None, processes: int, expected: int
) -> None:
    assert threads_per_process(most, cores, idle, processes) == expected
