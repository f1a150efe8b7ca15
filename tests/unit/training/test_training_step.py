"""Steps of training: compiled regions, the steps before CUDA graphs, and what dropout drops."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.mlp import FeedForward
from megatron.core.transformer.norm import Norm
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer, compile_regions
from megatron.verification.cells import BASE_FLAGS, SHAPES, Layout, make_cell
from megatron.verification.run_cell import resolve_cell, run_cell
from tests.unit.config.command_lines import MINIMAL

TOLERANCE = 1e-5


def train(*flags: str) -> tuple[list[float], list[float]]:
    words = (*BASE_FLAGS, *flags)
    result = run_cell(words, 1, "plain", "float32", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    return result.losses, result.grad_norms


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ("qwen", "aot_eager"),  # graphs are taken and differentiated, and no C++ is compiled
        *(pytest.param(shape, "inductor", marks=pytest.mark.long) for shape in ("gpt2", "qwen")),
    ],
)
def test_numbers_are_those_without(shape: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain, compiled = train(*SHAPES[shape]), train(*SHAPES[shape], "--compile")
    assert compiled[0] == pytest.approx(plain[0], rel=TOLERANCE)
    assert compiled[1] == pytest.approx(plain[1], rel=TOLERANCE)


def set_up(log: Callable[[str], None]) -> list[torch.nn.Module]:
    config = resolve_cell((*BASE_FLAGS, "--compile"), 1, "float32")
    runtime = make_runtime(config, Device("cpu"))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log)
    return list(parts.chunks[0].modules())


def test_norms_and_activations_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def compile_eagerly(function: Callable[..., torch.Tensor], dynamic: bool) -> Callable[..., torch.Tensor]:
        compiled.append(lambda *args: function(*args))
        return compiled[-1]

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    lines: list[str] = []
    modules = set_up(lines.append)
    assert {m.compute for m in modules if isinstance(m, Norm)} == {compiled[0]}
    assert {m.activation for m in modules if isinstance(m, FeedForward)} == {compiled[1]}
    assert [line.split(" in ")[0] for line in lines if "--compile" in line] == [" > compiled norms and activations"]


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("\nNo working C++ compiler found\nin a long report")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    with pytest.raises(ConfigurationError) as caught:
        set_up(lambda line: None)
    assert caught.value.problems == (
        "--compile: torch.compile failed here (No working C++ compiler found); omit --compile",
    )


def test_a_model_without_layers_has_nothing_to_compile() -> None:
    lines: list[str] = []
    compile_regions([], resolve_cell(BASE_FLAGS, 1, "float32"), lines.append)
    assert len(lines) == 1


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
