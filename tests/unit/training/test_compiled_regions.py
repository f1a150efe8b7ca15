"""``--compile``: what is compiled, what is not and why, and the numbers of compiled layers beside plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import pretrain_gpt
from megatron.core import registry
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.ops import AttentionPattern
from megatron.core.transformer import FeedForward, Norm, SelfAttention, add_branch
from megatron.core.transformer.single_branch_layer import SingleBranchLayer
from megatron.training import register_activation, register_norm
from megatron.training.compiled_regions import compile_regions
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.cells import BASE_FLAGS, DROPOUT, SHAPES
from megatron.verification.hybrid_cells import HYBRID_SHAPES
from megatron.verification.run_cell import assemble, compare, gradient_floor, resolve_cell, run_cell

LOADED = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp", *DROPOUT)
FULLY_RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Largest differences of a gradient tensor, relative to its largest element."""


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """Return a function that counts the graphs that were compiled since the start of the test."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "dtype", "flags"),
    [
        ("llama", "float64", LOADED),
        pytest.param("qwen", "float32", LOADED, marks=pytest.mark.long),
        pytest.param("qwen", "bfloat16", LOADED, marks=pytest.mark.long),
        pytest.param("gpt2", "bfloat16", DROPOUT, marks=pytest.mark.long),
        pytest.param("gemma2", "float64", FULLY_RECOMPUTED, marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_without(
    shape: str, dtype: str, flags: tuple[str, ...], graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    after_set_up = []
    run = TrainingStep.run

    def run_and_count(*args: Any) -> Any:
        after_set_up.append(graphs())
        return run(*args)

    def train(*more: str) -> Any:
        words = (*BASE_FLAGS, *SHAPES[shape], *flags, *more)
        return run_cell(words, 1, "plain", dtype, pretrain_gpt.provide_model, pretrain_gpt.forward_step)

    plain = train()
    monkeypatch.setattr(TrainingStep, "run", run_and_count)
    compiled = train("--compile")
    reference = assemble(plain.gradients)
    mismatches, _ = compare(compiled.gradients, reference, BOUNDS[dtype], gradient_floor(reference))
    assert not mismatches
    assert compiled.losses == pytest.approx(plain.losses, rel=BOUNDS[dtype], abs=0.0)
    assert compiled.losses != plain.losses or dtype == "bfloat16"
    # All graphs were compiled when the model was built: the shapes and strides of the first calls were right.
    assert after_set_up[0] > 0
    assert {*after_set_up, graphs()} == {after_set_up[0]}


def set_up(log: Callable[[str], None], *flags: str, dtype: str = "float32") -> list[nn.Module]:
    config = resolve_cell((*BASE_FLAGS, *flags, "--compile"), 1, dtype)
    parts = build_model_and_optimizer(config, make_runtime(config, Device("cpu")), pretrain_gpt.provide_model, log)
    return list(parts.chunks[0].modules())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the functions that were given to torch.compile, which leaves them as they are."""
    functions: list[Any] = []

    def compile_eagerly(function: Any, **settings: Any) -> Any:
        assert settings["fullgraph"]
        functions.append(function)
        return lambda *args, **named: calls.append(function) or function(*args, **named)

    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    functions.append(calls)
    return functions


@pytest.mark.parametrize(
    ("flags", "parts", "left"),
    [
        (SHAPES["llama"], "residual addition, norms, rotary embedding, activation", ""),
        (SHAPES["qwen"], "residual addition, norms, rotary embedding, activation", ""),
        (SHAPES["apertus"], "residual addition, norms, rotary embedding, activation", ""),
        (SHAPES["gemma4"], "residual addition, norms, rotary embedding, activation", ""),
        (HYBRID_SHAPES["gated-attention"], "residual addition, norms, rotary embedding, activation", ""),
        (
            DROPOUT,
            "dropout, residual addition",
            "; not norms, activation: torch's kernels are as fast",
        ),
        (
            (
                *SHAPES["llama"],
                *("--num-query-groups", "4", "--multi-latent-attention", "--kv-lora-rank", "8", "--v-head-dim", "6"),
                *("--num-experts", "4", "--moe-ffn-hidden-size", "12"),
            ),
            "residual addition, norms, heads of MLA, activation of experts",
            "",
        ),
        (HYBRID_SHAPES["kimi-linear"], "residual addition, norms, activation, activation of experts, heads of MLA", ""),
    ],
    ids=["llama", "qwen", "apertus", "gemma4", "gated", "gpt2 with dropout", "MLA and experts", "Kimi Linear"],
)
def test_one_line_names_the_parts(flags: tuple[str, ...], parts: str, left: str, compiled: list[Any]) -> None:
    lines: list[str] = []
    set_up(lines.append, *flags)
    calls, *functions = compiled
    # Each function is compiled once for all layers, and run at once.
    assert len(functions) == len(parts.split(", "))
    assert set(calls) == set(functions)
    (line,) = [line for line in lines if "--compile" in line]
    start, _, rest = line.partition(" in ")
    assert start == f" > compiled {parts}"
    assert rest.partition(" (--compile)")[2] == left


