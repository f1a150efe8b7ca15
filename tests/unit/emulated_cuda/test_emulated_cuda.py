"""The emulator's own checks, and trainings on emulated devices against the CPU."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.environment import REPOSITORY, emulated_environment
from tests.harness.training_run import launch_prefix, run_command, run_training

# The first use compiles the library, which takes about two minutes.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Path:
    """Build the emulator, or skip where it cannot be: on a CUDA build of torch, or without a compiler."""
    try:
        return built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("file", "gpu"),
    [
        ("checks.py", "h100"),
        ("checks_attention.py", "h100"),
        pytest.param("checks_gemm.py", "a100", marks=pytest.mark.long),
        *(("checks_gemm.py", gpu) for gpu in ("h100", "b200")),
    ],
)
def test_checks_of_the_emulator(file: str, gpu: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/emulated_cuda/{file}"]
    result = run_command(command, timeout_s=300.0, env=emulated_environment(gpu=gpu, triton=False), cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_checks_of_triton_programs(gpu: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/emulated_cuda/checks_triton.py"]
    result = run_command(command, timeout_s=300.0, env=emulated_environment(2, gpu), cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout


def test_checks_of_two_ranks() -> None:
    command = [*launch_prefix(2), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = run_command(
        [*command, "tests/emulated_cuda/checks_ranks.py"],
        timeout_s=600.0,
        env=emulated_environment(2, triton=False),
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("handling", "status"), [("1", -signal.SIGABRT), ("0", 0)])
def test_the_watchdog_ends_a_process_after_an_abort(handling: str, status: int) -> None:
    code = (
        "import torch\n"
        "import torch.distributed as dist\n"
        "def make():\n"
        "    dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=1)\n"
        "    dist.all_reduce(torch.ones(4, device='cuda'))\n"
        "make()\n"
        "dist.distributed_c10d._abort_process_group()\n"
        "make()\n"
    )
    env = {**emulated_environment(triton=False), "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling}
    result = run_command([sys.executable, "-c", code], timeout_s=60.0, env=env)
    assert result.returncode == status, result.stderr
    assert ("emulated CUDA: torch's watchdog has ended this process" in result.stderr) == (status != 0)


def test_reports_end_a_process_with_an_error() -> None:
    code = (
        "import torch\n"
        "side = torch.cuda.Stream()\n"
        "x = torch.ones(4, device='cuda')\n"
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): x.mul_(2)\n"
        "try: x.sum()\n"
        "except RuntimeError: pass\n"
    )
    result = run_command([sys.executable, "-c", code], timeout_s=60.0, env=emulated_environment(triton=False))
    assert result.returncode == 86
    assert "race: aten::sum on the default stream reads self" in result.stderr


FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "3"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "127", "--eval-iters", "0", "--hidden-dropout", "0.1", "--attention-dropout", "0"),
)
LAYOUTS = {
    "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "data": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "context": ("--context-parallel-size", "2", "--cp-comm-type", "p2p"),
    "fully sharded": ("--use-torch-fsdp2",),
}


@pytest.fixture(scope="module")
def losses_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    metrics = tmp_path_factory.mktemp("cpu") / "metrics.jsonl"
    return run_training((*FLAGS, "--metrics-jsonl", metrics)).check().losses()


# The layouts of the long tests are among those of tests/distributed/verification/test_emulated_layouts.py.
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "tensor" else pytest.mark.long) for name in LAYOUTS],
)
def test_a_training_on_two_devices_has_the_losses_of_the_cpu(
    layout: str, losses_on_cpu: list[float], tmp_path: Path
) -> None:
    flags = (*FLAGS, *LAYOUTS[layout], "--metrics-jsonl", tmp_path / "cuda.jsonl")
    result = run_training(flags, 2, env=emulated_environment(2, triton=False)).check()
    assert "race" not in result.stderr
    assert result.losses() == pytest.approx(losses_on_cpu, rel=1e-5)
