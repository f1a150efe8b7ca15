"""Features of the project on emulated devices, each in a small training with the losses of the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.training import launches_of, operators_of, run_on_device, settings, train_on_device
from tests.harness.faults import Faults
from tests.harness.forked_training import NO_FAULTS, ForkedRun, fork_training
from tests.harness.long_cases import some_long

pytestmark = pytest.mark.full

BASE = """--hidden-size 128 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64 --hidden-dropout 0
    --attention-dropout 0 --train-iters 3 --lr-decay-iters 20 --lr-warmup-iters 0 --eval-interval 1000 --eval-iters 0"""
UNTIED = "--untie-embeddings-and-output-weights"
CHUNKS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"


@dataclass(frozen=True)
class Feature:
    """Name a feature's flags, its ranks, the operators that only CUDA has, and how near its losses are to the CPU's."""

    flags: str
    nproc: int = 1
    operators: tuple[str, ...] = ()
    tolerance: float = 1e-3
    gpu: str = "h100"
    cpu_flags: str | None = None


FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
EXACT = 1e-5
"""In float32 the emulator's kernels are those of the CPU: what differs is the order of sums between ranks."""
FLASH = "aten::_scaled_dot_product_flash_attention"
SCALED = "aten::_scaled_mm"
FEATURES = {
    "bf16": Feature("--bf16", operators=(FLASH, "aten::addmm")),
    "fp8 delayed": Feature(f"{FP8} delayed", operators=(SCALED,), tolerance=3e-3),
    "fp8 tensorwise": Feature(f"{FP8} tensorwise", operators=(SCALED,), tolerance=3e-3),
    "fp8 rowwise": Feature(f"{FP8} rowwise", operators=(SCALED,), tolerance=3e-3),
    "fp8 blockwise": Feature(f"{FP8} blockwise", operators=(SCALED, f"{SCALED}_v2"), tolerance=3e-3),
    "fp8 mxfp8": Feature(f"{FP8} mxfp8", operators=(SCALED,), tolerance=3e-3, gpu="b200"),
    "fp8 on a gpu without": Feature(f"{FP8} tensorwise", tolerance=3e-3, gpu="a100"),
    "experts": Feature(f"--bf16 {EXPERTS} --moe-grouped-gemm", operators=("aten::_grouped_mm",), tolerance=3e-3),
    "experts on b200": Feature(
        f"--bf16 {EXPERTS} --moe-grouped-gemm", operators=("aten::_grouped_mm",), tolerance=3e-3, gpu="b200"
    ),
    "experts in fp8": Feature(
        f"--bf16 {EXPERTS} --fp8-format e4m3 --fp8-recipe rowwise --swiglu --disable-bias-linear",
        operators=("aten::_scaled_grouped_mm",),
        tolerance=3e-3,
    ),
    "experts in fp8, dropped": Feature(
        f"--bf16 {EXPERTS} --fp8-format e4m3 --fp8-recipe rowwise --swiglu --disable-bias-linear "
        "--moe-expert-capacity-factor 0.75",
        operators=("aten::_scaled_grouped_mm",),
        tolerance=3e-3,
    ),
    # torch has no grouped GEMM with a scale per row there.
    "experts in fp8 on b200": Feature(
        f"--bf16 {EXPERTS} --fp8-format e4m3 --fp8-recipe rowwise --swiglu --disable-bias-linear",
        operators=(SCALED,),
        tolerance=3e-3,
        gpu="b200",
    ),
    "experts in fp8 over ranks": Feature(
        f"--bf16 {EXPERTS} --fp8-format e4m3 --fp8-recipe rowwise --swiglu --disable-bias-linear "
        "--expert-model-parallel-size 2",
        *(2, ("aten::_scaled_grouped_mm", "nccl:all_to_all"), 3e-3),
    ),
    "experts over ranks": Feature(f"{EXPERTS} --expert-model-parallel-size 2", 2, ("nccl:all_to_all",), EXACT),
    "experts over tensor-parallel ranks": Feature(
        f"{EXPERTS} {TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        *(2, ("nccl:all_to_all",), EXACT),
    ),
    "experts over ranks, padded": Feature(f"{EXPERTS} {PADDED} --expert-model-parallel-size 2", 2, tolerance=EXACT),
    "one expert per rank": Feature(
        f"--bf16 {EXPERTS} --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --expert-model-parallel-size 2",
        *(2, ("aten::bmm",), 3e-3),
    ),
    "experts, tokens dropped": Feature(
        f"--bf16 {EXPERTS} --moe-expert-capacity-factor 0.75", operators=("aten::_grouped_mm",), tolerance=3e-3
    ),
    "overlapped tensor parallelism": Feature(
        f"--bf16 {TP2} --tp-comm-overlap", 2, ("symm_mem::barrier",), cpu_flags="--bf16"
    ),
    "overlapped tensor parallelism of four": Feature(
        "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap",
        *(4, ("symm_mem::barrier",), EXACT),
        cpu_flags="",
    ),
    "overlapped tensor parallelism in fp8": Feature(
        f"{FP8} tensorwise {TP2} --tp-comm-overlap --tp-comm-overlap-rs-dgrad",
        *(2, ("symm_mem::barrier", SCALED), 3e-3),
        cpu_flags=f"{FP8} tensorwise",
    ),
    "overlapped tensor parallelism in fp8 by rows": Feature(
        f"{FP8} rowwise {TP2} --tp-comm-overlap --tp-comm-overlap-rs-dgrad",
        *(2, ("symm_mem::barrier", SCALED), 3e-3),
        cpu_flags=f"{FP8} rowwise",
    ),
    "documents": Feature(
        "--reset-attention-mask --reset-position-ids --eod-mask-loss",
        operators=("aten::_scaled_dot_product_efficient_attention",),
        tolerance=EXACT,
    ),
    "graphs": Feature(
        "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --train-iters 4",
        operators=("cudaGraphLaunch",),
        tolerance=EXACT,
        cpu_flags="",
    ),
    "adapters": Feature("--lora-rank 4", tolerance=EXACT),
    "muon": Feature("--optimizer muon --muon-fp32-matmul-prec highest", tolerance=EXACT),
    # Gradients differ in their last bits, of which roundings to bf16 make more. Equal gradients have equal updates
    # (checks_gemm.py).
    "muon in bf16": Feature("--optimizer muon", tolerance=1e-4),
    "activation offload": Feature("--num-layers 3 --cpu-offloading --cpu-offloading-num-layers 2", tolerance=EXACT),
    "optimizer offload": Feature("--use-distributed-optimizer --optimizer-cpu-offload", tolerance=EXACT),
    "sharded weights": Feature("--use-torch-fsdp2", 2, ("nccl:all_gather",), EXACT),
    "evaluation": Feature("--eval-interval 2 --eval-iters 2", tolerance=EXACT),
}
LIKE_OTHERS = {
    *("fp8 tensorwise", "fp8 rowwise", "experts on b200", "experts in fp8, dropped", "experts in fp8 on b200"),
    *("experts over tensor-parallel ranks", "experts, tokens dropped", "overlapped tensor parallelism in fp8 by rows"),
    "evaluation",
}
"""Features that others resemble most: the long tests try them."""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Path:
    """Build the emulator, or skip where it cannot be: on a CUDA build of torch, or without a compiler."""
    try:
        return built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ForkedRun]:
    """Return what trains on the CPU, with each set of flags once."""

    @functools.cache
    def train(flags: str, nproc: int) -> ForkedRun:
        args = toy_args(tmp_path_factory.mktemp("cpu"), BASE, flags, save=False)
        return fork_training([*args, "--metrics-jsonl", str(tmp_path_factory.mktemp("m") / "m.jsonl")], nproc).check()

    return train


