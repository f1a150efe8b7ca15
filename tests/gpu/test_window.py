"""The runner of the GPU window, its report and its predictions; and all of it on emulated devices."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.emulated_cuda.build import BuildError, built_libraries
from tests.gpu.window import findings
from tests.gpu.window.command import PREDICTIONS, main
from tests.gpu.window.findings import append_line, of_kind, read_lines
from tests.gpu.window.markdown import write_report
from tests.gpu.window.parts.environment import why_no_float8
from tests.gpu.window.parts.profiled import busy_time, kind_of_kernel
from tests.gpu.window.plan import PARTS, Part, choose_parts, part_time, planned_seconds
from tests.gpu.window.runner import FINDINGS, LOG, REPORT, UNAVAILABLE_STATUS, Settings, run_window
from tests.gpu.window.shapes import attention_shapes, gpt2_runs, headline_runs, linear_layers, shapes_of
from tests.gpu.window.train import largest_difference
from tests.harness.training_run import REPOSITORY, run_command

A, B, C = (Part(number, 10, "features", f"Part {number}", "something") for number in range(3))
WRITES = (
    "import json, sys\n"
    "line = {'kind': 'finding', 'part': int(sys.argv[1]), 'name': 'a', 'status': 'passed', 'source': 'measured'}\n"
    "open(sys.argv[2], 'a').write(json.dumps(line) + chr(10))\n"
)


def run(
    folder: Path, codes: Sequence[str], seconds: float = 60.0, parts: Sequence[Part] = (A, B, C)
) -> tuple[list[findings.Line], list[findings.Line]]:
    """Run parts whose processes execute some code; return the findings and how the parts ended."""

    def command(part: Part, _: float) -> list[str]:
        return [sys.executable, "-S", "-c", codes[part.number], str(part.number), str(folder / FINDINGS)]

    run_window(parts, Settings(folder, seconds), command=command, say=lambda line: None)
    lines, torn = read_lines(folder / FINDINGS)
    assert not torn
    return list(of_kind(lines, "finding")), list(of_kind(lines, "part"))


def test_parts_that_crash_cost_no_other_part_its_findings(tmp_path: Path) -> None:
    crashed = "import os\nprint('about to crash')\nos.kill(os.getpid(), 11)"
    found, ended = run(tmp_path, [crashed, WRITES + "raise SystemExit(3)", WRITES])
    assert [line["part"] for line in found] == [1, 2]
    assert [line["status"] for line in ended] == [findings.CRASHED, findings.CRASHED, findings.COMPLETED]
    assert "SIGSEGV" in ended[0]["reason"]
    assert ended[1]["reason"].startswith("exit status 3")
    log = (tmp_path / LOG).read_text()
    assert "part 0, Part 0: crashed" in log
    assert "about to crash" in log
    assert "part 2" not in log


def test_a_part_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hangs = (
        f"{WRITES}import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    parts = (Part(0, 1, "features", "Part 0", "something"),)
    begun = time.monotonic()
    found, ended = run(tmp_path, [hangs], 3.0, parts)
    assert time.monotonic() - begun < 30.0
    assert [line["name"] for line in found] == ["a"]
    assert ended[0]["status"] == findings.TIMED_OUT
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10.0
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_window_that_is_ended_ends_its_part(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid(), 15)\ntime.sleep(600)\n"
    )
    with pytest.raises(SystemExit, match="143"):
        run(tmp_path, [code], parts=(A,))
    assert not _is_running(int(pid_file.read_text()))


def test_a_part_without_a_gpu_is_unavailable(tmp_path: Path) -> None:
    _, ended = run(tmp_path, [f"print('no CUDA device')\nraise SystemExit({UNAVAILABLE_STATUS})"], parts=(A,))
    assert (ended[0]["status"], ended[0]["reason"]) == (findings.UNAVAILABLE, "no CUDA device")
    assert not (tmp_path / LOG).exists()
    write_report(tmp_path / FINDINGS, tmp_path / "none.json", tmp_path / REPORT)
    text = (tmp_path / REPORT).read_text()
    assert "**Unavailable: no GPU was used.** no CUDA device" in text
    assert "Nothing was compared." in text
    assert f"## {A.number}. {A.title}" not in text


def test_parts_after_the_end_of_the_window_are_not_run(tmp_path: Path) -> None:
    found, ended = run(tmp_path, [WRITES, WRITES], 0.0, (A, B))
    assert [line["status"] for line in ended] == [findings.NOT_RUN, findings.NOT_RUN]
    assert found == []


@pytest.mark.parametrize("seconds", [60.0, 600.0])
@pytest.mark.parametrize("hangs", [False, True])
def test_each_part_keeps_its_time_whatever_the_earlier_ones_do(seconds: float, hangs: bool) -> None:
    planned, left = planned_seconds(PARTS, seconds), seconds
    for index, part in enumerate(PARTS):
        allowed = part_time(part, PARTS[index + 1 :], planned, left)
        assert allowed.limit >= planned[part.number] - 1e-9
        assert allowed.planned <= allowed.limit
        left -= allowed.limit if hangs else planned[part.number]
    assert left >= -1e-9


def test_the_plan_is_that_of_ten_minutes() -> None:
    planned = planned_seconds(PARTS, 600.0)
    assert [round(planned[part.number]) for part in PARTS] == [10, 20, 50, 40, 30, 60, 60, 80, 30, 70, 60]
    assert [part.number for part in choose_parts(only=(3, 5), skip=(5,))] == [3]
    with pytest.raises(ValueError, match="there is no part 12; the parts are 0 to 10"):
        choose_parts(skip=(12,))


def test_parts_are_listed_and_wrong_ones_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--skip", "9"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "12"])
    assert "there is no part 12" in capsys.readouterr().err


def test_a_machine_without_the_emulator_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> Path:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")

    monkeypatch.setattr("tests.gpu.window.command.built_libraries", build)
    with pytest.raises(SystemExit, match="2"):
        main(["--emulate-cuda", "--output", str(tmp_path)])
    assert "--emulate-cuda: no C++ compiler was found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def a_window(path: Path, source: str, **finding: object) -> None:
    append_line(path, {"kind": "window", "date": "today", "commit": "c0ffee", "seconds": 600.0, "parts": [2]})
    device = {"source": source, "name": "NVIDIA H200", "figures_of": "h200", "capability": "9.0", "memory_gib": 139.8}
    append_line(path, {"kind": "device", "part": 2, "torch": "2.11.0", "cuda": "13.0", **device})
    append_line(path, {"kind": "finding", "part": 2, "source": source, **finding})
    append_line(path, {"kind": "part", "part": 2, "status": "completed", "reason": "", "seconds": 5.0, "limit_s": 9.0})


def report_of(folder: Path) -> str:
    (folder / "predictions.json").write_text(json.dumps({"full": {"h200": {"qkv": 2.0}}}))
    write_report(folder / FINDINGS, folder / "predictions.json", folder / REPORT)
    return (folder / REPORT).read_text()


GEMM = {"name": "8B qkv, forward, bf16", "status": "recorded", "value": 3.0, "unit": "ms", "key": "qkv"}


def test_a_measured_figure_stands_next_to_its_prediction(tmp_path: Path) -> None:
    a_window(tmp_path / FINDINGS, "measured", **GEMM)
    text = report_of(tmp_path)
    assert "**Measured on NVIDIA H200**" in text
    assert "| figure | measured | predicted | unit | measured / predicted | details |" in text
    assert "| 8B qkv, forward, bf16 | 3 | 2 | ms | 1.50 |  |" in text
    brief = text.partition("### Results in brief")[2].partition("## Terms")[0]
    assert "- 2. GEMMs: Forward GEMMs in bf16 take 1.50 times the predicted time in the median of 1 shapes" in brief
    assert "Nothing failed." in text
    assert "`qkv` and `proj` are the linear layers of attention" in text


def test_an_emulated_figure_has_no_ratio_and_no_sentence(tmp_path: Path) -> None:
    a_window(tmp_path / FINDINGS, "emulated", **GEMM)
    text = report_of(tmp_path)
    assert "**Emulated NVIDIA H200: nothing here was measured on a GPU.**" in text
    assert "| figure | emulated | predicted for a GPU | unit |\n" in text
    assert "| 8B qkv, forward, bf16 | 3 | 2 | ms |\n" in text
    assert "times the predicted time" not in text


def test_what_failed_is_told_first_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / FINDINGS
    reason = "off by 5.0e-01, and 3e-02 is allowed"
    known = {"difference": 0.5, "tolerance": 0.03, "compared": "its twin", "reason": reason}
    a_window(path, "measured", name="swiglu, bfloat16", status="failed", **known)
    with open(path, "a") as lines:
        lines.write('{"kind": "finding", "part"')
    text = report_of(tmp_path)
    assert f"- part 2, swiglu, bfloat16: {reason}" in text.partition("## Terms")[0]
    assert "| swiglu, bfloat16 | **failed** | 0.5 | 0.03 | its twin |" in text
    assert "1 lines of the findings are incomplete and left out" in text


def test_numbers_that_are_not_finite_are_written(tmp_path: Path) -> None:
    path = tmp_path / FINDINGS
    append_line(path, {"kind": "finding", "value": findings.finite(float("nan")), "other": findings.finite(1.5)})
    append_line(path, findings.finite({"losses": [1.0, float("inf")]}))
    assert read_lines(path) == ([{"kind": "finding", "value": "nan", "other": 1.5}, {"losses": [1.0, "inf"]}], 0)


def test_kernels_are_told_apart_by_name() -> None:
    assert kind_of_kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT") == "GEMMs"
    assert kind_of_kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16") == "attention"
    assert kind_of_kernel("_norm_forward_program") == "other kernels"


def test_busy_time_counts_overlapping_kernels_once() -> None:
    assert busy_time([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == (4.0, 6.0)


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        ((8, 0), {"delayed", "rowwise", "blockwise", "mxfp8"}),
        ((9, 0), {"mxfp8"}),
        ((10, 0), {"blockwise"}),
    ],
)
def test_what_a_gpu_type_cannot_do_is_unsupported(capability: tuple[int, int], missing: set[str]) -> None:
    from megatron.core.ops.fp8_tensor import ROWS, SEGMENTS_OF_32, SEGMENTS_OF_128, WHOLE

    recipes = {"delayed": WHOLE, "rowwise": ROWS, "blockwise": SEGMENTS_OF_128, "mxfp8": SEGMENTS_OF_32}
    assert {name for name, blocks in recipes.items() if why_no_float8(capability, blocks)} == missing


def test_losses_that_are_missing_or_not_finite_are_far_apart() -> None:
    assert largest_difference([2.0, 3.03], [2.0, 3.0]) == pytest.approx(0.01)
    assert largest_difference([2.0], [2.0, 3.0]) == float("inf")
    assert largest_difference([2.0, float("nan")], [2.0, 3.0]) == float("inf")
    assert largest_difference([], []) == float("inf")


@pytest.mark.parametrize("gpu", ["h100-80gb", "h200", "a100-80gb", "b200"])
def test_every_figure_has_a_prediction(gpu: str) -> None:
    """The predictions are those of the shapes as they are: after a change, run tools/gpu_window.py --predict again."""
    from megatron.planner.gpu import find_gpu

    known = json.loads(PREDICTIONS.read_text())["full"][gpu]
    shapes, memory = shapes_of(small=False), find_gpu(gpu).memory_bytes
    wanted = {"kernel", "copy", "host copy", "large matmul"}
    wanted |= {f"{shape.name}, forward, bf16" for shape in linear_layers(shapes)}
    wanted |= {f"{count} experts fc1, weight gradient, grouped bf16" for count in (8, 16, 128)}
    wanted |= {f"attention, flash causal, {call.name}, backward" for call in attention_shapes(small=False)}
    runs = (*gpt2_runs(shapes, small=False), *headline_runs(shapes, memory, small=False))
    wanted |= {f"{timed.key}/memory" for timed in runs if find_gpu(gpu).float8_flops or not timed.needs_float8}
    assert wanted <= set(known)
    assert all(value > 0 for value in known.values())
    # The optimizer's state, NCCL and fragments need the rest.
    assert all(value < 0.93 * memory / 2**30 for key, value in known.items() if key.endswith("/memory"))


@pytest.fixture
def libraries() -> Path:
    try:
        return built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.full
def test_a_machine_without_a_gpu_gets_a_report(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        "tools/gpu_window.py",
        "--output",
        tmp_path,
        "--only",
        "0,6",
        "--seconds",
        "300",
    ]
    run_command(command, timeout_s=300.0, cwd=REPOSITORY, env={"CUDA_VISIBLE_DEVICES": ""}).check()
    lines, _ = read_lines(tmp_path / FINDINGS)
    assert {line["status"] for line in of_kind(lines, "part")} == {findings.UNAVAILABLE}
    assert "finds no CUDA device" in (tmp_path / REPORT).read_text()


@pytest.mark.full
def test_a_window_on_emulated_devices(libraries: Path, tmp_path: Path) -> None:
    """Parts that take little there; one of them is made to crash, which disturbs no other."""
    parts = (0, 1, 2, 4, 5, 8)
    command: list[str | Path] = [sys.executable, "tools/gpu_window.py", "--emulate-cuda", "--output", tmp_path]
    command += ["--seconds", "1200"]
    command += ["--only", ",".join(map(str, parts)), "--crash-part", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_DEVICE"}
    run_command(command, timeout_s=1300.0, cwd=REPOSITORY, env=environment).check()
    lines, torn = read_lines(tmp_path / FINDINGS)
    assert not torn
    ended = {line["part"]: line["status"] for line in of_kind(lines, "part")}
    assert ended == dict.fromkeys(parts, findings.COMPLETED) | {4: findings.CRASHED}
    found = list(of_kind(lines, "finding"))
    assert {line["part"] for line in found} == set(parts) - {4}
    assert {line["source"] for line in found} == {"emulated"}
    statuses = {line["name"]: line["status"] for line in found}
    assert statuses["Triton works"] == findings.PASSED
    assert statuses["FP8 matmul, delayed and tensorwise"] == findings.PASSED
    assert statuses["FP8 matmul, mxfp8"] == findings.UNSUPPORTED
    assert statuses["losses with CUDA graphs, 1 micro-batch"] == findings.PASSED
    assert statuses["345M qkv, forward, bf16"] == findings.RECORDED
    text = (tmp_path / REPORT).read_text()
    assert "nothing here was measured on a GPU" in text
    assert "part 4 crashed" in text


@pytest.mark.long
def test_the_gpu_tests_run_on_emulated_devices(libraries: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--emulate-cuda", "-rs", "-p", "no:cacheprovider"]
    result = run_command([*command, "tests/gpu"], timeout_s=1300.0, cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout[-8000:]
    assert "5 skipped" in result.stdout
    assert "a speed is measured on a GPU only" in result.stdout