def test_layers_of_a_pattern_call_what_is_compiled(compiled: list[Any]) -> None:
    modules = set_up(lambda line: None, *DROPOUT, "--hybrid-override-pattern=-*-*")
    calls = compiled[0]
    calls.clear()
    layer = next(module for module in modules if isinstance(module, SingleBranchLayer)).eval()
    layer(torch.ones(8, 2, 24, requires_grad=True), AttentionPattern(), None)
    assert add_branch in calls


def test_a_gated_activation_that_triton_computes_is_not_compiled(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.training.compiled_regions.runs_on_triton", lambda *tensors: True)
    for flags in ((), ("--mlp-gate-multiplier", "0.5")):
        lines: list[str] = []
        set_up(lines.append, *SHAPES["llama"], *flags)
        (line,) = [line for line in lines if "--compile" in line]
        assert "activation" in line.partition("; not ")[2], line
        assert "activation" not in line.partition("; not ")[0]


def test_functions_without_gradients_are_not_compiled(compiled: list[Any]) -> None:
    modules = set_up(lambda line: None, *SHAPES["llama"])
    calls = compiled[0]
    activation = next(module.activation for module in modules if isinstance(module, FeedForward))
    calls.clear()
    with torch.no_grad():
        activation(torch.zeros(7, 3, 80))
    assert not calls
    activation(torch.zeros(7, 3, 80))
    assert len(calls) == 1


class Scale(nn.Module):
    """A norm that is none."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_registered_norms_and_activations_are_compiled(compiled: list[Any]) -> None:
    register_norm("scale", Scale)
    register_activation("cube", lambda x: x**3)
    lines: list[str] = []
    modules = set_up(lines.append, "--normalization", "scale", "--activation-func", "cube")
    assert " > compiled norms of kind scale, activation in " in "\n".join(lines)
    norms = [module for module in modules if isinstance(module, Norm)]
    calls, *functions = compiled
    assert [norm.module for norm in norms] == [function for function in functions if isinstance(function, Scale)]
    x = torch.ones(1, 1, 24, requires_grad=True)
    calls.clear()
    assert torch.equal(Norm.forward(norms[0], x), torch.full((1, 1, 24), 2.0))
    assert calls == [norms[0].module]


@pytest.mark.full
def test_a_registered_norm_is_one_graph_for_all_layers(graphs: Callable[[], int]) -> None:
    register_norm("scale", Scale)
    modules = set_up(lambda line: None, "--normalization", "scale", dtype="float64")
    x = torch.ones(16, 1, 24, dtype=torch.float64, requires_grad=True)
    before = graphs()
    norms = [module for module in modules if isinstance(module, Norm)]
    for norm in norms:
        Norm.forward(norm, x).sum().backward()
    assert len(norms) > 2
    assert graphs() == before == 1
    assert torch.equal(x.grad if x.grad is not None else x, torch.full_like(x, 2.0 * len(norms)))


def test_attention_with_its_own_projections_is_named(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SelfAttention):
        def projected(self, *args: Any) -> Any:
            return super().projected(*args)

    monkeypatch.setattr("megatron.core.transformer.transformer_layer.SelfAttention", Own)
    lines: list[str] = []
    set_up(lines.append, *SHAPES["llama"])
    assert any(line.endswith("; not rotary embedding: Own has its own projections") for line in lines)


def test_nothing_to_compile_is_rejected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        set_up(lambda line: None)
    assert caught.value.problems == (
        "--compile: this model has nothing to compile (norms, activation: torch's kernels are as fast); omit it",
    )


def test_a_model_without_layers_has_nothing_to_compile() -> None:
    config = resolve_cell(BASE_FLAGS, 1, "float32")
    with pytest.raises(ConfigurationError, match="nothing to compile; omit it"):
        compile_regions([], config, make_runtime(config, Device("cpu")), lambda line: None)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (SHAPES["llama"], "ResidualNorm"),
        (("--normalization", "scale"), "--normalization scale"),
        (("--activation-func", "cube"), "--activation-func cube"),
    ],
)
def test_a_failure_is_one_line(flags: tuple[str, ...], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("\nNo working C++ compiler found\nin a long report")

    register_norm("scale", Scale)
    register_activation("cube", lambda x: x**3)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: fail)
    with pytest.raises(ConfigurationError) as caught:
        set_up(lambda line: None, *flags)
    assert caught.value.problems == (
        f"--compile: torch.compile failed for {part} (No working C++ compiler found); omit --compile",
    )