def args_of(folder: Path, flags: str, *, save: bool = False) -> list[str]:
    """Return a command line whose process group is NCCL's."""
    args = toy_args(folder, BASE, flags, save=save)
    place = args.index("--distributed-backend")
    return [*args[:place], *args[place + 2 :], "--metrics-jsonl", str(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", some_long(FEATURES, FEATURES.keys() - LIKE_OTHERS))
def test_a_feature_has_the_losses_of_the_cpu(
    name: str, on_cpu: Callable[[str, int], ForkedRun], tmp_path: Path
) -> None:
    feature = FEATURES[name]
    run = train_on_device(args_of(tmp_path, feature.flags), feature.nproc, feature.gpu)
    assert set(feature.operators) <= operators_of(run)
    if feature.cpu_flags is None:
        reference = on_cpu(feature.flags, feature.nproc)
    else:
        length = "--train-iters 4" if "--train-iters 4" in feature.flags else ""
        reference = on_cpu(f"{feature.cpu_flags} {length}", 1)
    assert run.losses() == pytest.approx(reference.losses(), rel=feature.tolerance)
    evaluations = [line["lm_loss"] for line in run.evaluations("validation")]
    expected = [line["lm_loss"] for line in reference.evaluations("validation")]
    assert evaluations == pytest.approx(expected, rel=feature.tolerance)
    assert bool(evaluations) == (name == "evaluation")


def test_an_asynchronous_save_is_resumed_from(tmp_path: Path) -> None:
    flags = "--bf16 --use-distributed-optimizer --async-save --save-interval 2"
    whole = train_on_device(args_of(tmp_path / "whole", f"{flags} --train-iters 4", save=True), 2)
    folder = tmp_path / "parts"
    train_on_device(args_of(folder, f"{flags} --train-iters 2", save=True), 2)
    resumed = train_on_device(args_of(folder, f"{flags} --train-iters 4", save=True), 2)
    assert exact_figures(resumed.iterations())[-2:] == exact_figures(whole.iterations())[-2:]


@pytest.mark.parametrize(
    ("flags", "nproc"),
    [
        pytest.param("--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2", 1, id="fp16"),
        pytest.param(
            "--bf16 --use-distributed-optimizer --overlap-param-gather-with-optimizer-step --overlap-grad-reduce",
            2,
            id="gathers",
            marks=pytest.mark.long,
        ),
    ],
)
def test_captured_optimizer_steps_equal_eager_steps(flags: str, nproc: int, tmp_path: Path) -> None:
    """The learning rate, the weight decay and the loss scale change in each replay."""
    flags += " --overlap-param-gather" if nproc > 1 else ""
    shape = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --seq-length 8 --max-position-embeddings 8"
    decay = "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.2"
    common = f"{shape} {decay} {flags} --ddp-bucket-size 2000 --train-iters 6"
    graphs = "--optimizer-cuda-graph --cuda-graph-warmup-steps 1"
    eager, captured = (
        train_on_device(args_of(tmp_path / name, f"{common} {more}"), nproc, triton=True)
        for name, more in (("eager", ""), ("captured", graphs))
    )
    assert exact_figures(captured.iterations()) == exact_figures(eager.iterations())
    lines = captured.iterations()
    assert len({line["learning_rate"] for line in lines if not line["skipped"]}) >= 2
    assert (len({line["loss_scale"] for line in lines}) > 1) == ("--fp16" in flags)


@pytest.mark.parametrize(
    ("flags", "nproc", "tolerance"),
    [
        # The gradient of a hidden value is rounded once instead of twice: half a unit of the last place.
        pytest.param("--bf16", 1, 2**-9, id="bf16", marks=pytest.mark.long),
        pytest.param(
            f"--squared-relu --recompute-granularity full --recompute-method uniform {TP2}", 2, EXACT, id="tp"
        ),
    ],
)
def test_activations_in_gemms_do_not_change_a_training(
    flags: str, nproc: int, tolerance: float, tmp_path: Path
) -> None:
    shape = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 40 --seq-length 8 --max-position-embeddings 8"
    common = f"{shape} {flags} --recompute-num-layers 1 --train-iters 3"
    apart, fused = (
        train_on_device(args_of(tmp_path / name, f"{common} {more}"), nproc, triton=True).iterations()
        for name, more in (("apart", ""), ("fused", "--gemm-activation-fusion"))
    )
    for key in ("lm_loss", "grad_norm"):
        assert [line[key] for line in fused] == pytest.approx([line[key] for line in apart], rel=tolerance)
    assert fused[0]["lm_loss"] != fused[-1]["lm_loss"]


GATED_IN_FP8 = f"""{FP8} delayed --swiglu --disable-bias-linear --hidden-size 32 --ffn-hidden-size 64 --seq-length 16
    --max-position-embeddings 16 --train-iters 4"""
"""From the second step on, a Triton program casts SwiGLU as it computes it, and another the gradient of its input."""
CASTS = "triton:gated_cast_program", "triton:gated_gradient_cast_program"


@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param(f"{TP2} --recompute-granularity full --recompute-method uniform", marks=pytest.mark.long),
        pytest.param(f"{TP2} --tp-comm-overlap", marks=pytest.mark.long),
    ],
)
def test_activations_in_fp8_have_the_losses_of_the_cpu(
    more: str, on_cpu: Callable[[str, int], ForkedRun], tmp_path: Path
) -> None:
    flags = f"{GATED_IN_FP8} --num-layers 1 --recompute-num-layers 1 {more}"
    nproc = 2 if more else 1
    run = train_on_device(args_of(tmp_path, flags), nproc, triton=True)
    assert operators_of(run) >= {*CASTS}
    reference = on_cpu(flags.replace("--tp-comm-overlap", ""), nproc)
    losses, expected = ([line["lm_loss"] for line in each.iterations()] for each in (run, reference))
    assert losses == pytest.approx(expected, rel=3e-3)
    assert losses[0] != losses[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "nproc", "more"),
    [
        ("--num-layers 1", 1, "--cuda-graph-impl local --cuda-graph-warmup-steps 2"),
        ("--num-layers 2 --pipeline-model-parallel-size 2", 2, "--pipeline-schedule zero-bubble"),
        ("--num-layers 1", 2, "--use-torch-fsdp2"),
    ],
)
def test_activations_in_fp8_do_not_depend_on_the_schedule(flags: str, nproc: int, more: str, tmp_path: Path) -> None:
    runs = [
        train_on_device(args_of(tmp_path / name, f"{GATED_IN_FP8} {flags} {added}"), nproc, triton=True)
        for name, added in (("plain", ""), ("other", more))
    ]
    assert all(operators_of(run) >= {*CASTS} for run in runs)
    losses, expected = ([line["lm_loss"] for line in run.iterations()] for run in runs)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "nproc", "triton"),
    [
        pytest.param("--bf16", 1, True, id="tied"),
        pytest.param(f"--bf16 {UNTIED} {CHUNKS}", 1, False, id="untied, chunks", marks=pytest.mark.long),
        pytest.param("--fp16 --pipeline-model-parallel-size 2", 2, False, id="pipeline, tied", marks=pytest.mark.long),
        pytest.param(
            *(f"--bf16 {UNTIED} --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", 2, False),
            id="zero-bubble, untied",
            marks=pytest.mark.long,
        ),
        pytest.param(
            f"--bf16 {TP2} --hidden-dropout 0.1", 2, False, id="tensor parallel, tied", marks=pytest.mark.long
        ),
        pytest.param(f"--bf16 {TP2} {UNTIED}", 2, True, id="tensor parallel, untied", marks=pytest.mark.long),
    ],
)
def test_steps_with_captured_losses_equal_eager_steps(flags: str, nproc: int, triton: bool, tmp_path: Path) -> None:
    # The Triton program of a residual addition and the next layer's norm does not join layers that are captured.
    num_layers = 1 if triton else 2
    shape = f"--num-layers {num_layers} --hidden-size 16 --ffn-hidden-size 32"
    shape += " --seq-length 8 --max-position-embeddings 8"
    graphs = "--cuda-graph-impl local --loss-cuda-graph --cuda-graph-warmup-steps 1"
    eager, captured = (
        train_on_device(args_of(tmp_path / name, f"{shape} {flags} --train-iters 4 {more}"), nproc, triton=triton)
        for name, more in (("eager", ""), ("captured", graphs))
    )
    assert exact_figures(captured.iterations()) == exact_figures(eager.iterations())
    # Three steps of two micro-batches on the first rank: its embedding, its layers and its loss, forward and backward.
    units = 1 + num_layers // 2 if "pipeline" in flags else 2 + num_layers
    weights = num_layers // 2 if "zero" in flags else 0
    assert launches_of(captured)["cudaGraphLaunch"] == 3 * 2 * (2 * units + weights)


