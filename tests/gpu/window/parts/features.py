"""Part 6: five steps of a tiny model with each feature on the GPU, against the same steps on the CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.device import Device
from megatron.core.kernels.float8.quantised import ROWS, SEGMENTS_OF_32, SEGMENTS_OF_128, WHOLE, Blocks
from tests.gpu.window import findings
from tests.gpu.window.parts.environment import why_no_float8
from tests.gpu.window.shapes import COMMON, NO_DROPOUT, Flags
from tests.gpu.window.train import largest_difference, train
from tests.gpu.window.window import Unsupported, Window
from tests.harness.training_run import read_metrics, run_training

NUM_STEPS = 5
TOLERANCE, FP8_TOLERANCE, TWIN_TOLERANCE = 1e-2, 2e-2, 1e-3
"""Largest relative difference of a loss: from the CPU in bf16, in FP8, and from the same model without the feature."""
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

    ``blocks`` are those of an FP8 recipe. If ``is_exact``, the losses are those of the model without the feature, which
    is compared too. ``on_cpu`` are the flags of the run on the CPU if it cannot take the feature's own.
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
    )


def features(*, small: bool) -> tuple[Feature, ...]:
    """Return every feature of this part but those that need a checkpoint."""
    window = "8" if small else "64"
    fp8 = ("--fp8-format", "hybrid", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max")
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32" if small else "128")
    return (
        Feature("plain bf16", ()),
        *(Feature(f"FP8 {name}", (*fp8, "--fp8-recipe", name), blocks) for name, blocks in _FP8_RECIPES),
        Feature("experts", (*experts, "--moe-aux-loss-coeff", "0.01")),
        # One expert of sixteen at most is chosen by any of so few tokens often enough that some stay empty.
        Feature(
            "experts, some without tokens",
            (*experts, "--num-experts", "64", "--moe-router-topk", "1", "--seq-length", "16"),
        ),
        Feature("documents", ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")),
        Feature("attention window", ("--window-size", window)),
        Feature("capped attention scores", ("--attn-logit-softcapping", "20")),
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
        Feature("--compile", ("--compile",), on_cpu=()),
        Feature("CUDA graphs", ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2"), on_cpu=()),
    )


def run(window: Window) -> None:
    """Train with each feature."""
    tiny = tiny_flags(small=window.small)
    plain: list[float] = []
    for feature in features(small=window.small):
        name = f"{feature.name}, losses of {NUM_STEPS} steps"
        if not window.is_time_for(name, 1.0):
            continue
        with window.attempt(name):
            losses = _check(window, name, tiny, feature, plain)
            plain = plain or (losses if not feature.flags else plain)
    for name, flags in (("async save and resume", ("--async-save",)), ("save and resume", ())):
        if window.is_time_for(name, 5.0):
            with window.attempt(name):
                check_resume(window, name, (*tiny, *flags))


def _check(window: Window, name: str, tiny: Flags, feature: Feature, plain: Sequence[float]) -> list[float]:
    if feature.blocks is not None and (reason := why_no_float8(window, feature.blocks)) is not None:
        raise Unsupported(f"{reason}; a run multiplies the quantized operands in float32 instead")
    if window.is_emulated and feature.name == "--compile":
        raise Unsupported("the emulator does not compile")
    flags = (*tiny, *feature.flags)
    losses, norms = train(flags, window.device, NUM_STEPS)
    on_cpu = flags if feature.on_cpu is None else (*tiny, *feature.on_cpu)
    expected, expected_norms = train(on_cpu, Device("cpu"), NUM_STEPS)
    tolerance = TOLERANCE if feature.blocks is None else FP8_TOLERANCE
    known = {"losses": losses, "cpu_losses": expected}
    known |= {"norm_difference": largest_difference(norms, expected_norms)}  # type: ignore[dict-item]
    window.close_to(name, largest_difference(losses, expected), tolerance, "the losses of the CPU", **known)
    if feature.is_exact and plain:
        difference = largest_difference(losses, plain)
        window.close_to(
            f"{feature.name}, against the model without it",
            difference,
            TWIN_TOLERANCE,
            "the losses of the same device without the feature",
        )
    return losses


def check_resume(window: Window, name: str, flags: Flags, train_command: Callable[..., object] = run_training) -> None:
    """Train four iterations with a save after the second, resume there, and compare the last two bit by bit."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        common = (*flags, "--train-iters", "4", "--deterministic-mode", "--save-interval", "2")
        timeout = max(30.0, window.time_left())
        whole, resumed = folder / "whole", folder / "resumed"
        for place, further in ((whole, ()), (resumed, ("--load", whole, "--ckpt-step", "2"))):
            command = (*common, *further, "--save", place, "--metrics-jsonl", folder / f"{place.name}.jsonl")
            result = train_command(command, timeout_s=timeout)
            result.check()  # type: ignore[attr-defined]
        first, second = (
            {line["iteration"]: (line["lm_loss"], line["grad_norm"]) for line in read_metrics(folder / f"{kind}.jsonl")}
            for kind in ("whole", "resumed")
        )
        last = [3, 4]
        if any(iteration not in lines for lines in (first, second) for iteration in last):
            raise RuntimeError(f"the runs have iterations {sorted(first)} and {sorted(second)}")
        wrong = [iteration for iteration in last if first[iteration] != second[iteration]]
        known: dict[str, object] = {"compared": "losses and gradient norms of the run that went on, bit by bit"}
        known |= {"tolerance": 0.0, "difference": float(len(wrong))}
        if wrong:
            known["reason"] = f"iteration {wrong[0]}: {second[wrong[0]]} instead of {first[wrong[0]]}"
        window.add(name, findings.FAILED if wrong else findings.PASSED, **known)
        shutil.rmtree(whole, ignore_errors=True)
