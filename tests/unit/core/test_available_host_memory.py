"""What can be had of a machine's memory: what Linux says, or less where a control group around the process has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.available_host_memory import available_bytes, machine_memory

MIB = 2**20


def make_machine(root: Path, groups: str = "", **limits: tuple[int | str, int, int]) -> Path:
    """Write what a machine with 100 MiB says, and the files of its control groups by folder."""
    figures = f"MemTotal: {200 * 1024} kB\nMemAvailable: {100 * 1024} kB\nNothing:\nWords: of other kinds\n"
    files = {"proc/meminfo": figures, "proc/self/cgroup": groups}
    for folder, (limit, used, cached) in limits.items():
        is_old = folder.startswith("memory")
        names = (
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
            if is_old
            else ("max", "current", "inactive_file")
        )
        place = f"sys/fs/cgroup/{folder}/memory"
        files |= {f"{place}.{names[0]}": f"{limit}\n", f"{place}.{names[1]}": f"{used}\n"}
        files[f"{place}.stat"] = f"anon 7\n{names[2]} {cached}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, 100),
        ("0::/\n", {".": ("max", 5, 0)}, 100),
        # Cached files can be given up.
        ("0::/\n", {".": (80 * MIB, 50 * MIB, 20 * MIB)}, 50),
        ("0::/job/step\n", {"job": (60 * MIB, 10 * MIB, 0), "job/step": ("max", 9, 0)}, 50),
        ("5:cpu,memory:/job\n0::/\n", {"memory/job": (30 * MIB, 10 * MIB, 0), "memory": (2**63 - 4096, 0, 0)}, 20),
        # The name is the host's, and only the container's own group is seen.
        ("4:memory:/docker/abc\n", {"memory": (40 * MIB, 10 * MIB, 0)}, 30),
        ("0::/\n", {".": (10 * MIB, 11 * MIB, 0)}, 0),
        # A group's name may have colons.
        ("0::/job:7\n", {"job:7": (30 * MIB, 10 * MIB, 0)}, 20),
        # A group that limits something else.
        ("3:cpu:/job\n", {"memory/job": (30 * MIB, 10 * MIB, 0)}, 100),
    ],
)
def test_the_smaller_of_machine_and_control_group(
    tmp_path: Path, groups: str, limits: dict[str, tuple[int | str, int, int]], expected: int
) -> None:
    assert available_bytes(make_machine(tmp_path, groups, **limits)) == expected * MIB


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"job": (60 * MIB, 10 * MIB, 0), "job/step": (90 * MIB, 9, 0)}, 60 * MIB),
        # As much as is installed is no limit.
        ({"job": (200 * MIB, 0, 0)}, None),
        ({"job": (200 * MIB - 1, 0, 0)}, 200 * MIB - 1),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, limits: dict[str, tuple[int, int, int]], expected: int | None) -> None:
    memory = machine_memory(make_machine(tmp_path, "0::/job/step\n", **limits))
    assert memory is not None
    assert (memory.installed, memory.limit) == (200 * MIB, expected)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