LATE = "--overlap-step-results"


def train_to_the_end(folder: Path, flags: str, faults: Faults = NO_FAULTS, nproc: int = 2) -> ForkedRun:
    """Train twelve iterations on devices, or until an error; a log line is due after each fourth iteration."""
    common = "--rerun-mode disabled --log-interval 4 --train-iters 12 --bf16 --use-distributed-optimizer"
    args = args_of(folder, f"{common} --overlap-grad-reduce --overlap-param-gather {flags}", save=True)
    return fork_training(args, nproc, faults, 300.0, run_on_device, settings("h100"))


def reason_of(run: ForkedRun) -> str:
    """Return the line with which a run ended."""
    return next(line for text in run.errors for line in text.splitlines() if "not finite" in line)


def test_results_that_are_read_late_are_those_read_at_once(tmp_path: Path) -> None:
    flags = "--eval-interval 6 --eval-iters 1 --save-interval 5 --manual-gc --manual-gc-interval 3"
    late, at_once = (train_to_the_end(tmp_path / name, f"{flags} {name}").check() for name in (LATE, ""))
    assert exact_figures(late.metrics) == exact_figures(at_once.metrics)
    assert len(late.iterations()) == 12
    lines = [[line for line in run.stdout.splitlines() if "iteration" in line] for run in (late, at_once)]
    numbers = [[line.split("iteration", 1)[1].split("|")[0].split()[0] for line in of_run] for of_run in lines]
    assert numbers[0] == numbers[1]


