"""Steps of training: the steps before CUDA graphs, statistics of parameters, and what dropout drops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.core.ops import Fp8Quantizers, Nvfp4Quantizers
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.verification.cells import Layout, make_cell
from megatron.verification.run_cell import run_cell
from tests.unit.config.command_lines import MINIMAL

RAISED = "--cuda-graph-warmup-steps 1 is too small for --fp8-recipe delayed: the run uses 2"


@pytest.mark.parametrize(
    ("flags", "steps", "notes"),
    [
        ("", 3, []),
        ("--cuda-graph-warmup-steps 1", 1, []),
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe tensorwise", 1, []),
        # Its first step has other scales than the later ones.
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe delayed", 2, [RAISED]),
        ("--cuda-graph-warmup-steps 5 --fp8-format hybrid --fp8-recipe delayed", 5, []),
    ],
)
def test_delayed_scaling_needs_two_steps_before_a_capture(flags: str, steps: int, notes: list[str]) -> None:
    words = [*MINIMAL, "--cuda-graph-impl", "local", "--attention-dropout", "0", "--bf16", *flags.split()]
    resolved = resolve_arguments(words, 1)
    assert resolved.config.training.cuda_graph_warmup_steps == steps
    assert [note for note in resolved.notes if "warmup-steps" in note] == notes


def test_without_graphs_no_step_is_added() -> None:
    flags = "--bf16 --cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe delayed"
    assert resolve_arguments([*MINIMAL, *flags.split()], 1).config.training.cuda_graph_warmup_steps == 1


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "nvfp4"])
@pytest.mark.parametrize(
    "again", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_float8_weights_that_are_kept_for_a_step_change_no_number(
    monkeypatch: pytest.MonkeyPatch, recipe: str, again: str
) -> None:
    chosen = "--fp4-format e2m1" if recipe == "nvfp4" else f"--fp8-format hybrid --fp8-recipe {recipe}"
    flags = f"--bf16 {chosen} --global-batch-size 8 --micro-batch-size 2 {again}"
    flags += " --hidden-size 64 --ffn-hidden-size 96 --kv-channels 16"
    cell = make_cell("llama", Layout(), num_layers=1)
    quantizers = Nvfp4Quantizers if recipe == "nvfp4" else Fp8Quantizers
    quantize, counts, results = quantizers._weight, [], []

    def count(self: Fp8Quantizers, *args: Any, **more: Any) -> object:
        counts[-1] += 1
        return quantize(self, *args, **more)

    monkeypatch.setattr(quantizers, "_weight", count)
    for more in ("", "--disable-parameter-transpose-cache"):
        counts.append(0)
        words = (*cell.flags, *flags.split(), *more.split())
        results.append(run_cell(words, 1, cell.data, "bfloat16", pretrain_gpt.provide_model, pretrain_gpt.forward_step))
    own, other = results
    assert (own.losses, own.grad_norms) == (other.losses, other.grad_norms)
    for fragment, expected in zip(own.parameters, other.parameters, strict=True):
        np.testing.assert_array_equal(fragment.values, expected.values)
    num_passes = 3 if again else 2
    # Each of four micro-batches quantizes in each pass, except in evaluation.
    assert counts[1] >= 4 * num_passes * counts[0] > 0


@pytest.mark.parametrize(
    ("flag", "function"), [("--log-params-norm", "params_norm"), ("--log-num-zeros-in-grad", "_num_zeros")]
)
def test_statistics_of_all_parameters_are_computed_only_if_a_flag_asks(
    monkeypatch: pytest.MonkeyPatch, flag: str, function: str
) -> None:
    owner = MegatronOptimizer if function == "params_norm" else clip_grads
    compute, calls = getattr(owner, function), []

    def count(argument: object) -> object:
        calls.append(argument)
        return compute(argument)

    monkeypatch.setattr(owner, function, count)
    cell = make_cell("gpt2", Layout(), num_layers=1)
    for flags, is_computed in ((cell.flags, False), ((*cell.flags, flag), True)):
        run_cell(flags, 1, cell.data, "float32", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
        assert bool(calls) == is_computed


def test_a_run_drops_what_it_dropped_in_earlier_versions() -> None:
    flags = ("--hidden-dropout", "0.2", "--attention-dropout", "0.15", "--seed", "7")
    cell = make_cell("gpt2", Layout(), extra=flags, num_layers=1)
    result = run_cell(cell.flags, 1, cell.data, "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    assert result.losses == pytest.approx([4.329094754805, 4.193468559787, 3.866615253170], rel=1e-10, abs=0.0)
