"""Part 6: five steps of a tiny model with each feature on the GPU, against the same steps on the CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.device import Device
from megatron.core.ops.fp8_tensor import ROWS, SEGMENTS_OF_32, SEGMENTS_OF_128, WHOLE, Blocks
from tests.gpu.window import findings
from tests.gpu.window.parts.environment import why_no_float8
from tests.gpu.window.shapes import COMMON, NO_DROPOUT, Flags
from tests.gpu.window.train import largest_difference, train
from tests.gpu.window.window import Unsupported, Window
from tests.harness.training_run import REPOSITORY, read_metrics

NUM_STEPS, NUM_SMALL_STEPS = 5, 3


_OUTPUT_CHARACTERS = 500


@dataclass(frozen=True)
class Tolerance:
    """Say how far losses and gradient norms may be off, relative."""

    loss: float
    norm: float


HALF, EIGHT_BITS, ROUTED = Tolerance(5e-3, 5e-2), Tolerance(1e-2, 0.1), Tolerance(1e-2, 0.1)
"""From the CPU: in bf16, in FP8, and of experts, among which rounding chooses if two score alike."""
TWIN = Tolerance(1e-3, 1e-2)
"""From the same device without a feature that changes no value; some kernels add in any order."""
_FP8_RECIPES: tuple[tuple[str, Blocks], ...] = (
    ("delayed", WHOLE),
    ("tensorwise", WHOLE),
    ("rowwise", ROWS),
    ("blockwise", SEGMENTS_OF_128),
    ("mxfp8", SEGMENTS_OF_32),
)


@dataclass(frozen=True)
class Feature:
    """Name a feature by the flags that it adds to the tiny model.

    ``blocks`` are those of an FP8 recipe. If ``is_exact``, the results are compared with those of the model without the
    feature too. ``on_cpu`` are the flags of the run on the CPU if it cannot take the feature's own.
    """

    name: str
    flags: Flags
    blocks: Blocks | None = None
    is_exact: bool = False
    on_cpu: Flags | None = None


def tiny_flags(*, small: bool) -> Flags:
    """Return the tiny model, whose sizes are whole blocks of every FP8 recipe unless it is small."""
    hidden, ffn, length, vocab = (32, 64, 32, 60) if small else (256, 512, 256, 500)
    return (
        *("--num-layers", "2", "--hidden-size", str(hidden), "--ffn-hidden-size", str(ffn)),
        *("--num-attention-heads", "4", "--seq-length", str(length), "--max-position-embeddings", str(length)),
        *("--vocab-size", str(vocab), "--micro-batch-size", "2", "--global-batch-size", "4", "--bf16"),
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *(*COMMON, *NO_DROPOUT),
        # Weights and steps that are large enough to show a wrong gradient or update in the losses of a few steps. With
        # a learning rate of 1e-2 a change of 1e-4 in the results of FP8 matmuls grows to 10 % of the fifth loss.
        *("--lr", "3e-3", "--adam-eps", "1e-5", "--init-method-std", "0.1"),
    )


def features(*, small: bool) -> tuple[Feature, ...]:
    """Return every feature of this part but checkpoints and compilation."""
    window = "8,0" if small else "64,0"
    fp8 = ("--fp8-format", "hybrid", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max")
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32" if small else "128")
    short = ("--seq-length", "16", "--max-position-embeddings", "16")
    return (
        Feature("plain bf16", ()),
        *(Feature(f"FP8 {name}", (*fp8, "--fp8-recipe", name), blocks) for name, blocks in _FP8_RECIPES),
        Feature("experts", (*experts, "--moe-aux-loss-coeff", "0.01")),
        # A micro-batch has 32 tokens, each of which goes to one expert.
        Feature(
            "experts, some without tokens",
            (*experts, "--num-experts", "64", "--moe-router-topk", "1", "--moe-router-pre-softmax", *short),
        ),
        Feature("documents", ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")),
        Feature("attention window", ("--window-size", window)),
        Feature("capped attention scores", ("--attn-logit-softcapping", "20")),
        Feature("FSDP (ZeRO-3) of one rank", ("--use-torch-fsdp2",), is_exact=True),
        Feature("selective recompute", ("--recompute-granularity", "selective"), is_exact=True),
        Feature(
            "full recompute",
            ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
            is_exact=True,
        ),
        Feature("activation offload", ("--cpu-offloading", "--cpu-offloading-num-layers", "1"), is_exact=True),
        Feature("optimizer offload", ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"), is_exact=True),
        Feature(
            "8-bit optimizer state",
            ("--use-precision-aware-optimizer", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"),
        ),
        Feature("Muon", ("--optimizer", "muon")),
        Feature("CUDA graphs", ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2"), on_cpu=()),
    )


Results = tuple[list[float], list[float]]
"""Losses and gradient norms."""


def run(window: Window) -> None:
    """Train with each feature."""
    tiny = tiny_flags(small=window.small)
    steps = NUM_SMALL_STEPS if window.small else NUM_STEPS
    plain: Results | None = None
    for feature in features(small=window.small):
        results = _try(window, steps, tiny, feature)
        plain = plain if feature.flags else results
        if feature.is_exact and results is not None and plain is not None:
            name = f"{feature.name}, against the model without it"
            _compare(window, name, results, plain, TWIN, "the same device without the feature")
    name = "async save and bitwise resume"
    if window.is_time_for(name, 5.0):
        with window.attempt(name):
            check_resume(window, name, (*tiny, "--async-save"))
    # Compilation takes long: it comes last.
    _try(window, steps, tiny, Feature("--compile", ("--compile",), on_cpu=()))


def _try(window: Window, steps: int, tiny: Flags, feature: Feature) -> Results | None:
    name = f"{feature.name}, {steps} steps"
    if window.is_time_for(name, 1.0):
        with window.attempt(name):
            return _check(window, name, steps, tiny, feature)
    return None


def _check(window: Window, name: str, steps: int, tiny: Flags, feature: Feature) -> Results:
    if feature.blocks is not None and (reason := why_no_float8(window.capability, feature.blocks)) is not None:
        raise Unsupported(f"{reason}; a run multiplies the quantized operands in float32 instead")
    if window.is_emulated and feature.name == "--compile":
        raise Unsupported("the emulator does not compile")
    flags = (*tiny, *feature.flags)
    results = train(flags, window.device, steps)
    expected = train(flags if feature.on_cpu is None else (*tiny, *feature.on_cpu), Device("cpu"), steps)
    tolerance = HALF if feature.blocks is None else EIGHT_BITS
    if "--num-experts" in feature.flags:
        tolerance = ROUTED
    _compare(window, name, results, expected, tolerance, "the CPU")
    return results


def _compare(window: Window, name: str, results: Results, expected: Results, tolerance: Tolerance, twin: str) -> None:
    """Write the difference of the losses, or that of the gradient norms if that is out of its tolerance."""
    losses, norms = (largest_difference(actual, wanted) for actual, wanted in zip(results, expected))
    known = {"losses": results[0], "expected_losses": expected[0]}
    if losses <= tolerance.loss and not norms <= tolerance.norm:
        window.close_to(name, norms, tolerance.norm, f"the gradient norms of {twin}", **known)
        return
    what = f"the losses of {twin}; gradient norms too, within {tolerance.norm:g}"
    window.close_to(name, losses, tolerance.loss, what, norm_difference=norms, **known)


def _run_training(flags: Sequence[str | Path], timeout_s: float) -> None:
    """Run pretrain_gpt.py in the process group of this part, with which it is killed.

    Raises:
        RuntimeError: it failed; the text has the end of its output.
    """
    command = [sys.executable, REPOSITORY / "pretrain_gpt.py", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-_OUTPUT_CHARACTERS:]}")


def check_resume(window: Window, name: str, flags: Flags) -> None:
    """Train four iterations with a save after the second, resume there, and compare the last two bit by bit."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        common = (*flags, "--train-iters", "4", "--deterministic-mode", "--save-interval", "2")
        timeout = max(30.0, window.time_left())
        whole, resumed = folder / "whole", folder / "resumed"
        for place, further in ((whole, ()), (resumed, ("--load", whole, "--ckpt-step", "2"))):
            command = (*common, *further, "--save", place, "--metrics-jsonl", folder / f"{place.name}.jsonl")
            _run_training(command, timeout)
        first, second = (
            {line["iteration"]: (line["lm_loss"], line["grad_norm"]) for line in read_metrics(folder / f"{kind}.jsonl")}
            for kind in ("whole", "resumed")
        )
        last = [3, 4]
        if any(iteration not in lines for lines in (first, second) for iteration in last):
            raise RuntimeError(f"the runs have iterations {sorted(first)} and {sorted(second)}")
        wrong = [iteration for iteration in last if first[iteration] != second[iteration]]
        known: dict[str, object] = {"compared": "losses and gradient norms of the uninterrupted run, bit by bit"}
        known |= {"tolerance": 0.0, "difference": float(len(wrong))}
        if wrong:
            known["reason"] = f"iteration {wrong[0]}: {second[wrong[0]]} instead of {first[wrong[0]]}"
        window.add(name, findings.FAILED if wrong else findings.PASSED, **known)