def test_a_bad_step_that_is_noticed_late_is_reported_as_at_once(tmp_path: Path) -> None:
    """Iteration 6 begins before the host sees that a gradient of iteration 5 is not finite."""
    runs = [train_to_the_end(tmp_path / name, name, Faults(poisoned=(18,))) for name in (LATE, "--no-load-optim")]
    assert all(status == 1 for run in runs for status in run.statuses)
    assert "iteration 5, sample ids 16, 17, 18, 19" in reason_of(runs[0])
    assert reason_of(runs[0]) == reason_of(runs[1])
    assert exact_figures(runs[0].iterations()) == exact_figures(runs[1].iterations())


def test_a_fault_that_does_not_recur_is_reported_as_such(tmp_path: Path) -> None:
    run = train_to_the_end(tmp_path, LATE, Faults(rank=1, nan_loss_at=(9,)))
    assert all(status == 1 for status in run.statuses)
    assert "all are finite if the step is computed again" in reason_of(run)
    assert "(iteration 9, sample ids 32, 33, 34, 35)" in reason_of(run)
    assert [line["iteration"] for line in run.iterations()] == list(range(1, 9))


def test_a_signal_ends_the_run_one_iteration_later_and_all_is_saved(tmp_path: Path) -> None:
    flags = f"{LATE} --exit-signal-handler"
    ended = train_to_the_end(tmp_path, flags, Faults(rank=1, sigterm_at=5)).check()
    assert [line["iteration"] for line in ended.iterations()] == list(range(1, 7))
    resumed = train_to_the_end(tmp_path, flags).check()
    whole = train_to_the_end(tmp_path / "whole", LATE).check()
    assert exact_figures(resumed.iterations())[-6:] == exact_figures(whole.iterations())[-6:]


def test_the_last_iteration_before_an_error_is_reported(tmp_path: Path) -> None:
    run = train_to_the_end(tmp_path, LATE, Faults(rank=0, data_error_at=13), nproc=1)
    assert all(run.statuses)
    assert [line["iteration"] for line in run.iterations()] == list(range(1, 7))
